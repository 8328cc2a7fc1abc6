"""When a simulated worker answers a long poll: at a change, not too often, and after a while even if nothing has changed."""

from __future__ import annotations

import asyncio

from asyncrl_cli.loop.signal import background
from asyncrl_cli.simulate.calls import Calls, Limit


class LongPoll:
    """`count` counts the changes. An answer comes `debounce_s` after the previous one at the earliest, and after `poll_s` without a
    change; the timer for that only watches, and is left running between polls."""

    def __init__(self, calls: Calls, debounce_s: float, poll_s: float) -> None:
        self.count = 0
        self._calls = calls
        self._debounce_s = debounce_s
        self._poll_s = max(poll_s, debounce_s)
        self._loop = asyncio.get_running_loop()
        self._answered_s = float("-inf")
        self._waiting: asyncio.Future[None] | None = None
        self._is_due = False
        self._at_rest: asyncio.TimerHandle | None = None

    def note(self) -> None:
        self.count += 1
        if self._waiting is not None and not self._is_due:
            self._answer_soon(self._waiting)

    async def after(self, seen: int, limit: Limit) -> int:
        """Returns the count once there is something to say, or nothing for long. One caller at a time."""
        waiting = self._waiting = self._calls.open()
        self._is_due = False
        if self.count != seen:
            self._answer_soon(waiting)
        elif self._at_rest is None:
            self._look_again_at(self._loop.time() + self._poll_s)
        self._asked_s = self._loop.time()
        try:
            await self._calls.answer(waiting, limit, is_quick=True)
        finally:
            self._waiting = None
        self._answered_s = self._loop.time()
        return self.count

    def _answer_soon(self, waiting: asyncio.Future[None]) -> None:
        self._is_due = True
        allowed_s = self._answered_s + self._debounce_s
        if allowed_s <= self._loop.time():
            self._calls.resolve(waiting)
        else:
            self._loop.call_at(allowed_s, self._calls.resolve, waiting)

    def _look_again_at(self, when_s: float) -> None:
        with background():
            self._at_rest = self._loop.call_at(when_s, self._look_again)

    def _look_again(self) -> None:
        self._at_rest = None
        if self._waiting is None or self._is_due:
            return
        if self._loop.time() >= self._asked_s + self._poll_s:
            self._calls.resolve(self._waiting)
        else:
            self._look_again_at(self._asked_s + self._poll_s)
