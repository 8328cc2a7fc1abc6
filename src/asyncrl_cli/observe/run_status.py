"""A run seen from outside: its status, whether the driver that wrote it is still alive, and what comes next;
and all runs of a directory, one row each."""

from __future__ import annotations

import os
import re
import shlex
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.base.paths import ADDRESS_VARIABLE, as_typed
from asyncrl_cli.base.safe_files import MIB, UnsafeFile, open_regular, parse_json, read_bytes, reason
from asyncrl_cli.checkpoint.lookup import (
    REPLAY,
    begin_anew,
    find_run,
    has_had_checkpoint,
    is_locked,
    last_status,
    run_names,
)
from asyncrl_cli.checkpoint.reader import checkpoints_in
from asyncrl_cli.contracts.events import ENDED
from asyncrl_cli.contracts.status import Status, parse_status
from asyncrl_cli.observe.format import duration

MAX_STATUS_BYTES = 16 * MIB
SILENT_AFTER_S = 15.0
"""A live run rewrites its status once a second: one older than this is called silent."""
LOG_TAIL_BYTES = 2**16
ERROR_LINE = re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL) [\w.]+: (.+)")
NEXT = {
    "done": "report",
    "stopped": "resume",
    "failed": "resume",
    "killed": "resume",
    "silent": "logs",
    "damaged": "logs",
}
"""State -> the next subcommand. A run in any other state is under way: `status`."""

