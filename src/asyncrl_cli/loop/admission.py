"""Which group may start, and which may be trained next: one pure state machine, no I/O (docs/admission.md).

Three rules have to agree before a group starts:

    slots       the workers have room for the group's n sequences              protects the KV cache
    window      running + finished + taken_in_window < floor((1 + eta) * W)    bounds the work ahead
                (or less: governor.py, which may also limit the sequences in flight)
    deadlines   every untaken group can still be taken in time                 bounds staleness, strictly

A group's deadline is the last version in which it may be trained: the oldest version of the workers that
generate its responses, plus `max_staleness`. With `takes_left` groups still to be taken in this window and W
in each later one, a set of untaken groups can be taken in time, earliest deadline first, if and only if for
every d >= 0

    number of untaken groups with a deadline <= version + d   <=   takes_left + d * W        (*)

Admission checks (*) with the candidate added; a take checks (*) with the taken group removed. Both are
needed: if only takes were checked, admission could start groups that cannot all be taken in time, and the
trainer would wait forever.

Beyond (*), a group that would start on a lagging worker waits for that worker's load, which gives it one more
window, if either

    rushed      it would be due in the current window, or
    short       weights travel fast (`fleet.Travel`), so few slots idle until they arrive

Responses whose worker has died are placed before any new group, on workers with weights new enough for their
group's deadline. They already have their place in the window and in (*).

Worked example: W = 2, version 5, nothing taken. Untaken deadlines are [5, 6, 6]. A finished group with
deadline 6 may be taken: [5, 6] remain, with one group due now and one take left. A second group with deadline
6 may not: [5] would remain, due now with no take left. So the trainer waits for the urgent group, and only
for that one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum

from asyncrl_cli.contracts.prompt_group import AttemptKey, PartKey
from asyncrl_cli.loop.fleet import Fleet, Placement, WorkerSlots
from asyncrl_cli.loop.governor import Governor
from asyncrl_cli.loop.ledger import Attempt, Ledger, Part, Stage
from asyncrl_cli.profile.arithmetic import LoopSettings


class Closed(StrEnum):
    """Why nothing more is admitted at the moment."""

    OPEN = ""
    STOPPING = "stopping"
    END = "end"
    WINDOW = "window"
    IN_FLIGHT = "in flight"
    LOADING = "loading"
    SLOTS = "slots"
    DEADLINES = "deadlines"


def takeable_in_time(deadlines: Mapping[int, int], version: int, takes_left: int, window_groups: int) -> bool:
    """Inequality (*) in the module's docstring. `deadlines` counts untaken groups per deadline."""
    due = 0
    for deadline in sorted(deadlines):
        due += deadlines[deadline]
        ahead = deadline - version
        if ahead < 0 or due > takes_left + ahead * window_groups:
            return False
    return True


