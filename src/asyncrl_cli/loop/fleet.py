"""What the loop knows about each rollout worker: its sequence slots, whether it has room for one more group, its weights, and the
versions on their way to it. They are sent while the worker generates, and loaded worker by worker.

    trainer --gather--> publish --offer--> [newest] --prefetch--> worker's second buffer --load--> worker generates

At most two published versions exist: the one being loaded and the newest. A newer version replaces one that no
worker has begun to receive; once workers have begun two, the next gather waits (`WeightSync.room`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from asyncrl_cli.loop.attempts import AttemptKey
from asyncrl_cli.loop.ports import LoadReport, Published


class Room(IntEnum):
    """Where a worker has room for one more group of n sequences."""

    NONE = 0
    IN_QUEUE = 1
    IN_SLOTS = 2


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerSlots:
    """One worker. `unfinished` counts sequences per running group; evals take slots too.

    `version`: the published version that it holds, -1 for none; `begun`: the version that it receives or loads; `received`:
    whether that one has arrived. `loading`: no group may start on it now; `down`: its process is gone, so it has no room. `room`:
    kept up to date by its fleet.
    """

    name: str
    slots: int
    version: int = 0
    begun: int | None = None
    received: bool = False
    loading: bool = False
    down: bool = False
    eval_sequences: int = 0
    unfinished: dict[AttemptKey, int] = field(default_factory=dict)
    unfinished_sequences: int = 0
    room: Room = Room.NONE
    fleet: Fleet | None = None

    @property
    def used(self) -> int:
        return self.unfinished_sequences + self.eval_sequences

    @property
    def free(self) -> int:
        """Free slots; negative while sequences queue."""
        return self.slots - self.used

    def set_unfinished(self, key: AttemptKey, unfinished: int) -> None:
        """Set how many sequences of a running group are unfinished."""
        self.unfinished_sequences += unfinished - self.unfinished.get(key, 0)
        self.unfinished[key] = unfinished
        self._changed()

    def release(self, key: AttemptKey) -> None:
        """Remove a group, if it is on this worker."""
        self.unfinished_sequences -= self.unfinished.pop(key, 0)
        self._changed()

    def change_evals(self, sequences: int) -> None:
        """Count sequences that an eval began (or, negative, ended)."""
        self.eval_sequences += sequences
        self._changed()

    def begin_load(self) -> None:
        """The version `begun` has arrived: no group starts on the worker until the load has ended."""
        self.received = self.loading = True

    def end_load(self, version: int) -> None:
        self.forget_weights(version)
        self.loading = False

    def forget_weights(self, version: int = -1) -> None:
        """The worker holds `version` (default: none) and has begun no other."""
        self.version, self.begun, self.received = version, None, False

    def set_down(self, is_down: bool) -> None:
        """The worker's process is gone, or (false) a new one has replaced it, which loads before any group starts on it."""
        self.down, self.loading = is_down, True
        self._changed()

    def _changed(self) -> None:
        if self.fleet is not None:
            self.fleet.place(self)


class Fleet:
    """All workers, with an index of those that have room: in a busy run these are few among hundreds."""

    def __init__(self, workers: Iterable[WorkerSlots], *, n: int, prefetch_groups: int) -> None:
        self.by_name = {worker.name: worker for worker in workers}
        self._n = n
        self._queue_sequences = n * prefetch_groups
        self._places = {name: place for place, name in enumerate(self.by_name)}
        self._having: dict[Room, dict[str, WorkerSlots]] = {room: {} for room in Room}
        for worker in self.by_name.values():
            worker.fleet = self
            self.place(worker)

    def place(self, worker: WorkerSlots) -> None:
        """Update the index: the worker's sequences have changed, or its process."""
        missing = self._n - worker.free
        room = Room.IN_SLOTS if missing <= 0 else Room.IN_QUEUE if missing <= self._queue_sequences else Room.NONE
        if worker.down:
            room = Room.NONE
        if room is not worker.room:
            self._having[worker.room].pop(worker.name, None)
            self._having[room][worker.name] = worker
            worker.room = room

    def is_awake(self) -> bool:
        """Whether at least one worker is not loading."""
        return not all(worker.loading for worker in self.by_name.values())

    def is_whole(self) -> bool:
        """Whether every worker has a process."""
        return not any(worker.down for worker in self.by_name.values())

    def is_gone(self) -> bool:
        """Whether no worker has a process."""
        return all(worker.down for worker in self.by_name.values())

    def are_current(self, version: int) -> bool:
        """Whether every worker can generate with that version."""
        return all(worker.version == version and not worker.loading for worker in self.by_name.values())

    def candidates(self) -> list[WorkerSlots]:
        """The workers that may start a group: for each version the first worker with the most room, newest version first.

        Room means free slots for the whole group; room in a queue counts only if no worker, not even a loading one, has such slots.
        Whether a group may start depends on the version that it starts with, so one worker per version is enough.
        """
        best: dict[int, tuple[int, int, WorkerSlots]] = {}
        for name, worker in (self._having[Room.IN_SLOTS] or self._having[Room.IN_QUEUE]).items():
            rank = (-worker.free, self._places[name], worker)
            if not worker.loading and (worker.version not in best or rank < best[worker.version]):
                best[worker.version] = rank
        return [best[version][2] for version in sorted(best, reverse=True)]


