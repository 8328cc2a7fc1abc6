"""What the loop knows about each rollout worker (its sequence slots, its weights, the version on its way to
it), and where the next responses would be placed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from asyncrl_cli.contracts.prompt_group import PartKey

_TRAVEL_WEIGHT = 0.8
"""The weight of all workers' last loads once every worker has had one more load."""
Room = tuple[int, int, int]
"""How many units there is room for: in slots if no worker were loading; in slots now; in slots and queues
now. A unit is placed as a whole: one response or one group. (A plain tuple, because every change makes
one.)"""


class Placement(NamedTuple):
    """How many responses would start on each worker, and the oldest version that one of these workers
    holds."""

    responses: Mapping[str, int]
    version: int


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerSlots:
    """One worker. `unfinished` counts the responses of each running part that need a slot; evals take slots
    too. `reported_free`: the worker's last report of those that need none.

    `version`: the published version that it holds, -1 for none; `begun`: the version that it is receiving or
    loading; `received`: whether that one has arrived. `loading`: nothing may start on it now; `down`: its
    process is gone, so it has no room; `away`: it is down and the run does not wait for it. `is_lent`: it is
    on the trainer's devices, and down and away while the trainer has them. `room` and `rank` are kept up to
    date by `fleet`, which learns of every change.
    """

    name: str
    slots: int
    is_lent: bool = False
    version: int = 0
    begun: int | None = None
    received: bool = False
    loading: bool = False
    down: bool = False
    away: bool = False
    eval_sequences: int = 0
    unfinished: dict[PartKey, int] = field(default_factory=dict)
    unfinished_sequences: int = 0
    reported_free: Mapping[PartKey, int] = field(default_factory=dict)
    room: Room = (0, 0, 0)
    rank: tuple[int, int] | None = None
    fleet: Fleet = field(init=False)

    @property
    def used(self) -> int:
        return self.unfinished_sequences + self.eval_sequences

    def set_unfinished(self, key: PartKey, unfinished: int) -> None:
        """Set how many sequences of a running part are unfinished."""
        self.unfinished_sequences += unfinished - self.unfinished.get(key, 0)
        self.unfinished[key] = unfinished
        self.fleet.update(self)

    def release(self, key: PartKey) -> None:
        """Remove a part, if it is on this worker."""
        self.unfinished_sequences -= self.unfinished.pop(key, 0)
        self.fleet.update(self)

    def change_evals(self, sequences: int) -> None:
        """Count sequences that an eval began or, if negative, ended."""
        self.eval_sequences += sequences
        self.fleet.update(self)

    def begin_prefetch(self, version: int) -> None:
        """The version is about to be sent to the worker, which meanwhile keeps generating if it already holds
        weights."""
        self.begun = version
        if not self.loading:
            self.fleet.travel.set_out(self.name, self.unfinished)

    def begin_load(self) -> None:
        """The version `begun` has arrived. Nothing starts on the worker until the load has ended."""
        self.received = self.loading = True
        self.fleet.update(self)
        self.fleet.travel.arrived(self.name, self.unfinished)

    def end_load(self, version: int) -> None:
        self.version, self.begun, self.received, self.loading = version, None, False, False
        self.fleet.update(self)

    def forget_weights(self) -> None:
        """The worker's process is gone, with its weights and the version on its way to it."""
        self.version, self.begun, self.received = -1, None, False
        self.fleet.travel.lost(self.name)

    def set_down(self, is_down: bool) -> None:
        """The worker's process is gone or, if false, was replaced by a new one, which loads before anything
        starts on it."""
        self.down, self.loading, self.away = is_down, True, False
        self.fleet.update(self)

    def set_asleep(self, is_asleep: bool) -> None:
        """A lent worker gives its device back or, if false, has it, and loads before anything starts."""
        self.set_down(is_asleep)
        self.away = is_asleep
        self.version = -1


class Travel:
    """How long new weights are on their way to the workers, in the one unit that admission knows: responses
    that end meanwhile.

        version rises or prefetch begins ──set_out──> published, sent (the worker keeps generating)
        ──arrived──> loaded

    `set_out` records what runs on the worker; `arrived` counts how much of it has ended since. Travel is
    short if fewer than half of the responses that ran when the weights set out have ended. All loads count
    together; older ones weigh less.

    Worked example: two workers have 4 and 6 responses running when version 3 sets out for them; when it
    arrives, 1 and 2 have ended: 3 of 10, so travel is short. Had nothing run, it would not be: responses that
    end within a window need no slack.
    """

    def __init__(self, num_workers: int) -> None:
        self._weight = _TRAVEL_WEIGHT ** (1 / num_workers)
        self._ran_before: dict[str, dict[PartKey, int]] = {}
        self._ran = self._ended = 0.0
        self.is_short = True
        """Whether weights arrive before half of the running responses have ended. True until the first
        arrival shows otherwise."""

    def set_out(self, worker: str, unfinished: Mapping[PartKey, int]) -> None:
        """A version sets out for the worker, unless one is already on its way there."""
        if worker not in self._ran_before:
            self._ran_before[worker] = dict(unfinished)

    def arrived(self, worker: str, unfinished: Mapping[PartKey, int]) -> None:
        """The version has arrived, if one had set out. Responses that began meanwhile do not count."""
        before = self._ran_before.pop(worker, None)
        if before is None:
            return
        ran = sum(before.values())
        ended = ran - sum(min(count, unfinished.get(key, 0)) for key, count in before.items())
        self._ran = self._ran * self._weight + ran
        self._ended = self._ended * self._weight + ended
        self.is_short = self._ended < self._ran / 2

    def lost(self, worker: str) -> None:
        """The worker's process is gone, and with it the version on its way there."""
        self._ran_before.pop(worker, None)


