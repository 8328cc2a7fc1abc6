"""Who may generate now: first come, first served, at most `slots` at once, nobody while a drain closes the gate.

    entered(name) -> waiting (a pending future) -> True: running -> leave()
                                                -> False: given up, by give_up(name) or give_up_all()

`open` and `leave` let the next ones in; `idle` waits until the last running one has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SlotGate:
    """`on_change(running)` is called whenever the number of running sequences changes."""

    def __init__(self, slots: int, on_change: Callable[[int], None]) -> None:
        self.slots = slots
        self.running = 0
        self.is_open = True
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._on_change = on_change

    async def entered(self, name: str) -> bool:
        """True when the slot is held: `leave` it then. False if it was given up meanwhile."""
        turn = self._waiting[name] = asyncio.get_running_loop().create_future()
        self._let_in()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.leave()  # it was let in and cancelled at once
            raise
        finally:
            self._waiting.pop(name, None)

    def give_up(self, name: str) -> None:
        """Its `entered` returns False, if it still waits."""
        turn = self._waiting.pop(name, None)
        if turn is not None and not turn.done():
            turn.set_result(False)

    def give_up_all(self) -> None:
        for name in list(self._waiting):
            self.give_up(name)

    def leave(self) -> None:
        assert self.running > 0
        self.running -= 1
        if self.running == 0:
            self._idle.set()
        self._let_in()
        self._on_change(self.running)

    def close(self) -> None:
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        self._let_in()

    async def idle(self) -> None:
        """Until nobody runs. Only sensible behind a closed gate."""
        assert not self.is_open
        await self._idle.wait()

    def _let_in(self) -> None:
        before = self.running
        while self.is_open and self._waiting and self.running < self.slots:
            turn = self._waiting.pop(next(iter(self._waiting)))
            if not turn.done():
                self.running += 1
                turn.set_result(True)
        if self.running > before:
            self._idle.clear()
            self._on_change(self.running)
