"""Plans a train step on the driver, from the groups' metadata: each trajectory's advantage, and its place in
an optimizer step and on a rank. Pure Python, deterministic. Each rank gets its `RankPlan`.

Advantages (`algorithm.adv_estimator`): a function takes the rewards of an optimizer step, one list per group,
and returns one advantage per trajectory in the same shape. With r a reward, m and s the mean and standard
deviation (n - 1 in its denominator) of its group of n:

    grpo                          (r - m) / (s + 1e-6); r - m without `normalize_advantages`
    rloo                          r - mean of the others of the group = (r - m) * n / (n - 1)
    reinforce_plus_plus           (r - M) / (S + 1e-6), with M and S over the optimizer step's trajectories
    reinforce_plus_plus_baseline  the same, applied to r - m
    none                          0: a teacher's advantages are added later (policy_loss.py)

`gae`, and any of these with a KL penalty in the reward, need values per token, so the ranks compute them
(critic.py). If all rewards of a group are equal, `grpo`, `rloo` and the `_baseline` give it advantages of 0:
nothing is learned from it.

Sources: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), section 4.1, and Liu et al. 2025
(arXiv:2503.20783), section 3.2, for grpo with and without s; Ahmadian et al. 2024 (arXiv:2402.14740) for
rloo; Hu 2025, REINFORCE++ (arXiv:2501.03262). Overlong shaping: Yu et al. 2025, DAPO (arXiv:2503.14476),
equation 13.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl_cli.contracts.prompt_group import GroupResult, TrajectoryMeta
from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.profile.arithmetic import step_optimizer_steps
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.train import LARGEST_SHARE

STD_EPSILON = 1e-6
Rewards = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrajectory:
    """Trajectory `trajectory` of group `group` (its index in the train step), with its advantage.
    `is_unfinished`: it is trained as one that would have gone on (`algorithm.bootstrap_truncated`)."""

    group: int
    trajectory: int
    advantage: float
    is_unfinished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepPlan:
    """One rank's share of an optimizer step. `num_loss_tokens` (sampled tokens) and `num_trajectories` count
    all ranks' shares.

    `rewards`: those of all trajectories of each group, if the ranks must compute the advantages (critic.py);
    else empty.
    """

    trajectories: tuple[PlannedTrajectory, ...]
    num_loss_tokens: int
    num_trajectories: int
    rewards: Mapping[int, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank does in a train step. `window`: the newest version when the step began; staleness is
    counted from it. `optimizer_steps` are those of one epoch. `critic_only`: how many of the first optimizer
    steps, counted over all epochs, train the critic alone (its head start)."""

    optimizer_steps: tuple[OptimizerStepPlan, ...]
    window: int
    critic_only: int = 0

    @property
    def groups(self) -> tuple[int, ...]:
        """Indices of the groups whose payload this rank needs, ascending."""
        return tuple(sorted({t.group for step in self.optimizer_steps for t in step.trajectories}))