class Fleet:
    """All workers, and where the next responses would be placed.

    Sums of room and ranks of workers are updated at every change, so a placement costs hardly more with more
    workers.
    """

    def __init__(self, workers: Iterable[WorkerSlots], *, unit: int, queue_sequences: int) -> None:
        """`unit` responses are placed together. At most `queue_sequences` may wait in a worker's queue."""
        self.by_name = {worker.name: worker for worker in workers}
        self.travel = Travel(len(self.by_name))
        self._unit = unit
        self._queue_sequences = queue_sequences
        self._places = {name: (place, name) for place, name in enumerate(self.by_name)}
        self._room: Room = (0, 0, 0)
        self._ranks: dict[tuple[int, int], set[tuple[int, str]]] = {}
        """The workers with room in slots or queue, by (-version, -free slots)."""
        for worker in self.by_name.values():
            worker.fleet = self
            self.update(worker)

    def update(self, worker: WorkerSlots) -> None:
        """Update sums and ranks. Call it after a change of the worker's sequences or process, and when a load
        begins or ends."""
        unit, awake = self._unit, not worker.loading
        free = worker.slots - worker.unfinished_sequences - worker.eval_sequences
        up = free // unit if free > 0 and not worker.down else 0
        slots = up if awake else 0
        queue = (free + self._queue_sequences) // unit if awake and free + self._queue_sequences > 0 else 0
        up_before, slots_before, queue_before = worker.room
        all_up, all_slots, all_queue = self._room
        worker.room = up, slots, queue
        self._room = (
            all_up + up - up_before,
            all_slots + slots - slots_before,
            all_queue + queue - queue_before,
        )
        self._rank(worker, (-worker.version, -free) if queue else None)

    def _rank(self, worker: WorkerSlots, rank: tuple[int, int] | None) -> None:
        place, before = self._places[worker.name], worker.rank
        if rank == before:
            return
        if before is not None:
            self._ranks[before].remove(place)
            if not self._ranks[before]:
                del self._ranks[before]
        if rank is not None:
            self._ranks.setdefault(rank, set()).add(place)
        worker.rank = rank

    def is_whole(self) -> bool:
        """Whether every worker that is not away has a process."""
        return not any(worker.down for worker in self.present())

    def present(self) -> list[WorkerSlots]:
        """The workers that are not away: the run waits for these."""
        return [worker for worker in self.by_name.values() if not worker.away]

    def can_spare(self, worker: WorkerSlots, least: int) -> bool:
        """Whether at least that many workers are left if this one is away. Workers that are being restarted
        count: they will come back, or ask this themselves."""
        others = (other for other in self.present() if other is not worker)
        return sum(not other.is_lent for other in others) >= least

    def is_gone(self) -> bool:
        """Whether no worker has a process."""
        return all(worker.down for worker in self.by_name.values())

    def are_current(self, version: int) -> bool:
        """Whether every worker that is not away can generate with that version."""
        return all(worker.version == version and not worker.loading for worker in self.present())

    def placement(self, num_responses: int, at_least: int = -1) -> Placement | None:
        """Where that many responses would be placed, on workers of version `at_least` or newer; None if there
        is no room.

        Each unit goes to the newest weights; among those to the most room, then to the first worker. Room
        means free slots. Room in queues counts only if the free slots of all workers, including loading ones,
        are too few.
        """
        needed = -(-num_responses // self._unit)
        up, in_slots, in_queues = self._room
        queue = self._queue_sequences if up < needed else 0
        if (in_queues if queue else in_slots) < needed:
            return None
        responses: dict[str, int] = {}
        for version, ranked in groupby(self._best(needed, queue, at_least), key=itemgetter(0)):
            for name in self._fill([*ranked], needed):
                responses[name] = responses.get(name, 0) + self._unit
                needed -= 1
            if not needed:
                return Placement(responses, -version)
        return None

    def _best(self, needed: int, queue: int, at_least: int) -> list[tuple[int, int, int, str]]:
        """At most `needed` workers that have room for a unit, best first: (-version, -room in sequences,
        place, name). A placement needs no more, because its units reach the workers in this order."""
        best: list[tuple[int, int, int, str]] = []
        for version, free in sorted(self._ranks):
            if queue - free >= self._unit and -version >= at_least:
                best += [
                    (version, free - queue, *place)
                    for place in sorted(self._ranks[version, free])[: needed - len(best)]
                ]
            if len(best) == needed:
                break
        return best

    def _fill(self, ranked: list[tuple[int, int, int, str]], needed: int) -> list[str]:
        """The workers of one version that take the next units, at most `needed`. Changes `ranked`."""
        taking: list[str] = []
        while ranked and len(taking) < needed:
            version, room, place, name = ranked[0]
            taking.append(name)
            if -room >= 2 * self._unit:
                heapq.heapreplace(ranked, (version, room + self._unit, place, name))
            else:
                heapq.heappop(ranked)
        return taking
