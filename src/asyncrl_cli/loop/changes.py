"""How parts of the loop wait for each other. There is no other way: every wait has a name and is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TypeVar

from asyncrl_cli.base.errors import StallError

T = TypeVar("T")


class Change(Enum):
    """Kinds of change. A change wakes only the waits that depend on its kind."""

    SLOTS = "slots"
    """Sequences of a running group or of an eval ended and freed slots."""
    GROUPS = "groups"
    """A group finished or was dropped."""
    PUBLISHED = "published"
    """A new version is ready for the workers."""
    LOADED = "loaded"
    """A worker has loaded a version, or has finished its part of that version's eval."""
    RUN = "run"
    """Anything else, such as a stop. Every wait checks its condition."""


class Changes:
    """Wakes the tasks that wait for the run's state to change, and knows what each one waits for.

    `num_moves` counts what moves the run on (a sequence, a step, a load), so that a watchdog can tell waiting
    from a stall.
    """

    def __init__(self) -> None:
        self.waits: dict[str, str | Callable[[], str]] = {}
        self.num_moves = 0
        """Rises with every `notify`, and with every worker's report that shows new tokens."""
        self._sleepers: dict[Change, dict[asyncio.Future[None], Callable[[], object]]] = {
            change: {} for change in Change
        }
        """By kind of change: the future that each waiting task sleeps on, and the task's condition; oldest
        wait first."""

    def notify(self, changed: Change = Change.RUN) -> None:
        """The state has changed: wake the tasks whose condition depends on this kind of change and now holds,
        oldest wait first."""
        self.num_moves += 1
        for sleeper, condition in list(self._sleepers[changed].items()):
            if not sleeper.done() and condition():
                sleeper.set_result(None)

    async def until(
        self,
        condition: Callable[[], T | None],
        who: str,
        what: str | Callable[[], str],
        concerned: tuple[Change, ...] = tuple(Change),
        still_s: float | None = None,
    ) -> T:
        """Wait until `condition()` is true, and return its value. Checks it after every `notify` of
        `Change.RUN` or of a kind in `concerned`.

        `who` and `what` name the wait. Raises StallError if nothing in the whole run moves for `still_s`
        seconds.
        """
        while not (found := condition()):
            before = self.num_moves
            try:
                with self.waiting(who, what):
                    async with asyncio.timeout(still_s):
                        await self._sleep(condition, dict.fromkeys((Change.RUN, *concerned)))
            except TimeoutError:
                if self.num_moves == before:
                    waits = what if isinstance(what, str) else what()
                    moved = f"nothing has moved for {still_s:g} s"
                    hint = "the run's log has the last messages of each executor"
                    message = f"{moved}, and the {who.split()[0]} waits for {waits}"
                    raise StallError(message, hint=hint) from None
        return found

    async def _sleep(self, condition: Callable[[], object], concerned: Collection[Change]) -> None:
        sleeper = asyncio.get_running_loop().create_future()
        for change in concerned:
            self._sleepers[change][sleeper] = condition
        try:
            await sleeper
        finally:
            for change in concerned:
                del self._sleepers[change][sleeper]

    @contextmanager
    def waiting(self, who: str, what: str | Callable[[], str]) -> Iterator[None]:
        """Name a wait, for the watchdog and the screen, while the block runs."""
        self.waits[who] = what
        try:
            yield
        finally:
            self.waits.pop(who, None)

    def named(self) -> dict[str, str]:
        """Who waits for what right now."""
        return {who: what if isinstance(what, str) else what() for who, what in self.waits.items()}
