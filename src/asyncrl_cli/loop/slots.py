"""Sequence slots of the workers: who uses them, and which workers have room for one more group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from asyncrl_cli.loop.ports import AttemptKey


class Room(IntEnum):
    """For one more group of n sequences on a worker."""

    NONE = 0
    IN_QUEUE = 1
    IN_SLOTS = 2


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerSlots:
    """What admission knows of one worker. `unfinished` counts sequences per running group; evals take slots too.

    `loading`: nothing may start on it now; `down`: its process is gone, so it has no room either.
    """

    name: str
    slots: int
    version: int = 0
    loading: bool = False
    down: bool = False
    eval_sequences: int = 0
    unfinished: dict[AttemptKey, int] = field(default_factory=dict)
    unfinished_sequences: int = 0
    fleet: Fleet | None = None

    @property
    def used(self) -> int:
        return self.unfinished_sequences + self.eval_sequences

    def set_unfinished(self, key: AttemptKey, unfinished: int) -> None:
        """A running group has so many unfinished sequences."""
        self.unfinished_sequences += unfinished - self.unfinished.get(key, 0)
        self.unfinished[key] = unfinished
        self._changed()

    def free(self, key: AttemptKey) -> None:
        """A group has left; nothing happens if it was not here."""
        self.unfinished_sequences -= self.unfinished.pop(key, 0)
        self._changed()

    def change_evals(self, sequences: int) -> None:
        """An eval began so many sequences (or ended them: negative)."""
        self.eval_sequences += sequences
        self._changed()

    def begin_load(self) -> None:
        """From now on nothing starts on it."""
        self.loading = True
        self._changed()

    def end_load(self, version: int) -> None:
        self.loading, self.version = False, version
        self._changed()

    def set_down(self, is_down: bool) -> None:
        """Its process is gone, or (false) another has taken its place: that one loads before anything starts on it."""
        self.down, self.loading = is_down, True
        self._changed()

    def _changed(self) -> None:
        if self.fleet is not None:
            self.fleet.place(self)


class Fleet:
    """All workers, and who has room: of hundreds many have some, and every group that starts asks who has most.

    Sets of workers are the bits of a number, in the order of the workers: the lowest one is the first worker.
    """

    def __init__(self, workers: Iterable[WorkerSlots], *, n: int, prefetch_groups: int) -> None:
        self.by_name = {worker.name: worker for worker in workers}
        self._n = n
        self._queue_sequences = n * prefetch_groups
        self._in_order = list(self.by_name.values())
        self._bits = {name: 1 << place for place, name in enumerate(self.by_name)}
        self._down = self._loading = self._with_slots = 0
        self._awake: dict[int, dict[int, int]] = {}
        """Who does not load: version -> free slots (less than 0 with a queue) -> workers."""
        self._standing: dict[str, tuple[int, int]] = {}
        """Each one's keys in `_awake`."""
        for worker in self._in_order:
            worker.fleet = self
            self.place(worker)

    def room_on(self, worker: WorkerSlots) -> Room:
        if worker.down:
            return Room.NONE
        missing = worker.used + self._n - worker.slots
        return Room.IN_SLOTS if missing <= 0 else Room.IN_QUEUE if missing <= self._queue_sequences else Room.NONE

    def place(self, worker: WorkerSlots) -> None:
        """The worker has changed."""
        bit, free = self._bits[worker.name], worker.slots - worker.used
        self._down = self._down | bit if worker.down else self._down & ~bit
        self._loading = self._loading | bit if worker.loading else self._loading & ~bit
        self._with_slots = self._with_slots | bit if free >= self._n and not worker.down else self._with_slots & ~bit
        before = self._standing.pop(worker.name, None)
        if before is not None:
            self._take_out(*before, bit)
        if not worker.loading:
            self._standing[worker.name] = (worker.version, free)
            by_free = self._awake.setdefault(worker.version, {})
            by_free[free] = by_free.get(free, 0) | bit

    def is_awake(self) -> bool:
        """Whether any worker does not load."""
        return bool(self._awake)

    def is_whole(self) -> bool:
        """Whether every worker has a process."""
        return not self._down

    def is_gone(self) -> bool:
        """Whether no worker has a process."""
        return all(worker.down for worker in self.by_name.values())

    def are_current(self, version: int) -> bool:
        return not self._loading and self._awake.keys() == {version}

    def candidates(self) -> list[WorkerSlots]:
        """Who may start a group: of each version the first worker with most room, newest weights first.

        Room is free slots for all of it; only where no worker has these, not even one that loads, it is room in the queue. Whether
        a group may start depends on the version that it starts with: where one worker may not, no other of its version may.
        """
        least = self._n if self._with_slots else self._n - self._queue_sequences
        found = []
        for version in sorted(self._awake, reverse=True):
            by_free = self._awake[version]
            if (most := max(by_free)) >= least:
                found.append(self._in_order[(by_free[most] & -by_free[most]).bit_length() - 1])
        return found

    def _take_out(self, version: int, free: int, bit: int) -> None:
        by_free = self._awake[version]
        by_free[free] &= ~bit
        if not by_free[free]:
            del by_free[free]
        if not by_free:
            del self._awake[version]
