"""Reads status.json: checks the keys that our readers need, and determines whether the run that wrote it is
still alive.

A `Figure` may be missing or not finite: it is only shown, and format.py copes with that. Keys that are not
named here are kept for other programs that read the file.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import psutil
from annotated_types import Interval, Len
from pydantic import AfterValidator, JsonValue
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.base.paths import as_typed
from asyncrl_cli.base.safe_files import MIB, Count, parse_json, read_bytes, reason
from asyncrl_cli.checkpoint.find import find_run, is_locked
from asyncrl_cli.checkpoint.run_directory import never_began
from asyncrl_cli.contracts.events import ENDED

SCHEMA_VERSION = 2
MAX_STATUS_BYTES = 16 * MIB
SILENT_AFTER_S = 15.0
"""A live run rewrites its status once a second: one older than this is called silent."""

Liveness = Literal["ended", "live", "silent", "dead"]


def _finite(value: Any) -> Any:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for entry in inner:
        _finite(entry)
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise ValueError("it is not a finite number")
    return value


Figure = Annotated[int | float | Literal["nan", "inf", "-inf"], AfterValidator(_finite)]
"""JSON has no NaN or infinity: they are written as strings."""
Detail = Annotated[JsonValue, AfterValidator(_finite)]
"""Anything else, with the same limit for numbers."""
Figures = dict[str, Figure]
Seconds = Annotated[float, Interval(ge=0, le=1e12)]
Pid = Annotated[int, Interval(ge=1, le=2**31 - 1)]


def _record(**fields: Any) -> Any:
    """The type of a JSON object with these keys, which may have others."""
    return TypedDict("record", fields, extra_items=Detail)  # type: ignore[operator]


class EvalPoint(TypedDict, extra_items=Detail):
    version: Count
    reward_mean: Figure
    reward_low: NotRequired[Figure]
    reward_high: NotRequired[Figure]
    num_prompts: NotRequired[Count]
    eval_set: NotRequired[str]


PERIOD = _record(words=str) | None
"""Which time figures cover (metrics.py)."""
STATUS = _record(
    name=str,
    profile=str,
    phase=str,
    doing=NotRequired[str],
    error=str,
    pid=Pid,
    host=str,
    updated_at=Seconds,
    max_staleness=Count,
    on_stale=str,
    progress=_record(
        step=Count,
        train_steps=Count,
        version=Count,
        groups_trained=Count,
        groups_total=Count,
        time_s=Seconds,
        fraction=float,
    ),
    admission=_record(closed_by=str, cause=str, window_taken=Count, window_groups=Count, window_budget=Count)
    | Annotated[dict[str, Detail], Len(0, 0)],
    periods=_record(utilization=PERIOD, steps=PERIOD),
    executors=list[
        _record(name=str, role=str, state=str, waiting_for=str, state_s=dict[str, Seconds], gauges=Figures)
    ],
    utilization=_record(slot_history=list[float]),
    staleness=_record(bound=Count, histogram=NotRequired[list[Count]]),
    partial=Figures,
    env=NotRequired[Figures],
    filtered_ratio=NotRequired[Figure],
    versions=dict[str, Count],
    restarting=dict[str, str],
    reward=_record(history=list[Figure]),
    eval=_record(running=str, history=list[EvalPoint]),
    sync=Figures,
    timing=Figures,
    ledger=dict[str, Count],
    tokens_discarded=Figure | None,
    checkpoint=str,
    notes=list[_record(time_s=Seconds, event=str, text=str)],
    warnings=NotRequired[list[_record(time_s=Seconds, text=str)]],
    num_warnings=Count,
    totals=dict[str, Figure | list[Figure]],
)
"""The keys that a reader may rely on."""
RECORDED = _record(
    profile=NotRequired[str],
    phase=NotRequired[str],
    error=NotRequired[str],
    executors=NotRequired[list[_record(name=str, role=str)]],
    progress=NotRequired[_record(step=NotRequired[Count], time_s=NotRequired[Seconds])],
    totals=NotRequired[dict[str, Figure | list[Figure]]],
    eval=NotRequired[_record(history=NotRequired[list[EvalPoint]])],
)
"""What recorded.py reads of a status; any of it may be missing."""


def parse_status(content: str | bytes) -> dict[str, Any]:
    """Raises ValueError if the content has another schema version, or is malformed."""
    version = parse_json(content, dict[str, Any]).get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"it has schema_version {version!r:.40}, not {SCHEMA_VERSION}")
    return parse_json(content, STATUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """`liveness`: ended (the status says so), live, silent (may be running, but its status is old), dead (it
    was killed)."""

    directory: Path
    status: Mapping[str, Any]
    liveness: Liveness
    age_s: float

    @property
    def remark(self) -> str:
        """A warning to show beside the status; empty if there is none."""
        if self.liveness == "dead" and never_began(self.directory):
            again = f"`asyncrl train --name {self.name}` replaces it"
            return f"killed {self.age_s:.0f} s ago while it started: nothing was trained, {again}"
        if self.liveness == "dead":
            again = f"continue it with `asyncrl resume {as_typed(self.directory)}`"
            return f"not running any more: it was killed {self.age_s:.0f} s ago; {again}"
        if self.is_resuming:
            return "a driver is resuming or ending the run; this is the last status that was written"
        if self.liveness == "silent":
            return (
                f"silent for {self.age_s:.0f} s: pid {self.status['pid']} on {self.status['host']} "
                "writes "
                "no status"
            )
        return ""

    @property
    def is_over(self) -> bool:
        return self.liveness in ("ended", "dead")

    @property
    def is_resuming(self) -> bool:
        """A driver holds the run, and has not yet written a status. (The driver that wrote this one may still
        be shutting down.)"""
        is_writer = self.status["host"] == socket.gethostname() and psutil.pid_exists(self.status["pid"])
        return self.liveness == "live" and self.status["phase"] in ENDED and not is_writer

    @property
    def name(self) -> str:
        return self.directory.name

    @classmethod
    def from_json(cls, directory: Path, text: str) -> RunStatus:
        """The inverse of `to_json`. Raises ValueError for anything else."""
        status = parse_status(text)
        return cls(
            directory=directory, status=status, liveness=status.pop("liveness"), age_s=status.pop("age_s")
        )

    def to_json(self) -> dict[str, Any]:
        return {**self.status, "liveness": self.liveness, "age_s": round(self.age_s, 3)}


class StillStarting(RefusedError):
    """There is nothing to show yet: the run is starting."""


class UnreadableStatus(RefusedError):
    """status.json exists, but cannot be read or is malformed."""


def read_status(run: str, runs_dir: Path) -> RunStatus:
    """Status of a run, given by name or directory.

    Raises ConfigError if there is no such run, StillStarting before its first status, UnreadableStatus if
    status.json cannot be read, RefusedError if the run ended without one.
    """
    directory = find_run(run, runs_dir)
    # before its status is read: a driver that ends writes its last one, then lets go
    is_held = is_locked(directory)
    path, log = directory / "status.json", f"asyncrl logs {directory.name}"
    try:
        status = parse_status(read_bytes(path, max_bytes=MAX_STATUS_BYTES))
    except FileNotFoundError:
        if is_held:
            raise StillStarting(f"run '{directory.name}' is starting", hint=f"its log: {log}") from None
        why = f"run '{directory.name}' ended while it started: it has no status.json"
        raise RefusedError(why, hint=f"its log: {log}") from None
    except (OSError, ValueError) as error:
        hint = f"a live run rewrites it within a second; its log: {log}"
        raise UnreadableStatus(f"{path} cannot be read: {reason(error)}", hint=hint) from None
    age_s = max(0.0, time.time() - status["updated_at"])
    return RunStatus(
        directory=directory, status=status, liveness=_liveness(status, age_s, is_held), age_s=age_s
    )


def no_runs(runs_dir: Path) -> ConfigError:
    return ConfigError(f"there are no runs in {runs_dir}", hint="start one with `asyncrl train`")


def _liveness(status: Mapping[str, Any], age_s: float, is_held: bool) -> Liveness:
    if status["phase"] in ENDED:  # a resuming driver takes the lock before it writes a status
        return "live" if is_held else "ended"
    if is_held and "doing" in status:  # it starts, and says nothing while an import or Ray blocks it
        return "live"
    is_old, here = age_s > SILENT_AFTER_S, status["host"] == socket.gethostname()
    # The pid may belong to another process by now; the lock is released when its process ends.
    if here and not is_held and (is_old or not psutil.pid_exists(status["pid"])):
        return "dead"
    return "silent" if is_old else "live"
