"""The lock of a run directory: two drivers never write one run. It ends with its process, also by SIGKILL."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import IO, Any, TextIO

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.safe_files import Count, UnsafeFile, load_json, open_regular, reason
from asyncrl_cli.storage import naming

LOCK = "lock"


class _Holder(TypedDict):
    pid: Count
    host: str


class RunLock:
    """An exclusive flock on `<run>/lock`, whose text says who holds it. `acquire` never waits."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._file: TextIO | None = None

    def acquire(self) -> bool:
        """False if another process holds it. RefusedError if it is no file."""
        try:
            with contextlib.suppress(FileNotFoundError):
                open_regular(self._path).close()
            file = self._path.open("a+", encoding="utf-8")
        except (OSError, UnsafeFile) as error:
            raise RefusedError(f"{self._path} cannot be locked: {reason(error)}", hint="is the directory yours to write?") from None
        if not _flock(file, fcntl.LOCK_EX):
            file.close()
            return False
        self._file = file
        held_by: _Holder = {"pid": os.getpid(), "host": socket.gethostname()}
        with naming(self._path):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), json.dumps(held_by).encode())
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def is_locked(run_dir: Path) -> bool:
    """Whether a live driver holds the run. Asks with a shared lock, so two askers do not see each other."""
    try:
        file = open_regular(run_dir / LOCK)
    except (OSError, UnsafeFile):  # nobody can hold a lock that is not there, or is no file
        return False
    with file:
        return not _flock(file, fcntl.LOCK_SH)


def _flock(file: IO[Any], kind: int) -> bool:
    """False if another process holds it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    return False


def holder(run_dir: Path) -> str:
    """Who wrote the lock last, for messages: `pid 4711 on host`."""
    try:
        content = load_json(run_dir / LOCK, _Holder)
        return f"pid {content['pid']} on {content['host']}"
    except RefusedError:  # it has the lock and has not said who it is yet
        return "another process"
