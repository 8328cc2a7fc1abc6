"""Who may start, and who may be trained next: one pure state machine, no I/O (docs/admission.md).

Three layers have to agree before a group starts:

    slots       a worker has room for the group's n sequences                  protects the KV cache
    window      running + finished + taken_in_window < floor((1 + eta) * W)    bounds the work ahead
    deadlines   every untaken group can still be taken in time                 bounds staleness, strictly

A group's deadline is the last version in which it may be trained: the version of the worker that it starts on, plus
`max_staleness`. With `takes_left` groups still to be taken in this window and W in each later one, a set of untaken groups
can be served in time exactly if (earliest deadline first) for every d >= 0

    number of untaken groups with a deadline <= version + d   <=   takes_left + d * W        (*)

Admission checks (*) with the candidate, a take checks (*) without the taken group. Both are needed: checking takes
alone lets admission fill the future with groups that cannot all be served, and the trainer waits for ever.

Beyond what (*) demands, no group starts on a lagging worker if it would be due in the window that has begun already.

Worked example: W = 2, version 5, nothing taken. Untaken deadlines are [5, 6, 6]. A finished group of deadline 6 may be taken:
what is left, [5, 6], has one group due now for one take left. A second one of deadline 6 may not: [5] would be due with
no take left. So the trainer waits for the urgent group, and only for that one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from fractions import Fraction

from asyncrl_cli.loop.ports import AttemptKey
from asyncrl_cli.loop.settings import OnStale
from asyncrl_cli.loop.slots import Fleet, WorkerSlots


class Closed(StrEnum):
    """Why nothing more is admitted at the moment."""

    OPEN = ""
    STOPPING = "stopping"
    END = "end"
    WINDOW = "window"
    LOADING = "loading"
    SLOTS = "slots"
    DEADLINES = "deadlines"


def takeable_in_time(deadlines: Mapping[int, int], version: int, takes_left: int, window_groups: int) -> bool:
    """Inequality (*) of the module's docstring; `deadlines` counts untaken groups per deadline."""
    due = 0
    for deadline in sorted(deadlines):
        due += deadlines[deadline]
        ahead = deadline - version
        if ahead < 0 or due > takes_left + ahead * window_groups:
            return False
    return True


