"""Which sequence was in which slot of an engine, and when: recorded if `logging.trace_sequences` asks for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import NamedTuple

MAX_STAYS = 10_000
"""How many are kept until they are taken: a driver that does not ask must not fill the worker's memory. The oldest are lost."""


class Stay(NamedTuple):
    """A sequence in a slot, in seconds of the executor's own clock. One with several turns has a stay for each."""

    slot: int
    sequence: str
    start_s: float
    end_s: float


class SlotStays:
    """Numbers the slots in use from 0: a sequence gets the lowest free one."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._free: list[int] = []
        self._begun: dict[str, tuple[int, float]] = {}
        self._ended: deque[Stay] = deque(maxlen=MAX_STAYS)

    @contextmanager
    def of(self, sequence: str) -> Iterator[None]:
        self.begin(sequence)
        try:
            yield
        finally:
            self.end(sequence)

    def begin(self, sequence: str) -> None:
        assert sequence not in self._begun, f"{sequence} is in a slot already"
        self._begun[sequence] = heappop(self._free) if self._free else len(self._begun), self._now()

    def end(self, sequence: str) -> None:
        slot, start_s = self._begun.pop(sequence)
        heappush(self._free, slot)
        self._ended.append(Stay(slot, sequence, start_s, self._now()))

    def take(self) -> tuple[Stay, ...]:
        """The stays that have ended since the last call, in the order of their ends."""
        taken = tuple(self._ended)
        self._ended.clear()
        return taken
