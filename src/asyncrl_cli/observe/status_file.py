"""What a reader may rely on in status.json, as `LiveStatus.picture` writes it.

A `Figure` is only shown: format.py takes whatever is there. Keys that are not named here are for programs that read the file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Interval, Len
from pydantic import ConfigDict
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.safe_files import Count, parse_json

SCHEMA_VERSION = 2
Figure = int | float | Literal["nan", "inf", "-inf"]
"""JSON has no numbers that are not finite: they are written as strings."""
Figures = dict[str, Figure]
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


class Admission(_Open):
    closed_by: str
    cause: str
    window_taken: Count
    window_groups: Count
    window_budget: Count


class PeriodOf(_Open):
    """Which time figures cover (periods.py)."""

    words: str


class Periods(_Open):
    utilization: PeriodOf | None
    steps: PeriodOf | None


class ExecutorStatus(_Open):
    name: str
    role: str
    state: str
    waiting_for: str
    state_s: dict[str, Seconds]
    gauges: Figures


class Utilization(_Open):
    slot_history: list[float]


class Staleness(_Open):
    bound: Count
    histogram: NotRequired[list[Count]]


class Reward(_Open):
    history: list[Figure]


class EvalPoint(_Open):
    version: Count
    reward_mean: float
    num_prompts: NotRequired[Count]


class Evals(_Open):
    running: str
    history: list[EvalPoint]


class Note(_Open):
    time_s: Seconds
    event: str
    text: str


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
    admission: Admission | Annotated[dict[str, Any], Len(0, 0)]
    periods: Periods
    executors: list[ExecutorStatus]
    utilization: Utilization
    staleness: Staleness
    partial: Figures
    versions: dict[str, Count]
    restarting: dict[str, str]
    reward: Reward
    eval: Evals
    sync: Figures
    timing: Figures
    ledger: dict[str, Count]
    tokens_discarded: Figure | None
    checkpoint: str
    notes: list[Note]
    num_warnings: Count
    totals: dict[str, Any]


def parse_status(content: str | bytes) -> Status:
    """Raises ValueError for what is not of this version, or that no driver writes."""
    version = parse_json(content, dict[str, Any]).get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"it has schema_version {version!r:.40}, not {SCHEMA_VERSION}")
    return parse_json(content, Status)
