"""Waiting, named and bounded: the one way in which parts of the loop wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Changes:
    """Wakes whoever waits for the run's state to change, and knows who waits for what.

    `progress` counts real progress (a sequence, a step, a load), so that a watchdog can tell waiting from a stall.
    """

    def __init__(self) -> None:
        self.waits: dict[str, str] = {}
        self.progress = 0
        self._sleepers: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """The state changed: everyone who waits looks again (in the order in which they began to wait)."""
        self.progress += 1
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    async def until(self, condition: Callable[[], bool], who: str, what: str | Callable[[], str]) -> None:
        """Wait until `condition()` holds, which is looked at after every `notify`."""
        while not condition():
            with self.waiting(who, what if isinstance(what, str) else what()):
                sleeper = asyncio.get_running_loop().create_future()
                self._sleepers.append(sleeper)
                await sleeper

    @contextmanager
    def waiting(self, who: str, what: str) -> Iterator[None]:
        """Name a wait, for the watchdog and the screen, while the block runs."""
        self.waits[who] = what
        try:
            yield
        finally:
            self.waits.pop(who, None)
