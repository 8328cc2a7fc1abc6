"""Plans a train step: gives each trajectory its advantage (advantages.py), and splits the step into optimizer
steps, ranks and microbatches. Pure Python, deterministic.

The driver calls `training_order` and `plan_train_step` on the groups' metadata and sends each rank its
`RankPlan`; a rank cuts its share of an optimizer step into `microbatches` when it has the token arrays.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl_cli.contracts.prompt_group import GroupResult
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.train.advantages import advantages_of, needs_columns, shaped_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrajectory:
    """Trajectory `trajectory` of group `group` (its index in the train step), with its advantage."""

    group: int
    trajectory: int
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepPlan:
    """One rank's share of an optimizer step. `num_loss_tokens` (sampled tokens) and `num_trajectories` count
    all ranks' shares.

    `rewards`: those of all trajectories of each group, if the ranks must compute the advantages (credit.py);
    else empty.
    """

    trajectories: tuple[PlannedTrajectory, ...]
    num_loss_tokens: int
    num_trajectories: int
    rewards: Mapping[int, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank does in a train step. `window`: the newest version when the step began; staleness is
    counted from it. `critic_only`: how many of the first optimizer steps train the critic alone (its head
    start)."""

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
    groups: Sequence[GroupResult], profile: Profile, *, ranks: int, step: int, window: int
) -> list[RankPlan]:
    """Plan `require_batches` optimizer steps on the groups of train step `step` (from 1), in order. Raises
    ValueError if the groups do not divide evenly.

    Ranks that divide sequences between them (`trainer.sequence_parallel_size`) get the same share.
    """
    num_minibatches = profile.async_training.require_batches
    if not groups or len(groups) % num_minibatches:
        raise ValueError(f"{len(groups)} groups do not divide into {num_minibatches} mini-batches")
    size, sharing = len(groups) // num_minibatches, profile.trainer.sequence_parallel_size
    starts = range(0, len(groups), size)
    per_step = [
        _plan_optimizer_step(groups, range(start, start + size), profile, ranks // sharing)
        for start in starts
    ]
    ahead = profile.critic.head_start_steps - (step - 1) * num_minibatches
    critic_only = min(max(ahead, 0), num_minibatches)
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


def microbatches(lengths: Sequence[int], max_tokens: int, split_cost_tokens: int) -> list[list[int]]:
    """Row indices per microbatch: as few microbatches as `max_tokens` (with padding) allows, then split where
    padding costs more.

    Rows are grouped by length, longest first. A microbatch is cut in two if that saves more padded tokens
    than `split_cost_tokens`, the cost of one more forward and backward pass. A row longer than the budget
    gets a microbatch of its own. Within a microbatch the order of `lengths` is kept.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    cut: list[list[int]] = []
    for index in order:
        if cut and (len(cut[-1]) + 1) * lengths[cut[-1][0]] <= max_tokens:
            cut[-1].append(index)
        else:
            cut.append([index])
    return [sorted(part) for rows in cut for part in _split_padding(rows, lengths, split_cost_tokens)]


def packed(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row indices per microbatch for rows packed end to end without padding: longest first, each filled up to
    `max_tokens`."""
    cut, used = list[list[int]](), max_tokens
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if used + lengths[index] > max_tokens:
            cut.append([])
            used = 0
        cut[-1].append(index)
        used += lengths[index]
    return [sorted(rows) for rows in cut]


def _split_padding(rows: list[int], lengths: Sequence[int], split_cost_tokens: int) -> list[list[int]]:
    # `rows` are sorted by length, longest first: cutting before row i narrows rows i.. from the first row's
    # length.
    longest = lengths[rows[0]]
    savings = [(len(rows) - i) * (longest - lengths[rows[i]]) for i in range(len(rows))]
    best = max(range(len(rows)), key=savings.__getitem__)
    if savings[best] <= split_cost_tokens:
        return [rows]
    return [
        part
        for half in (rows[:best], rows[best:])
        for part in _split_padding(half, lengths, split_cost_tokens)
    ]


def _plan_optimizer_step(
    groups: Sequence[GroupResult], indices: range, profile: Profile, ranks: int
) -> list[OptimizerStepPlan]:
    algorithm, longest = profile.algorithm, profile.rollout.max_response_tokens
    rewards = [[shaped_reward(meta, algorithm, longest) for meta in groups[i].trajectories] for i in indices]
    is_later = needs_columns(algorithm)
    advantages = (
        [[0.0] * len(of_group) for of_group in rewards] if is_later else advantages_of(rewards, algorithm)
    )
    planned: list[PlannedTrajectory] = []
    lengths: list[int] = []
    num_loss_tokens = 0
    for group, of_group in zip(indices, advantages, strict=True):
        for trajectory, (meta, advantage) in enumerate(
            zip(groups[group].trajectories, of_group, strict=True)
        ):
            if algorithm.mask_truncated and meta.is_truncated:
                continue
            planned.append(PlannedTrajectory(group=group, trajectory=trajectory, advantage=advantage))
            lengths.append(meta.prompt_tokens + meta.response_tokens)
            num_loss_tokens += sum(count for _, count in meta.version_tokens)
    return [
        OptimizerStepPlan(
            trajectories=tuple(planned[i] for i in share),
            num_loss_tokens=num_loss_tokens,
            num_trajectories=len(planned),
            rewards=dict(zip(indices, rewards, strict=True)) if is_later else {},
        )
        for share in split_by_tokens(lengths, ranks)
    ]
