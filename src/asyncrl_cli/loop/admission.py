"""Which group may start, and which may be trained next: one pure state machine, no I/O (docs/admission.md).

Three rules have to agree before a group starts:

    slots       a worker has room for the group's n sequences                  protects the KV cache
    window      running + finished + taken_in_window < floor((1 + eta) * W)    bounds the work ahead
    deadlines   every untaken group can still be taken in time                 bounds staleness, strictly

A group's deadline is the last version in which it may be trained: the version of the worker that it starts on, plus
`max_staleness`. With `takes_left` groups still to be taken in this window and W in each later one, a set of untaken groups
can be served in time exactly if (earliest deadline first) for every d >= 0

    number of untaken groups with a deadline <= version + d   <=   takes_left + d * W        (*)

Admission checks (*) with the candidate, a take checks (*) without the taken group. Both are needed: checking takes
alone lets admission fill the future with groups that cannot all be served, and the trainer waits forever.

Beyond what (*) demands, no group starts on a lagging worker if it would be due in the window that has begun already.

Worked example: W = 2, version 5, nothing taken. Untaken deadlines are [5, 6, 6]. A finished group with deadline 6 may be
taken: [5, 6] remain, with one group due now and one take left. A second group with deadline 6 may not: [5] would be due with no
take left. So the trainer waits for the urgent group, and only for that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from asyncrl_cli.loop.attempts import Attempt, AttemptKey, Ledger, Stage
from asyncrl_cli.loop.fleet import Fleet, WorkerSlots
from asyncrl_cli.profile.arithmetic import LoopSettings


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
    """Decides from the fleet (which worker has room) and the ledger (what is under way), and updates both; nothing here waits.

    If `async_training.on_stale` is not "wait", inequality (*) is off, and `publish` returns the late groups. In colocate mode no
    group starts before all workers hold the newest version: otherwise the first worker to load would get all groups.
    """

    def __init__(self, settings: LoopSettings, workers: Iterable[WorkerSlots]) -> None:
        rollout, schedule = settings.profile.rollout, settings.schedule
        self.fleet = Fleet(workers, n=rollout.n, prefetch_groups=rollout.prefetch_groups)
        self.workers = self.fleet.by_name
        self.ledger = Ledger()
        self.version = 0
        self.taken_in_window = 0
        self.stopping = False
        self.window_groups = schedule.window_groups
        self.budget = schedule.budget_groups
        self._total_groups = schedule.groups
        self._max_staleness = schedule.max_staleness
        self._on_stale = settings.profile.async_training.on_stale
        self._n = rollout.n
        self._together = settings.profile.placement.colocate

    @property
    def trained_groups(self) -> int:
        return self.ledger.ended[Stage.TRAINED]

    @property
    def window_size(self) -> int:
        """Groups of the current window: W, or what is left of the run in its last window."""
        consumed_before = self.trained_groups + len(self.ledger.training) - self.taken_in_window
        return min(self.window_groups, self._total_groups - consumed_before)

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

    def admit(self, attempt: Attempt, worker: WorkerSlots) -> None:
        attempt.worker, attempt.deadline = worker.name, self.deadline_on(worker)
        self.ledger.admit(attempt)
        worker.set_unfinished(attempt.key, self._n)

    def deadline_on(self, worker: WorkerSlots) -> int:
        return worker.version + self._max_staleness

    def sequences_finished(self, worker: str, counts: Mapping[AttemptKey, int]) -> bool:
        """Free the slots of sequences that ended inside running groups; true if that made room for a group."""
        slots = self.workers[worker]
        before = slots.room
        for key, finished in counts.items():
            if slots.unfinished.get(key, 0) > self._n - finished:
                slots.set_unfinished(key, self._n - finished)
        return slots.room > before

    def leave(self, attempt: Attempt, to: Stage, reason: str = "") -> None:
        """A running group finishes, or a running or finished group ends untrained, which frees its place in the window."""
        if attempt.stage is Stage.RUNNING:
            self.workers[attempt.worker].release(attempt.key)
        self.ledger.move(attempt, to, reason)

    def takeable(self, num_groups: int) -> list[Attempt]:
        """Up to `num_groups` finished groups that may be taken together now, in finish order where (*) allows.

        One pass is enough: a take never increases the slack of (*) at any deadline, so a refused deadline stays refused.
        """
        takes_left, chosen = self.takes_left, list[Attempt]()
        if takes_left <= 0:
            return chosen
        untaken = self.ledger.deadlines.copy()
        refused: set[int] = set()
        for attempt in self.ledger.finished.values():
            if len(chosen) == num_groups:
                break
            if attempt.deadline in refused:
                continue
            untaken[attempt.deadline] -= 1
            if self._in_time(untaken, takes_left - 1):
                chosen.append(attempt)
                takes_left -= 1
            else:
                untaken[attempt.deadline] += 1
                refused.add(attempt.deadline)
        return chosen

    def take(self, attempt: Attempt) -> None:
        self.ledger.move(attempt, Stage.TRAINING)
        self.taken_in_window += 1
        assert self.taken_in_window <= self.window_size

    def publish(self) -> list[Attempt]:
        """Raise the version and begin a window. Returns untaken groups whose deadline has passed (none under "wait")."""
        self.version += 1
        self.taken_in_window = 0
        untaken = [*self.ledger.finished.values(), *self.ledger.running.values()]
        late = [attempt for attempt in untaken if attempt.deadline < self.version]
        assert not (late and self._on_stale == "wait"), f"passed the staleness bound: {[attempt.key for attempt in late]}"
        return late

    def _is_rushed(self, worker: WorkerSlots, deadline: int) -> bool:
        """Whether the worker lags and a group that starts there would be due in the window that has already begun, or late.

        At the window's end the trainer would wait for that group's longest response. If the group starts after the worker's
        next load instead, it is due a window later.
        """
        return self._on_stale != "accept" and worker.version < self.version and deadline <= self.version

    def _in_time(self, untaken: Mapping[int, int], takes_left: int) -> bool:
        if self._on_stale != "wait":
            return True
        counts = {deadline: count for deadline, count in untaken.items() if count}
        return takeable_in_time(counts, self.version, takes_left, self.window_groups)

    def _choose(self) -> tuple[WorkerSlots | None, Closed]:
        if self.stopping:
            return None, Closed.STOPPING
        untaken_groups = len(self.ledger.running) + len(self.ledger.finished)
        if untaken_groups + len(self.ledger.training) + self.trained_groups >= self._total_groups:
            return None, Closed.END
        if untaken_groups + self.taken_in_window >= self.budget:
            return None, Closed.WINDOW
        if not self.fleet.is_awake() or (self._together and not self.fleet.are_current(self.version)):
            return None, Closed.LOADING
        closed, untaken = Closed.SLOTS, self.ledger.deadlines.copy()
        for worker in self.fleet.candidates():
            deadline = self.deadline_on(worker)
            untaken[deadline] += 1
            if not self._is_rushed(worker, deadline) and self._in_time(untaken, self.takes_left):
                return worker, Closed.OPEN
            untaken[deadline] -= 1
            closed = Closed.DEADLINES
        return None, closed