class Admission:
    """Admission asks who has room (slots.py), a take passes once over the finished groups; nothing here waits."""

    def __init__(
        self,
        *,
        window_groups: int,
        total_groups: int,
        eta: Fraction,
        max_staleness: int,
        on_stale: OnStale = "wait",
        n: int,
        prefetch_groups: int = 0,
        together: bool = False,
        workers: Iterable[WorkerSlots],
    ) -> None:
        """`on_stale` other than "wait" switches inequality (*) off; `publish` then tells who is late.

        `together` (colocate): nothing starts before all workers hold the newest version, or the first one would get all groups.
        """
        self.window_groups = window_groups
        self.total_groups = total_groups
        self.budget = math.floor((1 + eta) * window_groups)
        self.max_staleness = max_staleness
        self.on_stale = on_stale
        self.n = n
        self.together = together
        self.fleet = Fleet(workers, n=n, prefetch_groups=prefetch_groups)
        self.workers = self.fleet.by_name
        self.version = 0
        self.taken_in_window = 0
        self.trained_groups = 0
        self.running: dict[AttemptKey, int] = {}
        self.finished: dict[AttemptKey, int] = {}
        self.taken: set[AttemptKey] = set()
        self.stopping = False
        self._untaken: Counter[int] = Counter()

    @property
    def window_size(self) -> int:
        """Groups of the current window: W, or what is left of the run in its last window."""
        consumed_before = self.trained_groups + len(self.taken) - self.taken_in_window
        return min(self.window_groups, self.total_groups - consumed_before)

    @property
    def takes_left(self) -> int:
        return self.window_size - self.taken_in_window

    def closed(self) -> Closed:
        """Why no group can start now, `Closed.OPEN` if one can."""
        return self._choose()[1]

    def is_open(self) -> bool:
        return self.closed() is Closed.OPEN

    def choose(self) -> WorkerSlots | None:
        """The worker that the next group starts on (newest weights first, then most room), None if closed."""
        return self._choose()[0]

    def admit(self, key: AttemptKey, worker: WorkerSlots) -> None:
        assert key not in self.running
        assert key not in self.finished
        self.running[key] = deadline = self.deadline_on(worker)
        self._untaken[deadline] += 1
        worker.set_unfinished(key, self.n)

    def deadline_on(self, worker: WorkerSlots) -> int:
        return worker.version + self.max_staleness

    def sequences_finished(self, worker: str, counts: Mapping[AttemptKey, int]) -> bool:
        """Free the slots of sequences that ended inside running groups; true if that made room for a group."""
        slots = self.workers[worker]
        before = self.fleet.room_on(slots)
        for key, finished in counts.items():
            if slots.unfinished.get(key, 0) > self.n - finished:
                slots.set_unfinished(key, self.n - finished)
        return self.fleet.room_on(slots) > before

    def finish(self, key: AttemptKey, worker: str) -> None:
        """A running group has its trajectories and rewards."""
        self.finished[key] = self.running.pop(key)
        self.workers[worker].free(key)

    def restore_finished(self, key: AttemptKey, deadline: int) -> None:
        """A group that a checkpoint holds as finished."""
        self.finished[key] = deadline
        self._untaken[deadline] += 1

    def discard(self, key: AttemptKey, worker: str | None = None) -> None:
        """A running or finished group leaves untrained; its place in the window is free again."""
        deadline = self.running.pop(key) if key in self.running else self.finished.pop(key)
        self._forget(deadline)
        if worker is not None:
            self.workers[worker].free(key)

    def takeable(self, num_groups: int) -> list[AttemptKey]:
        """Up to `num_groups` finished groups that may be taken together now, in finish order where (*) allows.

        One pass is enough: the slack of (*) at any deadline never grows by a take, so what was refused stays refused.
        """
        takes_left, chosen = self.takes_left, list[AttemptKey]()
        if takes_left <= 0:
            return chosen
        untaken = self._untaken.copy()
        refused: set[int] = set()
        for key, deadline in self.finished.items():
            if len(chosen) == num_groups:
                break
            if deadline in refused:
                continue
            untaken[deadline] -= 1
            if self._in_time(untaken, takes_left - 1):
                chosen.append(key)
                takes_left -= 1
            else:
                untaken[deadline] += 1
                refused.add(deadline)
        return chosen

    def take(self, keys: Iterable[AttemptKey]) -> None:
        for key in keys:
            self._forget(self.finished.pop(key))
            self.taken.add(key)
            self.taken_in_window += 1
        assert self.taken_in_window <= self.window_size

    def trained(self, keys: Iterable[AttemptKey]) -> None:
        for key in keys:
            self.taken.remove(key)
            self.trained_groups += 1

    def publish(self) -> list[AttemptKey]:
        """The version rises and a window begins. Returns untaken groups whose deadline has passed (never under "wait")."""
        self.version += 1
        self.taken_in_window = 0
        late = [key for pool in (self.finished, self.running) for key, deadline in pool.items() if deadline < self.version]
        assert not (late and self.on_stale == "wait"), f"passed the staleness bound: {late}"
        return late

    def _is_rushed(self, worker: WorkerSlots, deadline: int) -> bool:
        """The worker lags, and what starts there would be due in the window that has begun already, or late.

        At the window's end the trainer would wait for such a group's longest response. The worker loads soon; then the
        same group is due a window later.
        """
        return self.on_stale != "accept" and worker.version < self.version and deadline <= self.version

    def _in_time(self, untaken: Mapping[int, int], takes_left: int) -> bool:
        if self.on_stale != "wait":
            return True
        counts = {deadline: count for deadline, count in untaken.items() if count}
        return takeable_in_time(counts, self.version, takes_left, self.window_groups)

    def _forget(self, deadline: int) -> None:
        self._untaken[deadline] -= 1
        if not self._untaken[deadline]:
            del self._untaken[deadline]

    def _choose(self) -> tuple[WorkerSlots | None, Closed]:
        if self.stopping:
            return None, Closed.STOPPING
        live = len(self.running) + len(self.finished)
        if live + len(self.taken) + self.trained_groups >= self.total_groups:
            return None, Closed.END
        if live + self.taken_in_window >= self.budget:
            return None, Closed.WINDOW
        if not self.fleet.is_awake() or (self.together and not self.fleet.are_current(self.version)):
            return None, Closed.LOADING
        closed, untaken = Closed.SLOTS, self._untaken.copy()
        for worker in self.fleet.candidates():
            deadline = self.deadline_on(worker)
            untaken[deadline] += 1
            if not self._is_rushed(worker, deadline) and self._in_time(untaken, self.takes_left):
                return worker, Closed.OPEN
            untaken[deadline] -= 1
            closed = Closed.DEADLINES
        return None, closed
