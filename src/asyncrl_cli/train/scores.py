"""Columns: numbers that a stage computes for each sampled token before the token is trained.

    prox      the token's logprob under the weights at the window's start
    ref       the token's logprob under the reference
    critic    the critic's value of the state in which the token was sampled

`score` computes a column for groups, in any process that has the stage's model. `PolicyTrainer.train` takes
such columns and does not compute them again. The trainer computes missing columns for the microbatches that
it trains (`fill`), once per token.

Legend: N = sampled tokens of a microbatch; F = those of a rank's share of an optimizer step, trajectory by
trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl_cli.contracts.trajectories import GroupPayload
from asyncrl_cli.profile import sharing
from asyncrl_cli.train.balance import OptimizerStepPlan, PlannedTrajectory
from asyncrl_cli.train.batch import Microbatch, build_microbatches, empty_microbatch
from asyncrl_cli.train.ranks import Ranks

PROX, REF, VALUES = sharing.PROX, sharing.REF, sharing.CRITIC
_ASKED_FOR = "asked for"

Column = Mapping[int, tuple[NDArray[np.float32], ...]]
"""By group index: an array per trajectory, with one number per sampled token, all segments end to end."""
Scores = Mapping[str, Column]
"""Columns by name. A rank without groups has the names, too, so that all ranks know which columns were passed
in."""
Score = Callable[[Microbatch], torch.Tensor]
"""The numbers of a microbatch's sampled tokens, (N); a collective."""


def score(
    of: Score,
    payloads: Mapping[int, GroupPayload],
    *,
    max_tokens: int,
    ranks: Ranks,
    are_packed: bool = False,
) -> Column:
    """Compute a column for these groups. A collective; each rank may have its own groups, or none."""
    plan = _everything(payloads)
    (parts,) = step_microbatches(
        [plan], payloads, window=0, max_tokens=max_tokens, ranks=ranks, are_packed=are_packed
    )
    fill(_ASKED_FOR, of, parts)
    counts = sampled_tokens(plan, payloads)
    values_F = joined(_ASKED_FOR, parts, sum(counts)).float().cpu().numpy()
    arrays = iter([values_F[start:end] for start, end in pairwise(accumulate(counts, initial=0))])
    return {group: tuple(next(arrays) for _ in payload.trajectories) for group, payload in payloads.items()}


def step_microbatches(
    steps: Sequence[OptimizerStepPlan],
    payloads: Mapping[int, GroupPayload],
    scores: Scores | None = None,
    *,
    window: int,
    max_tokens: int,
    ranks: Ranks,
    are_packed: bool = False,
) -> list[list[Microbatch]]:
    """Microbatches of each optimizer step, with the columns of `scores`. `max_tokens` is per rank. Ranks with
    fewer microbatches add empty ones, because all must take part in every FSDP collective."""
    budget = max_tokens * ranks.sequence_size
    build = partial(
        build_microbatches, window=window, max_tokens=budget, device=ranks.device, are_packed=are_packed
    )
    work = [build(step, payloads) for step in steps]
    counts = ranks.max(torch.tensor([max(len(parts), 1) for parts in work], device=ranks.device)).tolist()
    for parts, count in zip(work, counts, strict=True):
        parts += [empty_microbatch(ranks.device) for _ in range(count - len(parts))]
    for name, column in (scores or {}).items():
        for step, parts in zip(steps, work, strict=True):
            arrays = [column[planned.group][planned.trajectory] for planned in step.trajectories]
            deal(
                name,
                parts,
                torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *arrays])).to(ranks.device),
            )
    return work


def fill(name: str, of: Score, parts: Iterable[Microbatch]) -> None:
    """Compute a column for the microbatches that lack it. A collective: it is missing on all ranks or on
    none."""
    for part in parts:
        if name not in part.columns:
            part.columns[name] = of(part)


def joined(name: str, parts: Sequence[Microbatch], num_tokens: int) -> torch.Tensor:
    """One column over all microbatches of a step, (F)."""
    values_F = torch.zeros(num_tokens, device=parts[0].rows_N.device)
    for part in parts:
        values_F[part.order_N] = part.columns[name].float()
    return values_F


def deal(name: str, parts: Sequence[Microbatch], values_F: torch.Tensor) -> None:
    """Give each microbatch its tokens' part of a column (F)."""
    for part in parts:
        part.columns[name] = values_F[part.order_N]


def sampled_tokens(plan: OptimizerStepPlan, payloads: Mapping[int, GroupPayload]) -> list[int]:
    """The number of sampled tokens of each trajectory in the plan."""
    trajectories = [payloads[planned.group].trajectories[planned.trajectory] for planned in plan.trajectories]
    return [sum(int(segment.mask_T.sum()) for segment in trajectory.segments) for trajectory in trajectories]


def _everything(payloads: Mapping[int, GroupPayload]) -> OptimizerStepPlan:
    """A plan with every trajectory of these groups."""
    planned = tuple(
        PlannedTrajectory(group=group, trajectory=index, advantage=0.0)
        for group, payload in payloads.items()
        for index in range(len(payload.trajectories))
    )
    return OptimizerStepPlan(trajectories=planned, num_loss_tokens=0, num_trajectories=len(planned))
