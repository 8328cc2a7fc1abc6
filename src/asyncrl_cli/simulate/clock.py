"""A virtual-time asyncio event loop: it never blocks, and `time()` jumps to the next timer.

asyncio asks its selector to wait for files until the next timer is due. The selector here has no files: it moves the clock by as
much instead. Asked to wait without a limit, it knows that nothing will ever happen again.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Nothing is ready, no timer is left, and the work is not done."""


class _JumpingSelector(selectors.SelectSelector):
    """Calls `wait(timeout)` instead of waiting."""

    def __init__(self, wait: Callable[[float | None], None]) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> list[Any]:
        self._wait(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For one thread: without sockets, executors and `call_soon_threadsafe`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self._wait))

    def time(self) -> float:
        return self._now_s

    def _wait(self, timeout: float | None) -> None:
        if timeout is None:
            raise DeadlockError(f"at {self._now_s:g} s nothing is scheduled and the work is not done")
        if timeout:
            self._now_s += timeout
            self._clock_resolution = math.ulp(self._now_s)  # timers of this very moment are due: a nanosecond is none after a year


def run_virtual(work: Coroutine[Any, Any, T], *, loop_factory: Callable[[], VirtualTimeLoop] = VirtualTimeLoop) -> T:
    """Run `work` to its end on a fresh virtual clock. Raises DeadlockError if it cannot end."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(work)
