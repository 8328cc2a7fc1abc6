"""A virtual-time asyncio event loop: it never blocks, and `time()` jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingScheduledError(RuntimeError):
    """Nothing is ready, no timer runs, and the work is not done: everybody waits for somebody."""


class _JumpingSelector(selectors.SelectSelector):
    """Selects nothing; instead of waiting for the timeout, moves the virtual time on by it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingScheduledError("nothing is scheduled and the work is not done")
        self.now_s += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Single-threaded: no sockets, no executors, no `call_soon_threadsafe` from other threads."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end on a fresh virtual clock."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
