"""The runs below a directory: which there are, what one said last, and whether a driver holds it.

Two drivers never write one run: whoever drives it holds an exclusive flock on `<run>/lock`, which ends with its process, also by
SIGKILL.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TextIO

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.errors import ConfigError, RefusedError
from asyncrl_cli.safe_files import MAX_JSON_BYTES, Count, UnsafeFile, load_json, open_regular, parse_json, read_bytes, reason
from asyncrl_cli.storage import naming

LOCK = "lock"


class _Holder(TypedDict):
    """The lock's text."""

    pid: Count
    host: str


def find_run(argument: str, runs_dir: Path) -> Path:
    """The directory of a run, given by name or path. Raises ConfigError if there is none."""
    for candidate in (runs_dir / argument, Path(argument)):
        if _is_run(candidate):
            return candidate.resolve()
    raise ConfigError(f"no run '{argument}' in {runs_dir}", hint=known_runs(runs_dir))


def run_names(runs_dir: Path) -> list[str]:
    """Names of the runs below `runs_dir`, most recently touched first."""
    try:
        runs = [(path.stat().st_mtime, path.name) for path in runs_dir.iterdir() if _is_run(path)]
    except OSError:
        return []
    return [name for _, name in sorted(runs, reverse=True)]


def known_runs(runs_dir: Path) -> str:
    """For a hint."""
    names = run_names(runs_dir)
    if not names:
        return f"there are no runs in {runs_dir}; --runs-dir names another place"
    return f"known runs: {', '.join(names[:8])}" + (", ..." if len(names) > 8 else "")


def last_status(run_dir: Path) -> Mapping[str, Any]:
    """What a run's status.json says; nothing if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return parse_json(read_bytes(run_dir / "status.json", max_bytes=MAX_JSON_BYTES), dict[str, Any])
    return {}


def take_lock(run_dir: Path) -> TextIO | None:
    """Lock a run until the file is closed; None if another process holds it. Never waits. RefusedError if the lock is no file."""
    path = run_dir / LOCK
    try:
        with contextlib.suppress(FileNotFoundError):
            open_regular(path).close()
        file = path.open("a+", encoding="utf-8")
    except (OSError, UnsafeFile) as error:
        raise RefusedError(f"{path} cannot be locked: {reason(error)}", hint="is the directory yours to write?") from None
    with contextlib.ExitStack() as closing:
        closing.enter_context(file)
        if not _flock(file, fcntl.LOCK_EX):
            return None
        held_by: _Holder = {"pid": os.getpid(), "host": socket.gethostname()}
        with naming(path):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), json.dumps(held_by).encode())
        closing.pop_all()
    return file


def is_locked(run_dir: Path) -> bool:
    """Whether a live driver holds the run. Asks with a shared lock, so two askers do not see each other."""
    try:
        file = open_regular(run_dir / LOCK)
    except (OSError, UnsafeFile):  # nobody can hold a lock that is not there, or is no file
        return False
    with file:
        return not _flock(file, fcntl.LOCK_SH)


def holder(run_dir: Path) -> str:
    """Who wrote the lock last, for messages: `pid 4711 on host`."""
    try:
        content = load_json(run_dir / LOCK, _Holder)
        return f"pid {content['pid']} on {content['host']}"
    except RefusedError:  # it has the lock and has not said who it is yet
        return "another process"


def _flock(file: IO[Any], kind: int) -> bool:
    """False if another process holds it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    return False


def _is_run(directory: Path) -> bool:
    """Whether it is a run's directory. One that cannot be looked into is none."""
    return any(os.path.exists(directory / name) for name in ("profile.toml", "status.json"))