class Admission:
    """Decides from the fleet (where there is room) and the ledger (what is under way), and updates both.
    Nothing here waits.

    If `async_training.on_stale` is not "wait", inequality (*) is off, and `open_window` returns the late
    groups. In colocate mode no group starts before all workers hold the newest version: otherwise the first
    worker to load would get all groups.
    """

    def __init__(
        self, settings: LoopSettings, workers: Iterable[WorkerSlots], scorers: Collection[str] = ()
    ) -> None:
        """`scorers`: those whose columns a finished group needs before it can be taken."""
        rollout, schedule = settings.profile.rollout, settings.schedule
        unit = rollout.n if rollout.placement == "group" else 1
        self.fleet = Fleet(workers, unit=unit, queue_sequences=rollout.n * rollout.prefetch_groups)
        self.workers = self.fleet.by_name
        self.ledger = Ledger()
        self.unplaced: dict[AttemptKey, Attempt] = {}
        """The running groups with responses to be placed again, after a worker's death or a resume, in order
        of admission."""
        self.version = 0
        self.taken_in_window = 0
        self.stopping = False
        self.window_groups = schedule.window_groups
        self._budget = schedule.budget_groups
        self.governor: Governor | None = None
        if settings.profile.async_training.target_kl is not None:
            self.governor = Governor(settings, sum(worker.slots for worker in self.workers.values()))
        self._total_groups = schedule.groups
        self._max_staleness = schedule.max_staleness
        self._on_stale = settings.profile.async_training.on_stale
        self.scorers = scorers
        self._n = rollout.n
        self._mixes = settings.mixes
        self._together = settings.profile.placement.colocate

    @property
    def budget(self) -> int:
        """How many groups may be running, finished or taken in a window."""
        return self._budget if self.governor is None else self.governor.budget_groups

    @property
    def in_flight(self) -> int:
        """Sequences of groups that have or wait for a slot."""
        return sum([worker.unfinished_sequences for worker in self.workers.values()])

    @property
    def trained_groups(self) -> int:
        return self.ledger.ended[Stage.TRAINED]

    @property
    def window_size(self) -> int:
        """Groups of the current window: W, or fewer in the last window of a run."""
        consumed_before = self.trained_groups + len(self.ledger.training) - self.taken_in_window
        return min(self.window_groups, self._total_groups - consumed_before)

    def is_last(self, version: int) -> bool:
        """Whether `version` is the run's last: no window follows it."""
        return version == self.version and self.window_size == 0

    @property
    def takes_left(self) -> int:
        return self.window_size - self.taken_in_window

    def closed(self) -> Closed:
        """Why no group can start now; `Closed.OPEN` if one can."""
        return self._choose()[1]

    def is_open(self) -> bool:
        return self._choose()[0] is not None

    def load_blockers(self, worker: WorkerSlots) -> list[str]:
        """The groups that the worker may not load another version for: they need the one that it holds."""
        return []

    def choose(self) -> Placement | None:
        """Where the next responses start: those of the first group in `unplaced`, else those of a new group.
        None if closed."""
        return self._choose()[0]

    def first_lost(self) -> Attempt | None:
        """The first group in `unplaced`, whose responses are placed next."""
        return next(iter(self.unplaced.values())) if self.unplaced else None

    def refused(self) -> list[WorkerSlots]:
        """The workers on which the next responses would start if deadlines allowed it."""
        placement = self._with_room(self.first_lost())
        return [self.workers[name] for name in placement.responses] if placement is not None else []

    def admit(self, attempt: Attempt, placement: Placement) -> list[Part]:
        attempt.unplaced, attempt.deadline = tuple(range(self._n)), self.deadline_from(placement.version)
        self.ledger.admit(attempt)
        placed = self._place(attempt, placement)
        if self.governor is not None:
            untaken_groups = len(self.ledger.running) + len(self.ledger.finished)
            self.governor.admitted(untaken_groups + self.taken_in_window, self.in_flight)
        return placed

    def place_again(self, attempt: Attempt, placement: Placement) -> list[Part]:
        """Place what was lost. The deadline rises if all remaining parts are newer."""
        placed = self._place(attempt, placement)
        del self.unplaced[attempt.key]
        oldest = min([part.version for part in attempt.parts.values()])
        self.ledger.set_deadline(attempt, self.deadline_from(oldest))
        return placed

    def deadline_from(self, version: int) -> int:
        return version + self._max_staleness

    def slots_freed(self, worker: str, counts: Mapping[PartKey, int]) -> None:
        """Free the slots of responses that need none now. A count falls when responses continue after a tool:
        these may exceed the worker's slots, and then queue."""
        slots = self.workers[worker]
        changed, slots.reported_free = counts.items() ^ slots.reported_free.items(), counts
        for key in {key for key, _ in changed} & slots.unfinished.keys():
            num_responses = len(self.ledger.running[key.attempt].parts[key.number].indices)
            slots.set_unfinished(key, num_responses - counts.get(key, 0))

    def lose(self, worker: str) -> None:
        """The worker's process is gone: the responses that ran there have to be placed again."""
        slots = self.workers[worker]
        for key in list(slots.unfinished):
            slots.release(key)
            self.ledger.running[key.attempt].lose(key.number)
        self.note_unplaced()

    def note_unplaced(self) -> None:
        """Find the running groups with responses that have to be placed again."""
        self.unplaced = {key: attempt for key, attempt in self.ledger.running.items() if attempt.unplaced}

    def leave(self, attempt: Attempt, to: Stage, reason: str = "") -> None:
        """A running group finishes, or a running or finished group ends untrained, which frees its place in
        the window."""
        for part in attempt.running_parts():
            self.workers[part.worker].release(part.key)
        self.unplaced.pop(attempt.key, None)
        self.ledger.move(attempt, to, reason)

    def takeable(self, num_groups: int, *, unscored: bool = False) -> list[Attempt]:
        """Up to `num_groups` finished groups that may be taken together in this window, in finish order where
        (*) allows.

        A group that lacks a scorer's column is left out, as if it were still running, unless `unscored`. One
        pass is enough: a take never increases the slack of (*) at any deadline, so a refused deadline stays
        refused.
        """
        takes_left, chosen = self.takes_left, list[Attempt]()
        if takes_left <= 0:
            return chosen
        num_groups, untaken = min(num_groups, takes_left), self.ledger.deadlines.copy()
        refused: set[int] = set()
        for attempt in self.ledger.finished.values():
            if len(chosen) == num_groups:
                break
            if attempt.deadline in refused or not (unscored or self.is_scored(attempt)):
                continue
            untaken[attempt.deadline] -= 1
            if self._in_time(untaken, takes_left - 1):
                chosen.append(attempt)
                takes_left -= 1
            else:
                untaken[attempt.deadline] += 1
                refused.add(attempt.deadline)
        return chosen

    def is_scored(self, attempt: Attempt) -> bool:
        return len(attempt.columns) == len(self.scorers)

    def take(self, attempt: Attempt) -> None:
        self.ledger.move(attempt, Stage.TRAINING)
        self.taken_in_window += 1
        assert self.taken_in_window <= self.window_size

    def open_window(self) -> list[Attempt]:
        """Raise the version and begin a window. Returns the untaken groups whose deadline has passed (none
        under "wait")."""
        self.version += 1
        self.taken_in_window = 0
        if self.governor is not None:
            self.governor.open_window(self.version)
        for worker in self.workers.values():
            if not worker.loading:  # from now on the version is on its way to it
                self.fleet.travel.set_out(worker.name, worker.unfinished)
        untaken = [*self.ledger.finished.values(), *self.ledger.running.values()]
        late = [attempt for attempt in untaken if attempt.deadline < self.version]
        assert not (late and self._on_stale == "wait"), (
            f"passed the staleness bound: {[attempt.key for attempt in late]}"
        )
        return late

    def _place(self, attempt: Attempt, placement: Placement) -> list[Part]:
        placed = []
        for name, num_responses in placement.responses.items():
            worker = self.workers[name]
            free_slots = max(0, worker.slots - worker.used)
            part = attempt.place(
                num_responses, name, worker.version, free_slots=free_slots, mixes=self._mixes
            )
            worker.set_unfinished(part.key, num_responses)
            placed.append(part)
        return placed

    def _in_time(self, untaken: Mapping[int, int], takes_left: int) -> bool:
        if self._on_stale != "wait":
            return True
        counts = {deadline: count for deadline, count in untaken.items() if count}
        return takeable_in_time(counts, self.version, takes_left, self.window_groups)

    def _choose(self) -> tuple[Placement | None, Closed]:
        lost = self.first_lost()
        if self.stopping:
            return None, Closed.STOPPING
        if lost is None:  # has the run, or its window, a place for another group?
            untaken_groups = len(self.ledger.running) + len(self.ledger.finished)
            if untaken_groups + len(self.ledger.training) + self.trained_groups >= self._total_groups:
                return None, Closed.END
            if untaken_groups + self.taken_in_window >= self.budget:
                return None, Closed.WINDOW
            if self.governor is not None and not self.governor.has_room(self.in_flight):
                return None, Closed.IN_FLIGHT
        if self._together and not self.fleet.are_current(self.version):
            return None, Closed.LOADING
        placement = self._with_room(lost)
        if placement is None:
            return None, Closed.LOADING if all(one.loading for one in self.workers.values()) else Closed.SLOTS
        if lost is not None:
            least = max(lost.deadline - self._max_staleness, lost.least_version)
            placement = self.fleet.placement(len(lost.unplaced), least)
        elif not self._may_start(placement):
            placement = None
        return placement, Closed.OPEN if placement is not None else Closed.DEADLINES

    def _with_room(self, lost: Attempt | None) -> Placement | None:
        """Where the next responses would start, whatever their deadlines."""
        return self.fleet.placement(self._n if lost is None else len(lost.unplaced))

    def _may_start(self, placement: Placement) -> bool:
        """Whether a new group with this placement can be trained in time beside all others, and should not
        rather start after the load of newer weights. (Older weights are no better.)"""
        untaken, deadline = self.ledger.deadlines.copy(), self.deadline_from(placement.version)
        untaken[deadline] += 1
        # At the end of the window in which a group is due, the trainer waits for its longest response. A
        # group that starts on a lagging worker uses up one window of its slack, unless it ends before the new
        # weights arrive. Where weights travel for long, most groups do.
        lags = placement.version < self.version and self._on_stale != "accept"
        if lags and (deadline <= self.version or self.fleet.travel.is_short):
            return False
        return self._in_time(untaken, self.takes_left)
