"""Advantages that need columns (scores.py): GAE, and every estimator if a KL penalty is subtracted from the
rewards.

With mu the sampler and V the critic's values, for the sampled tokens t = 1 .. T of a trajectory, all its
segments end to end:

    penalty_t    kl_coef * KL estimate of log ref - log mu at t, if `use_kl_in_reward`, else 0        (kl.py)
    gae          r_t = - penalty_t, plus the trajectory's reward at t = T
                 delta_t = r_t + gamma V_t+1 - V_t  with V_T+1 = 0
                 A_t = delta_t + gamma lambda A_t+1,  return_t = A_t + V_t
                 normalized: (A - mean) / sqrt(variance + 1e-8), over the sampled tokens of the optimizer step
    others       advantages.py, on the reward minus the sum of the trajectory's penalties

Sources: Schulman et al. 2016 (arXiv:1506.02438), equations 11 and 16, for GAE; Ouyang et al. 2022
(arXiv:2203.02155), section 3.5, for the penalty.

What it is not: truncated responses are not bootstrapped. They count as ended, so no reward is expected after
them. Values and advantages step from one sampled token to the next, and skip the tokens of tools between
them.

Legend: F = sampled tokens of a rank's share of an optimizer step, trajectory by trajectory; P = its
trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl_cli.contracts.trajectories import GroupPayload
from asyncrl_cli.measure.values import Value
from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.advantages import advantages_of
from asyncrl_cli.train.balance import OptimizerStepPlan
from asyncrl_cli.train.batch import Microbatch
from asyncrl_cli.train.kl import kl_of
from asyncrl_cli.train.losses import Metric
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.reduction import reduced
from asyncrl_cli.train.scores import REF, VALUES, deal, joined, sampled_tokens

ADVANTAGES, RETURNS = "advantages", "returns"
_PENALTIES = "penalties"
VARIANCE_EPSILON = 1e-8

Floats = NDArray[np.float64]


def credit(
    plan: OptimizerStepPlan,
    parts: Sequence[Microbatch],
    counts_P: Sequence[int],
    *,
    algorithm: AlgorithmSection,
    ranks: Ranks,
) -> dict[str, Metric]:
    """Add the column of advantages to an optimizer step's microbatches, and with `gae` also the column of
    returns. A collective.

    `counts_P`: sampled tokens of each trajectory in the plan. Returns `reward/kl_penalty`, if there is a
    penalty: its mean over trajectories.
    """
    ends_P = np.cumsum(counts_P, dtype=np.int64)
    penalties_F = _penalties(parts, sum(counts_P), algorithm)
    sums_P = (
        np.diff(np.cumsum(penalties_F, dtype=np.float64)[ends_P - 1], prepend=0.0)
        if len(ends_P)
        else np.zeros(0)
    )
    if algorithm.has_critic:
        rewards_F = -penalties_F
        rewards_F[ends_P - 1] += [plan.rewards[t.group][t.trajectory] for t in plan.trajectories]
        advantages_F = _with_critic(rewards_F, ends_P, parts, algorithm, ranks)
    else:
        advantages_F = np.repeat(_of_trajectories(plan, sums_P, algorithm, ranks), counts_P)
    deal(ADVANTAGES, parts, _to_device(advantages_F, ranks))
    if not algorithm.use_kl_in_reward:
        return {}
    return {
        "reward/kl_penalty": Metric(kind="mean", amount=_to_device(sums_P, ranks).sum(), weight=len(sums_P))
    }


def credited(
    steps: Sequence[OptimizerStepPlan],
    work: Sequence[list[Microbatch]],
    payloads: Mapping[int, GroupPayload],
    *,
    algorithm: AlgorithmSection,
    ranks: Ranks,
) -> dict[str, Value]:
    """`credit` for all optimizer steps of a train step; returns their metrics. A collective."""
    seen = [
        credit(step, parts, sampled_tokens(step, payloads), algorithm=algorithm, ranks=ranks)
        for step, parts in zip(steps, work, strict=True)
    ]
    return reduced(ranks, seen) if seen[0] else {}


def gae(rewards_F: Floats, values_F: Floats, ends_P: NDArray[np.int64], gamma: float, lam: float) -> Floats:
    """Advantages of trajectories laid end to end, of at least one token each; trajectory p ends before index
    `ends_P[p]`."""
    is_last_F = np.zeros(len(rewards_F), dtype=bool)
    is_last_F[ends_P - 1] = True
    following_F = np.where(is_last_F, 0.0, np.append(values_F[1:], 0.0))
    deltas = (rewards_F + gamma * following_F - values_F)[::-1].tolist()
    decays = np.where(is_last_F, 0.0, gamma * lam)[::-1].tolist()
    backwards = accumulate(
        zip(deltas, decays, strict=True), lambda later, now: now[0] + now[1] * later, initial=0.0
    )
    return np.array(list(backwards)[:0:-1])


def whitened(values_F: Floats, ranks: Ranks) -> Floats:
    """Shifted and scaled to mean 0 and standard deviation 1 (n - 1 in its denominator) over all ranks. A
    collective."""
    number, total = _summed([len(values_F), values_F.sum()], ranks)
    centred_F = values_F - total / max(number, 1.0)
    (squares,) = _summed([np.square(centred_F).sum()], ranks)
    return centred_F / np.sqrt(squares / max(number - 1.0, 1.0) + VARIANCE_EPSILON)


def _penalties(parts: Sequence[Microbatch], num_tokens: int, algorithm: AlgorithmSection) -> Floats:
    if not algorithm.use_kl_in_reward:
        return np.zeros(num_tokens)
    for part in parts:
        part.columns[_PENALTIES] = algorithm.kl_coef * kl_of(
            algorithm.kl_penalty, part.columns[REF] - part.logp_mu_N
        )
    return _on_host(joined(_PENALTIES, parts, num_tokens))


def _with_critic(
    rewards_F: Floats,
    ends_P: NDArray[np.int64],
    parts: Sequence[Microbatch],
    algorithm: AlgorithmSection,
    ranks: Ranks,
) -> Floats:
    values_F = _on_host(joined(VALUES, parts, len(rewards_F)))
    advantages_F = gae(rewards_F, values_F, ends_P, algorithm.gamma, algorithm.lam)
    deal(RETURNS, parts, _to_device(advantages_F + values_F, ranks))
    return whitened(advantages_F, ranks) if algorithm.normalize_advantages else advantages_F


def _of_trajectories(
    plan: OptimizerStepPlan, sums_P: Floats, algorithm: AlgorithmSection, ranks: Ranks
) -> Floats:
    """Advantages of this rank's trajectories, computed from the rewards and penalties of all ranks."""
    everything = [(group, index) for group, of in plan.rewards.items() for index in range(len(of))]
    places = {key: place for place, key in enumerate(everything)}
    own = [places[planned.group, planned.trajectory] for planned in plan.trajectories]
    taken = np.zeros(len(places))
    taken[own] = sums_P
    from_all = iter(_summed(taken, ranks))
    advantages = advantages_of(
        [[reward - next(from_all) for reward in of] for of in plan.rewards.values()], algorithm
    )
    return np.array([advantage for of in advantages for advantage in of])[own]


def _summed(values: Sequence[float] | Floats, ranks: Ranks) -> list[float]:
    return ranks.sum(torch.tensor(values, dtype=torch.float64, device=ranks.device)).tolist()


def _on_host(values_F: torch.Tensor) -> Floats:
    return values_F.double().cpu().numpy()


def _to_device(values: Floats, ranks: Ranks) -> torch.Tensor:
    return torch.from_numpy(values).float().to(ranks.device)
