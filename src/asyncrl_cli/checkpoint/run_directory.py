"""The directory of a run: created once, locked by one driver, with a log directory per attempt.

runs/<name>/
  lock  stop  profile.toml  config.resolved.json  status.json  metrics.jsonl  events.jsonl
  checkpoints/  samples/  logs/attempt-1/  logs/latest -> attempt-1
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.paths import as_typed, check_name
from asyncrl_cli.base.safe_files import MIB, UnsafeFile, read_bytes, reason
from asyncrl_cli.base.storage import make_in, remove_if_empty, remove_tree, replace_link, replace_text
from asyncrl_cli.checkpoint.lookup import (
    LOCK,
    REPLAY,
    STARTING,
    UNENDED,
    failed_start,
    go_on,
    has_had_checkpoint,
    holder,
    is_locked,
    known_runs,
    last_status,
    take_lock,
)
from asyncrl_cli.checkpoint.reader import finish_interrupted_replacements
from asyncrl_cli.profile.schema import MOST_REWARDS

STOP_REQUEST = "stop"
START_FILES = {
    LOCK,
    STOP_REQUEST,
    REPLAY,
    "profile.toml",
    "config.resolved.json",
    "status.json",
    "checkpoints",
    "samples",
    "logs",
    "model",
    "reward.json",
    *(f"reward-{number}.json" for number in range(2, MOST_REWARDS + 1)),
    "environment.json",
    "agent.json",
    "weights",
}
"""What the start of a run writes. A directory that holds anything else is never replaced."""


class RunDirectory:
    """Paths and attempts of one run. `create` (for a new run) and `open` (for a resume) return one that holds
    the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.profile_toml = path / "profile.toml"
        self.config_resolved = path / "config.resolved.json"
        self.status = path / "status.json"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.timeline = path / "timeline.jsonl"
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"
        self.logs = path / "logs"
        self._lock: TextIO | None = None
        self._attempt_dir: Path | None = None
        self._made_runs_dir = False

    @classmethod
    def create(
        cls, runs_dir: Path, name: str, *, profile_toml: str, resolved: Mapping[str, object]
    ) -> RunDirectory:
        """Make `runs_dir/name` and lock it. `resolved` is the whole configuration with the origin of each
        value, as JSON.

        Replaces a run of that name that was killed before it began, since it holds nothing of value. Raises
        ConfigError if `name` is not valid as a directory name, RefusedError if that run exists.
        """
        check_name(name)
        path = runs_dir / name
        run = cls(path)
        if never_began(path) and (lock := take_lock(path)):
            with lock:
                run.remove()
        try:
            _, run._made_runs_dir = make_in(runs_dir, path.mkdir)
        except FileExistsError:
            if not os.path.lexists(path):  # the directory of runs is a file
                raise
            raise _in_use(path) from None
        try:
            run._take()
            run.keep_profile(profile_toml, resolved)
        except BaseException:
            run.close()
            with suppress(OSError):  # the cause is raised, not that its traces stay
                run.remove()
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Lock an existing run for a resume, and delete stop requests of earlier attempts.

        Raises RefusedError if another driver holds the run, or the path is not a run.
        """
        if not (path / "profile.toml").exists():
            why = f"{path} is not a run directory: profile.toml is missing"
            raise RefusedError(why, hint=known_runs(path.parent))
        run = cls(path)
        run._take()
        (path / STOP_REQUEST).unlink(missing_ok=True)
        return run

    def keep_profile(self, toml: str, resolved: Mapping[str, object]) -> None:
        replace_text(self.profile_toml, toml)
        replace_text(self.config_resolved, json.dumps(resolved, indent=2, default=str) + "\n")

    def start_attempt(self) -> Path:
        """Make the next `logs/attempt-N` and point `logs/latest` at it."""
        directory = self.logs / f"attempt-{self.attempts + 1}"
        directory.mkdir()
        self._attempt_dir = directory
        replace_link(self.logs / "latest", directory.name)
        return directory

    def remove_attempt(self) -> None:
        """Undo `start_attempt`, if it was called: nothing came of this attempt of a resumed run."""
        if self._attempt_dir is not None:
            remove_tree(self._attempt_dir)
            replace_link(self.logs / "latest", f"attempt-{self.attempts}")

    @property
    def attempts(self) -> int:
        numbers = [path.name.removeprefix("attempt-") for path in self.logs.glob("attempt-*")]
        return max((int(number) for number in numbers if number.isdigit()), default=0)

    def stop_requests(self) -> int:
        """How many stop requests this attempt has had: one stops it in good order, two abort it."""
        return _requests_in(self.path / STOP_REQUEST)

    def remove(self, *, keep_logs: bool = False) -> Path | None:
        """Delete the directory of a run that never began, which frees its name. Also delete the directory of
        runs if it was made for this run and is empty. Returns where the run's logs are, if kept."""
        logs = failed_start(self.path) if keep_logs else None
        if logs is not None:
            shutil.rmtree(logs, ignore_errors=True)
            self.logs.rename(logs)
        remove_tree(self.path)
        if self._made_runs_dir:
            remove_if_empty(self.path.parent)
        return logs

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()

    def _take(self) -> None:
        """Lock the run and make missing folders. Raises RefusedError if another process holds the lock."""
        self._lock = take_lock(self.path)
        if self._lock is None:
            run = as_typed(self.path)
            hint = f"watch it with `asyncrl status {run}`, or end it with `asyncrl stop {run}`"
            raise RefusedError(f"run '{self.name}' is running: {holder(self.path)} holds it", hint=hint)
        for directory in (self.checkpoints, self.samples, self.logs):
            directory.mkdir(exist_ok=True)


