"""The run at a glance: the content of status.json, which the driver writes once a second, and everyone else
reads.

`periods` says which time the figures cover (metrics.py): `periods.utilization` holds for `utilization` and
the executors' `state_s`, `periods.steps` for `staleness`, `partial`, `env`, `filtered_ratio`, and means per
step (`timing`, `data.bytes_fetched_per_step`). States, waits, gauges, admission, versions, the rest of `data`
and the ledger are those of this moment; `reward`, `prompts` and `sync` are the last step's.

    {"schema_version": 2, "name": "brave-otter", "phase": "running", "pid": 4711, "host": "head", ...
     "progress": {"step": 118, "train_steps": 300, ...}, "executors": [{"name": "trainer", ...}, ...], ...}

A field whose default is None is left out of the file while it is None. A reader keeps to the named keys;
files may hold others, of newer versions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Interval
from pydantic import AfterValidator, BeforeValidator
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.safe_files import Count, parse_json

SCHEMA_VERSION = 2


def _finite(value: float | str) -> float | str:
    if not isinstance(value, str) and not abs(value) <= sys.float_info.max:
        raise ValueError("it is not a finite number")
    return value


Figure = Annotated[int | float | Literal["nan", "inf", "-inf"], AfterValidator(_finite)]
"""A figure that is only shown. JSON has no NaN or infinity: a file has them as strings."""
Figures = Mapping[str, Figure | Sequence[Figure]]
Seconds = Annotated[float, Interval(ge=0, le=1e12)]
Pid = Annotated[int, Interval(ge=1, le=2**31 - 1)]


def _with_list(key: str) -> AfterValidator:
    def check(figures: Figures) -> Figures:
        if not isinstance(figures.get(key), list):
            raise ValueError(f"it has no list {key}")
        return figures

    return AfterValidator(check)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`time_s`: of the run, resumes included. `fraction`: of the train steps. `step_s`: recent seconds
    per step; `eta_s`: estimated seconds to the end."""

    step: Count
    train_steps: Count
    version: Count
    groups_trained: Count
    groups_total: Count
    time_s: Seconds
    fraction: float
    tokens_trained: Figure | None = None
    step_s: Figure | None = None
    eta_s: Figure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionStatus:
    """`closed_by`: why no group may start ("" if one may), `cause`: the same in words. `governor`: with
    `async_training.target_kl`, how far it lets generation run. `lending`: with `placement.lend`, which
    workers have the trainer's devices now. Numbers of groups."""

    closed_by: str
    cause: str
    window_taken: Count
    window_groups: Count
    window_budget: Count
    governor: str = ""
    lending: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredTime:
    """The time that figures cover, in words, and as seconds of the run. `steps`: whole train steps in it."""

    words: str
    from_s: float = 0.0
    to_s: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Periods:
    utilization: CoveredTime | None
    steps: CoveredTime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStatus:
    """`role`: feed, generate, rollout, reward, scorer, logp, ref_logp, trainer or param_update
    (measure/machines.py says to which machine it belongs). `state_s`: seconds in each state."""

    name: str
    role: str
    state: str
    waiting_for: str
    state_s: dict[str, Seconds]
    gauges: dict[str, Figure]


class EvalPoint(TypedDict):
    """The result of an eval. `eval_set` is missing for the held-out split. Checkpoints keep it like this."""

    version: Count
    reward_mean: Figure
    reward_low: NotRequired[Figure]
    reward_high: NotRequired[Figure]
    num_prompts: NotRequired[Count]
    eval_set: NotRequired[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalStatus:
    """`running`: which eval runs now, in words."""

    running: str
    history: list[EvalPoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStatus:
    """What the data store holds, and `orphans`: its keys so far that had no owner (loop/data_keys.py)."""

    keys: Count
    bytes: Count
    orphans: Count
    bytes_fetched_per_step: Figure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An event that people want to read."""

    time_s: Seconds
    event: str | None = None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts that do not change between two resumes. `step_groups` is R, `window_groups` is W = K * R
    (docs/admission.md). `cores`: those of this machine, if all processes share them; None with GPUs and on a
    cluster."""

    name: str
    profile: str
    mode: str = ""
    run_dir: str = ""
    train_steps: Count = 0
    step_groups: Count = 0
    window_groups: Count = 0
    trigger_parameter_sync_step: Count = 1
    max_staleness: Count
    on_stale: str = "wait"
    attempt: Count = 1
    cores: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(RunFacts):
    """`doing`: what a starting run is doing. `admission`: None before the loop's first second.

    Sections of figures have the keys of metrics.jsonl without their prefix. `utilization` and `reward` also
    have their recent course, `slot_history` and `history`.
    """

    phase: str
    error: str
    pid: Pid
    host: str
    updated_at: Seconds
    started_at: Figure | None = None
    doing: str | None = None
    progress: Progress
    # An empty object stands for None.
    admission: Annotated[AdmissionStatus | None, BeforeValidator(lambda found: found or None)]
    periods: Periods
    executors: list[ExecutorStatus]
    utilization: Annotated[Figures, _with_list("slot_history")]
    staleness: Figures
    partial: Figures
    env: Figures | None = None
    prompts: Figures | None = None
    filtered_ratio: Figure | None = None
    versions: dict[str, Count]
    restarting: dict[str, str] = field(default_factory=dict)
    reward: Annotated[Figures, _with_list("history")]
    eval: EvalStatus
    sync: Figures
    timing: Figures
    ledger: dict[str, Count]
    tokens_discarded: Figure | None
    data: DataStatus | None = None
    checkpoint: str
    notes: list[Note]
    warnings: list[Note] = field(default_factory=list)
    num_warnings: Count = 0
    totals: Figures

    def to_json(self) -> dict[str, Any]:
        """As status.json has it; figures may be NaN or infinite."""
        return {
            "schema_version": SCHEMA_VERSION,
            **_document(self),
            "admission": _document(self.admission or {}),
        }


def _document(value: Any) -> Any:
    if is_dataclass(value):
        entries = ((one, getattr(value, one.name)) for one in fields(value))
        return {one.name: _document(entry) for one, entry in entries if (entry, one.default) != (None, None)}
    if isinstance(value, dict):
        return {key: _document(entry) for key, entry in value.items()}
    return [_document(entry) for entry in value] if isinstance(value, list) else value


def parse_status(content: str | bytes) -> Status:
    """Raises ValueError if the content has another schema version, or is malformed."""
    version = parse_json(content, dict[str, Any]).get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"it has schema_version {version!r:.40}, not {SCHEMA_VERSION}")
    return parse_json(content, Status)
