"""Advantages that need columns (batch.py): GAE, and every estimator if a KL penalty is subtracted from the
rewards.

With mu the sampler and V the critic's values, for the sampled tokens t = 1 .. T of a trajectory, all its
segments end to end:

    penalty_t    kl_coef * KL estimate of log ref - log mu at t, if `use_kl_in_reward`, else 0
    gae          r_t = - penalty_t, plus the trajectory's reward at t = T
                 delta_t = r_t + gamma V_t+1 - V_t  with V_T+1 = 0
                 A_t = delta_t + gamma lambda A_t+1,  return_t = A_t + V_t
                 normalized: (A - mean) / sqrt(variance + 1e-8), over the sampled tokens of the optimizer step
    others       step_plan.py, on the reward minus the sum of the trajectory's penalties

Sources: Schulman et al. 2016 (arXiv:1506.02438), equations 11 and 16, for GAE; Ouyang et al. 2022
(arXiv:2203.02155), section 3.5, for the penalty.

What it is not: truncated responses are not bootstrapped. They count as ended, so no reward is expected after
them. Values and advantages step from one sampled token to the next, and skip the tokens of tools between
them.

Legend: F = sampled tokens of a rank's share of an optimizer step, trajectory by trajectory; P = its
trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl_cli.measure.values import Value
from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.batch import ADVANTAGES, PENALTIES, REF, RETURNS, VALUES, StepBatch
from asyncrl_cli.train.losses import Metric
from asyncrl_cli.train.optimizer import reduced
from asyncrl_cli.train.policy_loss import kl_of
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.step_plan import advantages_of

VARIANCE_EPSILON = 1e-8

Floats = NDArray[np.float64]


def credit(batches: Sequence[StepBatch], algorithm: AlgorithmSection, ranks: Ranks) -> dict[str, Value]:
    """Add the column of advantages to the microbatches of a train step, and with `gae` also that of returns.
    A collective. Returns `reward/kl_penalty`, if there is a penalty: its mean over trajectories."""
    seen = list[dict[str, Metric]]()
    for batch in batches:
        ends_P = np.cumsum(batch.counts_P, dtype=np.int64)
        penalties_F = np.zeros(sum(batch.counts_P))
        rewards, planned = batch.plan.rewards, batch.plan.trajectories
        if algorithm.use_kl_in_reward:
            for microbatch in batch.microbatches:
                kl_N = kl_of(algorithm.kl_penalty, microbatch.columns[REF] - microbatch.logp_mu_N)
                microbatch.columns[PENALTIES] = algorithm.kl_coef * kl_N
            penalties_F = _on_host(batch.column(PENALTIES))
        # Differences of a running sum, because a rank may have no trajectory.
        sums_P = np.diff(np.concatenate([[0.0], np.cumsum(penalties_F)])[np.concatenate([[0], ends_P])])
        if algorithm.has_critic:
            rewards_F, values_F = -penalties_F, _on_host(batch.column(VALUES))
            rewards_F[ends_P - 1] += [rewards[one.group][one.trajectory] for one in planned]
            advantages_F = gae(rewards_F, values_F, ends_P, algorithm.gamma, algorithm.lam)
            batch.set_column(RETURNS, _to_device(advantages_F + values_F, ranks))
            if algorithm.normalize_advantages:
                number, total = _summed([len(advantages_F), advantages_F.sum()], ranks)
                advantages_F = advantages_F - total / max(number, 1.0)
                (squares,) = _summed([np.square(advantages_F).sum()], ranks)
                advantages_F = advantages_F / np.sqrt(squares / max(number - 1.0, 1.0) + VARIANCE_EPSILON)
        else:
            # From the rewards and penalties of all ranks: a group's trajectories may be on several.
            everything = [(group, index) for group, row in rewards.items() for index in range(len(row))]
            indices = {key: index for index, key in enumerate(everything)}
            mine = [indices[one.group, one.trajectory] for one in planned]
            penalties = np.zeros(len(everything))
            penalties[mine] = sums_P
            left = iter(_summed(penalties, ranks))
            penalized = [[reward - next(left) for reward in row] for row in rewards.values()]
            advantages_P = np.concatenate(advantages_of(penalized, algorithm))[mine]
            advantages_F = np.repeat(advantages_P, batch.counts_P)
        batch.set_column(ADVANTAGES, _to_device(advantages_F, ranks))
        if algorithm.use_kl_in_reward:
            penalty = Metric(kind="mean", amount=_to_device(sums_P, ranks).sum(), weight=len(sums_P))
            seen.append({"reward/kl_penalty": penalty})
    return reduced(ranks, seen)


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


def _summed(values: Sequence[float] | Floats, ranks: Ranks) -> list[float]:
    sums: list[float] = ranks.sum(torch.tensor(values, dtype=torch.float64, device=ranks.device)).tolist()
    return sums


def _on_host(values_F: torch.Tensor) -> Floats:
    on_host_F: Floats = values_F.double().cpu().numpy()
    return on_host_F


def _to_device(values: Floats, ranks: Ranks) -> torch.Tensor:
    return torch.from_numpy(values).float().to(ranks.device)