def request_stop(run_dir: Path) -> int:
    """Ask the driver of a run to stop, from any process. Returns the number of requests to this attempt,
    including this one."""
    path = run_dir / STOP_REQUEST
    _requests_in(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{time.time():.3f}\n")
    return _requests_in(path)


def _requests_in(path: Path) -> int:
    try:
        return read_bytes(path, max_bytes=MIB).count(b"\n")
    except FileNotFoundError:
        return 0
    except (OSError, UnsafeFile) as error:
        hint = "remove it: it holds only requests to stop"
        raise RefusedError(f"{path} cannot be read: {reason(error)}", hint=hint) from None


def check_free(runs_dir: Path, name: str) -> None:
    """Raises the errors of `RunDirectory.create` before anything has been started."""
    check_name(name)
    if (runs_dir / name).exists() and not never_began(runs_dir / name):
        raise _in_use(runs_dir / name)


def never_began(run_dir: Path) -> bool:
    """Whether this is the directory of a run that was killed during its start: it is unlocked, and nothing
    was trained."""
    if not (run_dir / LOCK).is_file() or is_locked(run_dir):
        return False
    status = last_status(run_dir)  # the loop's first status also has the phase `starting`, but no `doing`
    is_starting = status.get("phase") == STARTING and "doing" in status
    if os.path.lexists(run_dir / "status.json") and not is_starting:
        return False
    if any((run_dir / "checkpoints").glob("*")):
        return False
    also_written = ("*.tmp", "scorers-*.json")
    entries = run_dir.iterdir()
    return all(entry.name in START_FILES or any(map(entry.match, also_written)) for entry in entries)


def clear_lost(run_dir: Path, *, replay_of: str = "") -> Path | None:
    """Delete the directory of a run that was killed before its first checkpoint, or of such a replay of the
    run `replay_of`: there is nothing to resume. Returns where its logs are kept. If it is not such a run,
    changes nothing and returns None."""
    if last_status(run_dir).get("phase") not in UNENDED or (lock := take_lock(run_dir)) is None:
        return None
    with lock:
        finish_interrupted_replacements(run_dir / "checkpoints")
        if has_had_checkpoint(run_dir) or last_status(run_dir, REPLAY).get("of", "") != replay_of:
            return None
        return RunDirectory(run_dir).remove(keep_logs=True)


def _in_use(path: Path) -> RefusedError:
    other = go_on(path)
    if is_locked(path):
        other = (
            f"watch it with `asyncrl watch {as_typed(path)}`, or end it with `asyncrl stop {as_typed(path)}`"
        )
    elif last_status(path).get("phase") == "done":
        other = f"`asyncrl report {as_typed(path)}` shows it"
    what = "is running" if is_locked(path) else "exists"
    return RefusedError(f"a run of that name {what}: {path}", hint=f"give another --name, or: {other}")


def fresh_name(profile: str, runs_dir: Path) -> str:
    """A name for a run without --name: the profile and the local time, with a number if that name is
    taken."""
    stem = f"{stem_of(profile)}-{time.strftime('%Y%m%d-%H%M%S')}"
    name, number = stem, 1
    while (runs_dir / name).exists():
        number += 1
        name = f"{stem}-{number}"
    return name


def stem_of(profile: str) -> str:
    """A profile's name as the beginning of a run's name, with `-` for characters that a run's name cannot
    have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", profile).strip("-.") or "run"