class WeightSync:
    """Which version the workers should load, and what the last complete sync cost. Pure state."""

    def __init__(self, workers: Collection[WorkerSlots]) -> None:
        self.newest: Published | None = None
        self.summary: dict[str, float | int | None] = {}
        """The last version that every worker has loaded or skipped, with maxima over the workers that loaded it. `gather_s` is None
        if the version came from a checkpoint, `loaded_share` is the share farthest from 1, and `unclear_loads` counts loads whose
        probes could not tell the version from the one before. Empty before the first such version."""
        self._summarised = -1
        self._workers = workers
        self._gather_s: dict[int, float] = {}
        self._reports: dict[int, list[LoadReport]] = {}

    @property
    def begun(self) -> dict[str, int]:
        """The version that each worker receives or loads, by worker; idle workers are left out."""
        return {worker.name: worker.begun for worker in self._workers if worker.begun is not None}

    @property
    def room(self) -> bool:
        """Whether one more version may be published."""
        return len(set(self.begun.values())) < 2

    def reserve(self) -> None:
        """Call before a newer version is gathered. While an older version is being loaded, no worker may begin the one in between:
        that would make three versions."""
        begun = self.begun.values()
        if begun and self.newest is not None and self.newest.version not in begun:
            self.newest = None

    def gathered(self, version: int, gather_s: float) -> None:
        self._gather_s[version] = gather_s

    def offer(self, published: Published) -> None:
        assert self.newest is None or published.version > self.newest.version, "versions only rise"
        self.newest = published

    def wanted(self, worker: WorkerSlots) -> Published | None:
        """The version that the worker should begin now, if any. After a restart it loads the newest version again, whose handle is
        kept here, or waits for the one that is about to be offered (`reserve`)."""
        return self.newest if self.newest is not None and self.newest.version > worker.version else None

    def loaded(self, report: LoadReport) -> None:
        """Take in the report of a load. The worker's `version` must already be the loaded one."""
        self._reports.setdefault(report.version, []).append(report)
        held_by_all = min([worker.version for worker in self._workers])
        version = max([version for version in self._reports if version <= held_by_all], default=-1)
        if version > self._summarised:
            self._summarise(version)

    def _summarise(self, version: int) -> None:
        self._summarised, reports = version, self._reports[version]
        diffs = [report.logprob_abs_diff for report in reports if report.logprob_abs_diff is not None]
        shares = [report.loaded_share for report in reports if report.loaded_share is not None]
        verdicts = [report.verdict for report in reports if report.verdict is not None]
        self.summary = {
            "version": version,
            "gather_s": self._gather_s.get(version),
            "send_s": max(report.send_s for report in reports),
            "load_s": max(report.load_s for report in reports),
            "pause_s": max(report.pause_s for report in reports),
            "logprob_abs_diff": max(diffs, default=None),
            "loaded_share": max(shares, key=lambda share: abs(share - 1), default=None),
            "unclear_loads": verdicts.count("unclear") if verdicts else None,
        }
        self._reports = {later: reports for later, reports in self._reports.items() if later >= version}
        self._gather_s = {later: gather_s for later, gather_s in self._gather_s.items() if later >= version}
