"""`asyncrl status`: what a run's status.json says, and whether somebody still stands behind it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl_cli.checkpoint.find import run_names
from asyncrl_cli.checkpoint.lock import is_locked
from asyncrl_cli.checkpoint.run_directory import never_began
from asyncrl_cli.errors import ConfigError, RefusedError
from asyncrl_cli.loop.board import ENDED
from asyncrl_cli.observe.live_status import SCHEMA_VERSION

SILENT_AFTER_S = 15.0
"""Older than that, a live run's status is stale: it is rewritten once a second."""

Liveness = Literal["ended", "live", "silent", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """`liveness`: ended (it said so), live, silent (its process is there but says nothing), dead (it was killed)."""

    directory: Path
    status: Mapping[str, Any]
    liveness: Liveness
    age_s: float

    @property
    def remark(self) -> str:
        """What a reader has to know beside the status; empty where the status says it all."""
        if self.liveness == "dead" and never_began(self.directory):
            return (
                f"killed {self.age_s:.0f} s ago, while it started: nothing was trained, and `train --name {self.name}` replaces it"
            )
        if self.liveness == "dead":
            return f"not running any more: it was killed {self.age_s:.0f} s ago; go on with `asyncrl resume {self.name}`"
        if self.liveness == "live" and self.status["phase"] in ENDED:
            return "a driver holds the run: it goes on with it or is just ending it; this is what was said last"
        if self.liveness == "silent":
            return f"silent for {self.age_s:.0f} s: pid {self.status['pid']} on {self.status['host']} writes no status"
        return ""

    @property
    def name(self) -> str:
        return self.directory.name

    def to_json(self) -> dict[str, Any]:
        return {**self.status, "liveness": self.liveness, "age_s": round(self.age_s, 3)}


class StillStarting(RefusedError):
    """There is nothing to show yet; soon there will be."""


def read_status(run: str | None, runs_dir: Path) -> RunStatus:
    """Status of a run, given by name or directory; of the newest one if not given.

    Raises ConfigError if there is no such run, StillStarting before its first status, RefusedError if that cannot be read.
    """
    directory = _directory(run, runs_dir)
    path = directory / "status.json"
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = f"its log: asyncrl logs {directory.name}"
        if is_locked(directory):
            raise StillStarting(f"run '{directory.name}' is starting", hint=hint) from None
        raise RefusedError(f"run '{directory.name}' ended while it started: it has no status.json", hint=hint) from None
    except ValueError as error:
        raise RefusedError(f"{path} cannot be read: {error}") from None
    if status.get("schema_version") != SCHEMA_VERSION:
        raise RefusedError(f"{path} has schema_version {status.get('schema_version')}, not {SCHEMA_VERSION}")
    age_s = max(0.0, time.time() - status["updated_at"])
    return RunStatus(directory=directory, status=status, liveness=_liveness(directory, status, age_s), age_s=age_s)


def _liveness(directory: Path, status: Mapping[str, Any], age_s: float) -> Liveness:
    if status["phase"] in ENDED:  # a driver that resumes it holds the lock before it says anything
        return "live" if is_locked(directory) else "ended"
    here = status["host"] == socket.gethostname()
    if here and not _alive(status["pid"]) and not is_locked(directory):
        return "dead"
    if age_s <= SILENT_AFTER_S:
        return "live"
    # A pid may have been given to somebody else since; the lock ends with its process.
    return "dead" if here and not is_locked(directory) else "silent"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _directory(run: str | None, runs_dir: Path) -> Path:
    names = run_names(runs_dir)
    if run is None:
        if not names:
            raise ConfigError(f"there are no runs in {runs_dir}", hint="start one with `asyncrl train`")
        return runs_dir / names[0]
    for candidate in (runs_dir / run, Path(run)):
        if (candidate / "status.json").exists() or (candidate / "profile.toml").exists():
            return candidate.resolve()
    known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise ConfigError(
        f"no run '{run}' in {runs_dir}",
        hint=f"known runs: {known}" if names else "there are none yet; one that was just started is there in a few seconds",
    )
