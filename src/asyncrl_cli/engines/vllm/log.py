"""Why a process of vLLM ended, as far as the log tells: they all write to the stdout that they share with us.

In a rollout worker that is its log file. A terminal or a pipe can not be read again: nothing is known then.
"""

from __future__ import annotations

import os
import re
import signal
import stat

TAIL_BYTES = 512 * 1024
STDOUT = 1
DIED = re.compile(r"Worker proc (\S+) died unexpectedly \(exit code: (-?\d+)\)")
ERROR = re.compile(r"^(?:.*\bERROR\b[^\]]*\] )?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")
"""The last line of a traceback, as vLLM's loggers write it (with process, level, time and place before it), or bare."""
POINTS_ELSEWHERE = re.compile(r"see (the )?(root cause|stack trace|error)", re.IGNORECASE)
LONGEST = 400
"""Characters of an error in a message; all of it is in the log."""


class EngineLog:
    """What has been written since this was made: the log of a restarted worker begins with its predecessor's."""

    def __init__(self, descriptor: int = STDOUT) -> None:
        self._descriptor = descriptor
        self._begin = _size(descriptor)

    def killed_worker(self) -> str:
        """The worker process that a signal has ended, as the engine process saw it; "" if none was."""
        deaths = [(name, int(code)) for name, code in DIED.findall(self._tail())]
        return next((f"{name} with {how_it_ended(code)}" for name, code in deaths if code < 0), "")

    def why(self) -> str:
        """The signal or the last error with which a process of the engine has ended; "" if the log has neither."""
        if killed := self.killed_worker():
            return killed
        lines = self._tail().splitlines()
        errors = [found[1] for line in lines if (found := ERROR.match(line)) and not POINTS_ELSEWHERE.search(line)]
        last = errors[-1] if errors else ""
        return last if len(last) <= LONGEST else f"{last[:LONGEST]}..."

    def _tail(self) -> str:
        size = _size(self._descriptor)
        if size <= self._begin:
            return ""
        begin = max(self._begin, size - TAIL_BYTES)
        try:
            # Opened anew: ours may be open for writing only.
            with open(f"/proc/self/fd/{self._descriptor}", "rb") as log:
                log.seek(begin)
                return log.read(size - begin).decode(errors="replace")
        except OSError:
            return ""


def how_it_ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _size(descriptor: int) -> int:
    """Bytes of a regular file; 0 for anything else."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
