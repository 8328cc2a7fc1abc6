"""One train step: what the trainer is given, and what it reports.

    TrainBatch(step=41, window=10, step_in_window=0, groups=(...), columns={key: {"ref": <handle>}})
    TrainReport(train_s=3.2, tokens=81920, metrics={"loss/policy": Ratio(12.5, 81920), ...})

With K = 4 this is the first of the four train steps between the publishes of versions 10 and 11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult, Handle
from asyncrl_cli.measure.values import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The R groups of one train step, in take order. `window` is the number of the window that trains them.
    `columns`: per group, the handles of what scorers have computed for it, by scorer."""

    step: int
    window: int
    step_in_window: int
    groups: tuple[GroupResult, ...]
    columns: Mapping[AttemptKey, Mapping[str, Handle]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What a train step reports. Seconds are the trainer's, or one rank's: `train_s`, and `column_s` for the
    columns that were computed before training, by name (`old_logprob`, `ref`, `critic`). `tokens` (sampled
    tokens trained, including those of skipped steps) and `metrics` cover all ranks; `metrics` are typed and
    finite, and go into the step's line unchanged.

    `skipped_steps`: how many of its optimizer steps were skipped because the gradient was not finite; metrics
    that this spoils are absent. `skipped_in_a_row`: how many of the run's latest optimizer steps were skipped
    without a break, across train steps."""

    train_s: float
    tokens: int
    metrics: Mapping[str, Value]
    column_s: Mapping[str, float] = field(default_factory=dict)
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
