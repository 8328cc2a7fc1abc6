"""Who has a slot of the engine: which trajectories with several turns may generate on a rollout worker, and
which ones a drain waits for. And in a deterministic run: who waits for which version (`VersionGate`).

    take (begins) ─> generate ─> pause, waits for a tool ─> take (goes on) ─> generate ─> ... ─> leave

With `rollout.hold_slots` a trajectory keeps its slot during a pause. Without it, the trajectory queues for a
slot when it goes on, ahead of all that have not begun. Trajectories of a single turn take none here: they
queue in the engine, which begins one in the same step in which another ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Slots:
    """The slots of one worker's engine."""

    def __init__(self, number: int, *, hold: bool) -> None:
        self.hold = hold
        self._free = number
        self._num_begun = 0
        self._is_closed = False
        self._going_on: deque[TrajectorySlot] = deque()
        self._new: deque[TrajectorySlot] = deque()
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

    def queue(self, slot: TrajectorySlot) -> None:
        (self._going_on if slot.has_begun else self._new).append(slot)
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
            slot = queue.popleft()
            if slot.turn.cancelled():
                continue
            self._free -= 1
            if not slot.has_begun:
                self._num_begun += 1
                self._empty.clear()
            slot.has_begun = slot.is_taken = True
            slot.turn.set_result(None)


class TrajectorySlot:
    """One trajectory's slot. `is_taken`: the trajectory has it now. `turn`: done when the trajectory gets
    it."""

    def __init__(self, slots: Slots) -> None:
        self.has_begun = self.is_taken = False
        self.turn: asyncio.Future[None]
        self._slots = slots

    async def take(self) -> None:
        """Wait for a slot, before each answer."""
        if self.is_taken:
            return
        self.turn = asyncio.get_running_loop().create_future()
        self._slots.queue(self)
        try:
            await self.turn
        except asyncio.CancelledError:
            self.leave()  # the slot may have been handed out in the same turn of the event loop
            raise

    def pause(self) -> None:
        """The trajectory waits for its environment: it gives the slot back, unless slots are held."""
        if not self._slots.hold:
            self._give_back()

    def leave(self) -> None:
        """The trajectory generates no more. May be called again."""
        self._give_back()
        if self.has_begun:
            self.has_begun = False
            self._slots.left()

    def _give_back(self) -> None:
        if self.is_taken:
            self.is_taken = False
            self._slots.give_back()


class VersionGate:
    """In a deterministic run each response needs one version at a time. It goes on when that version is
    loaded, and no load begins while a response needs an older one.

        need(3) ─> generate ─> need(4), loaded(4) ─> generate ─> leave
                               quiet(4) ends ─> load of 4 ─> changed()

    `held()`: the version of the engine's weights.
    """

    def __init__(self, held: Callable[[], int]) -> None:
        self._held = held
        self._needs: dict[str, int] = {}
        self._change = asyncio.Event()

    def changed(self) -> None:
        before, self._change = self._change, asyncio.Event()
        before.set()

    def need(self, name: str, version: int) -> None:
        assert version >= self._held(), f"{name} needs version {version}, after {self._held()} was loaded"
        self._needs[name] = version
        self.changed()

    def leave(self, name: str) -> None:
        self._needs.pop(name, None)
        self.changed()

    async def loaded(self, version: int) -> None:
        while self._held() < version:
            await self._change.wait()

    async def quiet(self, version: int) -> None:
        """Wait until no response needs an older version than this one."""
        while any(needed < version for needed in self._needs.values()):
            await self._change.wait()
