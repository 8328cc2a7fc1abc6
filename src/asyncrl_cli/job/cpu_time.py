"""How much CPU time a process and its children get."""

from __future__ import annotations

from contextlib import suppress

import psutil


class CpuTime:
    """CPU seconds that a process (by default this one) and its children spend from now on, per core: those of the busiest thread
    or, if that is more, the busiest process's sum divided by `threads`. (An engine may compute in a child.)

    A plain sum would hide that other programs take cores: two threads with half a core each also add up to 1 s per second.
    """

    def __init__(self, threads: int, pid: int | None = None) -> None:
        self._threads = threads
        self._process = psutil.Process(pid)
        self._began_s = self._thread_seconds()

    def spent_s(self) -> float:
        spent_s = {
            pid: [seconds - self._began_s.get(pid, {}).get(thread, 0.0) for thread, seconds in own.items()]
            for pid, own in self._thread_seconds().items()
        }
        return max(max(max(own), sum(own) / self._threads) for own in spent_s.values())

    def _thread_seconds(self) -> dict[int, dict[int, float]]:
        """CPU seconds so far by process id and thread id."""
        seconds: dict[int, dict[int, float]] = {}
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.Error):  # a child that ends while we look
                seconds[process.pid] = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
        return seconds
