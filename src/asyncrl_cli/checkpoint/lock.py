"""The lock of a run directory: two drivers never write one run. It ends with its process, also by SIGKILL."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import TextIO

LOCK = "lock"


class RunLock:
    """An exclusive flock on `<run>/lock`, whose text says who holds it. `acquire` never waits."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._file: TextIO | None = None

    def acquire(self) -> bool:
        """False if another process holds it."""
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        file.seek(0)
        file.truncate()
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def is_locked(run_dir: Path) -> bool:
    """Whether a live driver holds the run. Asks with a shared lock, so two askers do not see each other."""
    try:
        file = (run_dir / LOCK).open(encoding="utf-8")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def holder(run_dir: Path) -> str:
    """Who wrote the lock last, for messages: `pid 4711 on host`."""
    try:
        content = json.loads((run_dir / LOCK).read_text(encoding="utf-8"))
        return f"pid {content['pid']} on {content['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
