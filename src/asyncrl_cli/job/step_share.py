"""What one rank of the trainer, or one process of a critic apart, is given of a train step: its plan, and as arguments of its call
the columns and parts of the plan's groups.

As arguments, Ray brings them to the process before the call begins: small ones with the call, large ones from the object store. A
`ray.get` of each would be a call to its owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from asyncrl_cli.loop.attempts import GroupResult
from asyncrl_cli.loop.ports import TrainBatch
from asyncrl_cli.samples import GroupPayload, joined
from asyncrl_cli.train.balance import RankPlan

if TYPE_CHECKING:  # torch: the driver imports this module
    from asyncrl_cli.train.scores import Scores


def arguments(batch: TrainBatch, groups: Sequence[GroupResult], plan: RankPlan, names: Sequence[str]) -> Iterable[Any]:
    """For each name the handles of the columns of the plan's groups, then those of their parts. `groups`: the batch's in training
    order, to which the plan's indices refer."""
    own = [groups[index] for index in plan.groups]
    columns = [batch.columns[group.key][name] for name in names for group in own]
    return chain(columns, *(group.payload for group in own))


def taken(plan: RankPlan, names: Sequence[str], given: Sequence[Any]) -> tuple[dict[int, GroupPayload], Scores]:
    """Payloads by group and columns by name, from the values of `arguments`."""
    groups, values = plan.groups, iter(given)
    scores = {name: {group: next(values) for group in groups} for name in names}
    return dict(zip(groups, joined(values), strict=True)), scores
