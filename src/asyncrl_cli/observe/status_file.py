"""The type of status.json: what `LiveStatus.picture` writes, and what a reader may rely on.

Keys that are not here are for programs that read the file; nobody here does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Interval
from pydantic import ConfigDict
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.safe_files import Count

Figure = int | float | Literal["nan", "inf", "-inf"]
"""JSON has no numbers that are not finite: they are written as strings."""
Seconds = Annotated[float, Interval(ge=0, le=1e12)]
Pid = Annotated[int, Interval(ge=1, le=2**31 - 1)]


class _Open(TypedDict):
    """Keeps the keys that it does not know."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]


class Progress(_Open):
    step: Count
    train_steps: Count
    version: Count
    groups_trained: Count
    groups_total: Count
    time_s: Seconds
    fraction: float
    tokens_trained: NotRequired[Figure]
    eta_s: NotRequired[Seconds]


class AdmissionFigures(_Open):
    closed_by: str
    cause: str
    window_taken: Count
    window_groups: Count
    window_budget: Count


class Nothing(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]


class PeriodOf(_Open):
    """Which time figures cover (periods.py)."""

    words: str
    from_s: Seconds
    to_s: Seconds
    steps: Count


class Periods(_Open):
    utilization: PeriodOf | None
    steps: PeriodOf | None


class ExecutorStatus(_Open):
    name: str
    role: str
    state: str
    waiting_for: str
    state_s: dict[str, Seconds]
    gauges: dict[str, Figure]


class Utilization(_Open):
    slot_history: list[float]
    rollouter_slot_utilization: NotRequired[float]
    rollouter_idle_ratio: NotRequired[float]
    rollouter_tokens_per_s: NotRequired[Figure]
    trainer_idle_ratio: NotRequired[float]
    trainer_tokens_per_s: NotRequired[Figure]
    overlap_ratio: NotRequired[float]
    running_sequences: NotRequired[Figure]
    slots: NotRequired[Figure]


class Staleness(_Open):
    bound: Count
    mean: NotRequired[Figure]
    max: NotRequired[Figure]
    histogram: NotRequired[list[Count]]


class Partial(_Open):
    partial_ratio: NotRequired[Figure]
    max_partial_span: NotRequired[Figure]


class Reward(_Open):
    mean: NotRequired[Figure]
    history: list[Figure]


class EvalPoint(_Open):
    version: Count
    reward_mean: float
    num_prompts: NotRequired[Count]


class Evals(_Open):
    running: str
    history: list[EvalPoint]


class SyncFigures(_Open):
    version: Count
    gather_s: NotRequired[Seconds]
    send_s: NotRequired[Seconds]
    load_s: NotRequired[Seconds]
    pause_s: NotRequired[Seconds]
    logprob_abs_diff: NotRequired[Figure]


class Note(_Open):
    time_s: Seconds
    event: str
    text: str


Totals = TypedDict(
    "Totals",
    {
        "overlap_ratio": NotRequired[Figure],
        "trainer/idle_ratio": NotRequired[Figure],
        "rollouter/idle_ratio": NotRequired[Figure],
        "rollouter/slot_utilization": NotRequired[Figure],
        "rollouter/tokens_per_s": NotRequired[Figure],
        "trainer/tokens_per_s": NotRequired[Figure],
        "staleness/mean": NotRequired[Figure],
        "staleness/max": NotRequired[Figure],
        "fully_async/partial/partial_ratio": NotRequired[Figure],
        "fully_async/partial/max_partial_span": NotRequired[Figure],
    },
)
Totals.__pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[attr-defined]


class Status(_Open):
    name: str
    profile: str
    phase: str
    doing: NotRequired[str]
    error: str
    pid: Pid
    host: str
    updated_at: Seconds
    max_staleness: Count
    on_stale: str
    progress: Progress
    admission: AdmissionFigures | Nothing
    periods: Periods
    executors: list[ExecutorStatus]
    utilization: Utilization
    staleness: Staleness
    partial: Partial
    versions: dict[str, Count]
    restarting: dict[str, str]
    reward: Reward
    eval: Evals
    sync: SyncFigures | Nothing
    timing: dict[str, Figure]
    ledger: dict[str, Count]
    tokens_discarded: Figure | None
    checkpoint: str
    notes: list[Note]
    num_warnings: Count
    totals: Totals


class Head(_Open):
    """Enough to say that the rest is of another version."""

    schema_version: Any
