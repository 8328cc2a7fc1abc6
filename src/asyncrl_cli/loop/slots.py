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

    def set_down(self, is_down: bool) -> None:
        """Its process is gone, or (false) another has taken its place: that one loads before anything starts on it."""
        self.down, self.loading = is_down, True
        self._changed()

    def _changed(self) -> None:
        if self.fleet is not None:
            self.fleet.place(self)


class Fleet:
    """All workers, and apart those with room: of hundreds of busy ones few have any, and every group that starts asks."""

    def __init__(self, workers: Iterable[WorkerSlots], *, n: int, prefetch_groups: int) -> None:
        self.by_name = {worker.name: worker for worker in workers}
        self._n = n
        self._queue_sequences = n * prefetch_groups
        self._places = {name: place for place, name in enumerate(self.by_name)}
        self._with_room: dict[Room, dict[str, WorkerSlots]] = {Room.IN_SLOTS: {}, Room.IN_QUEUE: {}}
        for worker in self.by_name.values():
            worker.fleet = self
            self.place(worker)

    def room_on(self, worker: WorkerSlots) -> Room:
        if worker.down:
            return Room.NONE
        missing = worker.used + self._n - worker.slots
        return Room.IN_SLOTS if missing <= 0 else Room.IN_QUEUE if missing <= self._queue_sequences else Room.NONE

    def place(self, worker: WorkerSlots) -> None:
        """The worker's slots have changed."""
        room = self.room_on(worker)
        for kept, workers in self._with_room.items():
            if kept is room:
                workers[worker.name] = worker
            else:
                workers.pop(worker.name, None)

    def is_awake(self) -> bool:
        """Whether any worker does not load."""
        return any(not worker.loading for worker in self.by_name.values())

    def is_whole(self) -> bool:
        """Whether every worker has a process."""
        return not any(worker.down for worker in self.by_name.values())

    def is_gone(self) -> bool:
        """Whether no worker has a process."""
        return all(worker.down for worker in self.by_name.values())

    def are_current(self, version: int) -> bool:
        return all(not worker.loading and worker.version == version for worker in self.by_name.values())

    def candidates(self) -> list[WorkerSlots]:
        """Who may start a group: of each version the worker with most room, newest weights first.

        Room is free slots for all of it; only where no worker has these, not even one that loads, it is room in the queue. Whether
        a group may start depends on the version that it starts with: where one worker may not, no other of its version may.
        """
        room = self._with_room[Room.IN_SLOTS] or self._with_room[Room.IN_QUEUE]
        best: dict[int, tuple[tuple[int, int], WorkerSlots]] = {}
        for worker in room.values():
            if worker.loading:
                continue
            rank = (worker.slots - worker.unfinished_sequences - worker.eval_sequences, -self._places[worker.name])
            if worker.version not in best or rank > best[worker.version][0]:
                best[worker.version] = (rank, worker)
        return [best[version][1] for version in sorted(best, reverse=True)]