Liveness = Literal["ended", "live", "silent", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """`liveness`: ended (the status says so), live, silent (may be running, but its status is old), dead (it
    was killed). `next`: the next command, if the status was read on another machine."""

    directory: Path
    status: Status
    liveness: Liveness
    age_s: float
    next: str = ""

    @property
    def remark(self) -> str:
        """A warning to show beside the status; empty if there is none."""
        if self.liveness == "dead":
            killed = f"not running any more: it was killed {duration(self.age_s)} ago"
            if not (self.status.checkpoint or checkpoints_in(self.directory / "checkpoints")):
                killed += ", before its first checkpoint"
            return f"{killed}; next: `{self.next_command}`"
        if self.is_resuming:
            return "a driver is resuming or ending the run; this is the last status that was written"
        if self.liveness == "silent":
            writer = f"pid {self.status.pid} on {self.status.host}"
            return f"silent for {duration(self.age_s)}: {writer} writes no status"
        return ""

    @property
    def is_over(self) -> bool:
        return self.liveness in ("ended", "dead")

    @property
    def is_resuming(self) -> bool:
        """A driver holds the run, and has not yet written a status. (The driver that wrote this one may still
        be shutting down.)"""
        is_writer = self.status.host == socket.gethostname() and psutil.pid_exists(self.status.pid)
        return self.liveness == "live" and self.status.phase in ENDED and not is_writer

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def state(self) -> str:
        """The phase in the run's status or, if the run no longer writes it, what is seen from outside:
        killed, silent or starting."""
        seen = {"dead": "killed", "silent": "silent"}
        return seen.get(self.liveness) or ("starting" if self.is_resuming else self.status.phase)

    @property
    def next_command(self) -> str:
        return self.next or next_command(self.directory, self.state)

    @property
    def last_error(self) -> str:
        """The first line of the error that ended the run: its own, else the last one in the driver's log of
        its newest attempt."""
        if self.status.error:
            return self.status.error.splitlines()[0]
        try:
            with open_regular(self.directory / "logs" / "latest" / "driver.log") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                lines = log.read(LOG_TAIL_BYTES).decode(errors="replace").splitlines()
        except (OSError, UnsafeFile):
            return ""
        errors = (match[1] for line in reversed(lines) if (match := ERROR_LINE.match(line)))
        return next(errors, "")

    @property
    def replayed(self) -> str:
        """What a replay has trained, in words; "" for a run."""
        made = last_status(self.directory, REPLAY)
        what = f"a replay of {made.get('of')}, of its steps after {made.get('from_step')}"
        return f"{what}: counts include those before" if made else ""

    @classmethod
    def from_json(cls, directory: Path, text: str) -> RunStatus:
        """The inverse of `to_json`. Raises ValueError for anything else."""
        seen = parse_json(text, dict[str, Any])
        further = {key: seen[key] for key in ("liveness", "age_s", "next")}
        return cls(directory=directory, status=parse_status(text), **further)

    def to_json(self) -> dict[str, Any]:
        further = {"liveness": self.liveness, "age_s": round(self.age_s, 3), "next": self.next_command}
        return {**self.status.to_json(), **further}


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
    # Before its status is read: a driver that ends writes its last one, then lets go.
    is_held = is_locked(directory)
    path, log = directory / "status.json", f"`asyncrl logs {as_typed(directory)}`"
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
    age_s = max(0.0, time.time() - status.updated_at)
    liveness = _liveness(status, age_s, is_held)
    return RunStatus(directory=directory, status=status, liveness=liveness, age_s=age_s)


def _liveness(status: Status, age_s: float, is_held: bool) -> Liveness:
    if status.phase in ENDED:  # a resuming driver takes the lock before it writes a status
        return "live" if is_held else "ended"
    if is_held and status.doing is not None:  # it starts, and says nothing while an import or Ray blocks it
        return "live"
    is_old, here = age_s > SILENT_AFTER_S, status.host == socket.gethostname()
    # The pid may belong to another process by now; the lock is released when its process ends.
    if here and not is_held and (is_old or not psutil.pid_exists(status.pid)):
        return "dead"
    return "silent" if is_old else "live"


def no_runs(runs_dir: Path) -> ConfigError:
    return ConfigError(f"{runs_dir.absolute()} has no runs", hint="start one with `asyncrl train`")


def next_command(directory: Path, state: str) -> str:
    """The next command for this run, as it is typed here. A job server has no `report`, but its files may be
    shared."""
    verb, run = NEXT.get(state, "status"), as_typed(directory)
    if last_status(directory, REPLAY).get("failure"):  # all its steps are trained
        verb = "report"
    if verb == "resume" and not checkpoints_in(directory / "checkpoints"):
        is_lost = state == "killed" and not has_had_checkpoint(directory)
        if is_lost and ADDRESS_VARIABLE not in os.environ:
            return begin_anew(directory)
        verb = "logs"
    elif verb == "report" and ADDRESS_VARIABLE in os.environ:
        run = shlex.quote(str(directory))
    return f"asyncrl {verb} {run}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """`state`: the run's phase, or killed, silent, damaged. `age_s`: of its last status. `next`: the next
    command for it. `error`: the last error of a run that failed, was killed or cannot be read. Figures that
    are not known are None."""

    name: str
    state: str
    age_s: float
    next: str
    profile: str = ""
    mode: str = ""
    step: int | None = None
    train_steps: int | None = None
    reward: object = None
    trainer_idle_ratio: object = None
    rollouter_idle_ratio: object = None
    staleness_mean: object = None
    error: str = ""


def overview(runs_dir: Path) -> list[RunRow]:
    """A row for each run, the newest first. Raises ConfigError if there are none."""
    names = run_names(runs_dir)
    if not names:
        raise no_runs(runs_dir)
    return [_row(runs_dir / name) for name in names]


def _row(directory: Path) -> RunRow:
    error = ""
    try:
        found = read_status(str(directory.absolute()), directory.parent)
    except StillStarting:
        state = "starting"
    except UnreadableStatus as damaged:
        state, error = "damaged", damaged.message
    except (RefusedError, ConfigError) as ended:  # ... while it started, or it has been removed meanwhile
        state, error = "killed", ended.message
    else:
        status, state = found.status, found.state
        return RunRow(
            name=found.name,
            state=state,
            age_s=round(found.age_s, 1),
            next=found.next_command,
            profile=status.profile,
            mode=status.mode,
            step=status.progress.step,
            train_steps=status.progress.train_steps,
            reward=status.reward.get("mean"),
            trainer_idle_ratio=status.utilization.get("trainer_idle_ratio"),
            rollouter_idle_ratio=status.utilization.get("rollouter_idle_ratio"),
            staleness_mean=status.staleness.get("mean"),
            error=found.last_error if state in ("failed", "killed") else "",
        )
    try:
        age_s = max(0.0, time.time() - directory.stat().st_mtime)
    except OSError:
        age_s = 0.0
    following = next_command(directory, state)
    return RunRow(name=directory.name, state=state, age_s=round(age_s, 1), next=following, error=error)
