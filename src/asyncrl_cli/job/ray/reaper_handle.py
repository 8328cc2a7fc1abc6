"""The driver's handle on the reaper process (reaper.py). Runs in the driver."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from asyncrl_cli.job.ray import reaper

END_TIMEOUT_S = 20.0

_pipe: int | None = None
"""The file descriptor of the pipe to the current reaper."""


class Reaper:
    """The reaper process, which cleans up after the driver."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        others = [str(child.pid) for child in psutil.Process().children()]
        self._words = [sys.executable, "-P", reaper.__file__, str(os.getpid()), str(directory), *others]
        self.process = self._start()

    def mend(self) -> None:
        """If the reaper is dead, start another, which also covers everything started since the first one."""
        if self.process.poll() is not None:
            self._close_pipe()
            self.process = self._start()

    def end(self) -> None:
        """Say goodbye, and return when the reaper has cleaned up and ended."""
        self.mend()
        say_goodbye()
        self._close_pipe()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> subprocess.Popen[bytes]:
        global _pipe
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(self._words, stdin=pipe, stdout=nothing, start_new_session=True)
        assert process.stdin is not None
        _pipe = process.stdin.fileno()
        return process

    def _close_pipe(self) -> None:
        global _pipe
        assert self.process.stdin is not None
        _pipe = None  # the descriptor's number may soon belong to another file
        self.process.stdin.close()


def say_goodbye() -> None:
    """Announce an orderly end. Safe in a signal handler."""
    if _pipe is not None:
        with contextlib.suppress(OSError):  # the reaper is dead itself
            os.write(_pipe, reaper.GOODBYE)
