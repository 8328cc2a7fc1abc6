"""Who may generate now: first come, first served, at most `slots` at once, nobody while a drain closes the gate.

    enter() -> waiting (a pending future) -> running (future done) -> leave()
    entered(name): the same for who may give up meanwhile, by give_up(name) or give_up_all()

`open` and `leave` let the next ones in; `idle` waits until the last running one has left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class SlotGate:
    """`on_change(running)` is called whenever the number of running sequences changes."""

    def __init__(self, slots: int, on_change: Callable[[int], None]) -> None:
        self.slots = slots
        self.running = 0
        self._is_open = True
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._idle: asyncio.Future[None] | None = None
        self._on_change = on_change

    def enter(self) -> asyncio.Future[None]:
        """A future that is done when the slot is held. Cancel it to give up; `leave` only after it was done."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._let_in()
        return turn

    async def entered(self, name: str) -> bool:
        """True when the slot is held: `leave` it then. False if it was given up meanwhile."""
        turn = self._turns[name] = self.enter()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            task = asyncio.current_task()
            if not turn.cancelled() or (task is not None and task.cancelling()):
                raise
            return False
        finally:
            del self._turns[name]
        return True

    def give_up(self, name: str) -> None:
        """Its `entered` returns False, if it still waits."""
        if turn := self._turns.get(name):
            turn.cancel()

    def give_up_all(self) -> None:
        for turn in self._turns.values():
            turn.cancel()

    def leave(self) -> None:
        assert self.running > 0
        self.running -= 1
        self._let_in()
        self._on_change(self.running)
        if self.running == 0 and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def close(self) -> None:
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self._let_in()

    async def idle(self) -> None:
        """Until nobody runs. Only sensible behind a closed gate."""
        assert not self._is_open
        if self.running:
            if self._idle is None or self._idle.done():
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def _let_in(self) -> None:
        entered = False
        while self._is_open and self._waiting and self.running < self.slots:
            turn = self._waiting.popleft()
            if not turn.done():
                self.running += 1
                entered = True
                turn.set_result(None)
        if entered:
            self._on_change(self.running)
