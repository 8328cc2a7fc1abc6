"""Decides which trajectories with several turns may generate on a rollout worker, and which ones a drain
waits for.

    take (begins) ─> generate ─> pause, waits for a tool ─> take (goes on) ─> generate ─> ... ─> leave

A worker has as many places as its engine has slots. With `rollout.hold_slots` a trajectory keeps its place
during a pause. Without it, the trajectory queues for a place when it goes on, ahead of all that have not
begun. Trajectories of a single turn take no place: they queue in the engine, which begins one in the same
step in which another ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    def __init__(self, number: int, *, hold: bool) -> None:
        self.hold = hold
        self._free = number
        self._num_begun = 0
        self._is_closed = False
        self._going_on: deque[TrajectoryPlace] = deque()
        self._new: deque[TrajectoryPlace] = deque()
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Let no trajectory begin, and wait until all that have begun have left. Those that wait begin after
        the block."""
        self._is_closed = True
        try:
            await self._empty.wait()
            yield
        finally:
            self._is_closed = False
            self._hand_out()

    def queue(self, place: TrajectoryPlace) -> None:
        (self._going_on if place.has_begun else self._new).append(place)
        self._hand_out()

    def give_back(self) -> None:
        self._free += 1
        self._hand_out()

    def left(self) -> None:
        """A trajectory that had begun has ended."""
        self._num_begun -= 1
        if not self._num_begun:
            self._empty.set()

    def _hand_out(self) -> None:
        while self._free and (queue := self._going_on or (self._new if not self._is_closed else None)):
            place = queue.popleft()
            if place.turn.cancelled():
                continue
            self._free -= 1
            if not place.has_begun:
                self._num_begun += 1
                self._empty.clear()
            place.has_begun = place.is_taken = True
            place.turn.set_result(None)


class TrajectoryPlace:
    """One trajectory's place. `is_taken`: the trajectory has it now. `turn`: done when the trajectory gets
    it."""

    def __init__(self, places: Places) -> None:
        self.has_begun = self.is_taken = False
        self.turn: asyncio.Future[None]
        self._places = places

    async def take(self) -> None:
        """Wait for a place, before each answer."""
        if self.is_taken:
            return
        self.turn = asyncio.get_running_loop().create_future()
        self._places.queue(self)
        try:
            await self.turn
        except asyncio.CancelledError:
            self.leave()  # the place may have been handed out in the same turn of the event loop
            raise

    def pause(self) -> None:
        """The trajectory waits for its environment: it gives the place back, unless places are held."""
        if not self._places.hold:
            self._give_back()

    def leave(self) -> None:
        """The trajectory generates no more. May be called again."""
        self._give_back()
        if self.has_begun:
            self.has_begun = False
            self._places.left()

    def _give_back(self) -> None:
        if self.is_taken:
            self.is_taken = False
            self._places.give_back()