def training_order(
    groups: Sequence[GroupResult], *, num_minibatches: int, seed: int, step: int
) -> list[GroupResult]:
    """The groups of a train step in the order in which they are cut into mini-batches.

    `groups` come in the order in which they finished, the shortest first. Cut in this order, a step's first
    mini-batches would hold the short responses and its last ones the long responses. So groups are assigned
    to mini-batches at random. The assignment depends only on `seed` and `step`, so a resumed run repeats it.
    Within a mini-batch, groups keep their order.
    """
    if num_minibatches == 1:
        return list(groups)
    dealt = random.Random(f"{seed}/{step}").sample(range(len(groups)), len(groups))
    size = -(-len(groups) // num_minibatches)
    return [
        groups[index]
        for start in range(0, len(groups), size)
        for index in sorted(dealt[start : start + size])
    ]


def plan_train_step(
    groups: Sequence[GroupResult],
    profile: Profile,
    *,
    ranks: int,
    step: int,
    window: int,
    shares_prefixes: bool = True,
) -> list[RankPlan]:
    """Plan the `require_batches` optimizer steps of an epoch on the groups of train step `step` (from 1), in
    order. `shares_prefixes`: whether a rank computes once what its trajectories share. Raises ValueError if
    the groups do not divide evenly.

    Ranks that divide sequences between them (`trainer.sequence_parallel_size`) get the same share.
    """
    num_minibatches = profile.async_training.require_batches
    if not groups or len(groups) % num_minibatches:
        raise ValueError(f"{len(groups)} groups do not divide into {num_minibatches} mini-batches")
    size, sharing = len(groups) // num_minibatches, profile.trainer.sequence_parallel_size
    starts = range(0, len(groups), size)
    per_step = [
        _plan_optimizer_step(groups, range(start, start + size), profile, ranks // sharing, shares_prefixes)
        for start in starts
    ]
    num_steps = step_optimizer_steps(profile)
    ahead = profile.critic.head_start_steps - (step - 1) * num_steps
    critic_only = min(max(ahead, 0), num_steps)
    shares = [tuple(share[rank // sharing] for share in per_step) for rank in range(ranks)]
    return [RankPlan(optimizer_steps=share, window=window, critic_only=critic_only) for share in shares]


def split_by_tokens(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices per rank, so that token sums are nearly equal: the longest first, each to the least loaded rank
    (Graham's LPT rule, at most 4/3 of the best makespan). Each rank's indices are in ascending order."""
    loads = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        loads[rank] += lengths[index]
        shares[rank].append(index)
    return [sorted(share) for share in shares]


def split_groups(own: Sequence[Sequence[int]], shared: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices per rank of all groups' trajectories end to end, where those of a group begin with the same
    `shared` tokens, which a rank computes once, and have so many of their `own`.

    All groups are cut into 1, 2, 4, ... parts: as few as make the most loaded rank's sum smallest."""
    groups, end = list[range](), 0
    for lengths in own:
        groups.append(range(end, end := end + len(lengths)))
    # a limit may have cut off every trajectory (`mask_truncated`)
    flat, most = [length for lengths in own for length in lengths], max([1, *map(len, groups)])
    found = list[tuple[int, list[list[int]]]]()
    for number in (2**power for power in range(most.bit_length() if ranks > 1 else 1)):
        parts = [
            (g, part) for g, group in enumerate(groups) for i in range(number) if (part := group[i::number])
        ]
        sums = [shared[g] + sum(flat[index] for index in part) for g, part in parts]
        split = split_by_tokens(sums, ranks)
        prompts = [sum(shared[g] for g in {parts[i][0] for i in share}) for share in split]
        shares = [sorted(index for i in share for index in parts[i][1]) for share in split]
        loads = [p + sum(flat[index] for index in share) for p, share in zip(prompts, shares, strict=True)]
        found.append((max(loads), shares))
    return min(found, key=lambda one: one[0])[1]


def unique_tokens(groups: Sequence[GroupResult], shares: bool | None) -> int:
    """An estimate of the positions that are computed for these groups, if a rank has them whole. `shares`:
    `trainer.shared_prefixes`."""
    metas = [meta for group in groups for meta in group.trajectories]
    every = sum(meta.prompt_tokens + meta.response_tokens for meta in metas)
    unique = every - sum(max(len(group.trajectories) - 1, 0) * group.shared_tokens for group in groups)
    return unique if shares is not False and unique <= LARGEST_SHARE * every else every


def _plan_optimizer_step(
    groups: Sequence[GroupResult], indices: range, profile: Profile, ranks: int, shares_prefixes: bool
) -> list[OptimizerStepPlan]:
    """Each rank's share of an optimizer step on these groups."""
    algorithm, longest = profile.algorithm, profile.rollout.max_response_tokens
    rewards = [[shaped_reward(meta, algorithm, longest) for meta in groups[i].trajectories] for i in indices]
    by_ranks = needs_columns(algorithm)
    advantages = [[0.0] * len(row) for row in rewards] if by_ranks else advantages_of(rewards, algorithm)
    shared = [groups[group].shared_tokens if shares_prefixes else 0 for group in indices]
    planned, num_loss_tokens = list[PlannedTrajectory](), 0
    own: list[list[int]] = [[] for _ in indices]
    for number, (group, group_advantages) in enumerate(zip(indices, advantages, strict=True)):
        metas = groups[group].trajectories
        for trajectory, (meta, advantage) in enumerate(zip(metas, group_advantages, strict=True)):
            # Only now: a truncated trajectory is not trained, but its reward counts for the others.
            if algorithm.mask_truncated and meta.is_truncated:
                continue
            unfinished = algorithm.bootstrap_truncated and meta.is_truncated
            planned.append(
                PlannedTrajectory(
                    group=group, trajectory=trajectory, advantage=advantage, is_unfinished=unfinished
                )
            )
            own[number].append(meta.prompt_tokens + meta.response_tokens - shared[number])
            num_loss_tokens += sum(count for _, count in meta.version_tokens)
    return [
        OptimizerStepPlan(
            trajectories=tuple(planned[i] for i in share),
            num_loss_tokens=num_loss_tokens,
            num_trajectories=len(planned),
            rewards=dict(zip(indices, rewards, strict=True)) if by_ranks else {},
        )
        for share in split_groups(own, shared, ranks)
    ]


def needs_columns(algorithm: AlgorithmSection) -> bool:
    """Whether advantages also depend on the reference or the critic (critic.py)."""
    return algorithm.has_critic or algorithm.use_kl_in_reward


def advantages_of(rewards: Rewards, algorithm: AlgorithmSection) -> list[list[float]]:
    """Advantages of an optimizer step's trajectories, group by group."""
    if algorithm.adv_estimator == "grpo":
        return grpo(rewards, algorithm.normalize_advantages)
    return ESTIMATORS[algorithm.adv_estimator](rewards)


def shaped_reward(meta: TrajectoryMeta, algorithm: AlgorithmSection, max_tokens: int) -> float:
    """The reward minus DAPO's overlong penalty, which applies to the last `overlong_buffer_tokens` before the
    limit `max_tokens` (rollout.max_response_tokens)."""
    if algorithm.overlong_buffer_tokens is None:
        return meta.reward
    buffer = algorithm.overlong_buffer_tokens
    beyond = min(max(0, meta.response_tokens - (max_tokens - buffer)), buffer)
    return meta.reward - algorithm.overlong_penalty_factor * beyond / buffer


def grpo(groups: Rewards, normalize: bool) -> list[list[float]]:
    return [_normalized(_centred(rewards)) if normalize else _centred(rewards) for rewards in groups]


def rloo(groups: Rewards) -> list[list[float]]:
    return [[c * len(rewards) / max(len(rewards) - 1, 1) for c in _centred(rewards)] for rewards in groups]


def reinforce_plus_plus(groups: Rewards) -> list[list[float]]:
    advantages = iter(_normalized(_centred([reward for rewards in groups for reward in rewards])))
    return [[next(advantages) for _ in rewards] for rewards in groups]


def reinforce_plus_plus_baseline(groups: Rewards) -> list[list[float]]:
    return reinforce_plus_plus([_centred(rewards) for rewards in groups])


ESTIMATORS: dict[str, Callable[[Rewards], list[list[float]]]] = {
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "none": lambda groups: [[0.0] * len(rewards) for rewards in groups],
}


def _centred(rewards: Sequence[float]) -> list[float]:
    """Differences from the mean; exactly 0 where all rewards are equal."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _normalized(centred: Sequence[float]) -> list[float]:
    if not any(centred):
        return list(centred)
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(centred) - 1))
    return [c / (std + STD_EPSILON) for c in centred]
