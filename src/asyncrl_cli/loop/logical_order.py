"""Deterministic runs (`run.deterministic`): what starts, what is loaded and what is trained follow a logical
clock, the version, instead of arrival (docs/exactness.md).

Every group has a position: 0, 1, 2, ... in the order of admission. Window v trains the next W positions.

    enters      when version v opens its window, every position below (the window's first) + budget that has
                no group yet gets one, at once: the feed's next prompts
    is judged   in order of position, those of the current window only. A group that is dropped is replaced
                at its position by the feed's next prompt
    is sampled  by the version that it enters with. With partial rollouts the version rises at fixed tokens of
                each response (`VersionPlan`), up to that of the window that trains the group
    is taken    in order of position

What is left to time is where a response runs, and when. It needs one version at a time, and runs only on a
worker that holds it. Where the next version begins, it gives its slot up, and goes on after the load. Workers
load every version, in order: when each of their responses has ended or needs a later one, and none that needs
theirs waits for a place. A restarted worker begins with the oldest version that a response waits for.

Why there is no deadlock. Let q be the first position of the window v that has not ended. It needs versions up
to v only, and all of these are published. If it runs, it ends. If it holds, its worker's other responses end
or hold (they wait for slots only, which all that hold have given up), and the worker loads the next version.
If it waits for a place, no worker with its version loads before it has one, and a slot there gets free. There
is such a worker, or will be: none has passed that version while q waits, except if q has lost its worker
since, and that one is restarted, and begins with the oldest version that is waited for.
"""

from __future__ import annotations

from itertools import takewhile
from math import ceil

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.contracts.prompt_group import VersionPlan
from asyncrl_cli.contracts.weight_version import Published
from asyncrl_cli.loop.admission import Admission, Closed
from asyncrl_cli.loop.fleet import Placement, WorkerSlots
from asyncrl_cli.loop.ledger import Attempt, Part, Stage
from asyncrl_cli.loop.weight_sync import WeightSync
from asyncrl_cli.profile.arithmetic import LoopSettings


def stretch_tokens(settings: LoopSettings) -> int:
    """How many tokens of a response one version samples, with partial rollouts: the longest response is cut
    evenly over all versions that it may have."""
    return ceil(settings.profile.rollout.max_response_tokens / (ceil(settings.schedule.eta) + 1))


class LogicalAdmission(Admission):
    """`live`: the untaken groups by position; `judged`: the first position that is not."""

    def __init__(self, settings: LoopSettings, workers: list[WorkerSlots]) -> None:
        super().__init__(settings, workers)
        self.live: dict[int, Attempt] = {}
        self.judged = 0
        self._entered = 0
        self._resumed_version = 0
        self._is_partial = settings.profile.async_training.partial_rollout
        self._stretch_tokens = stretch_tokens(settings)
        self._mixes = True  # what a resumed run kept is of the versions that it should have

    def restore(self, judged: int) -> int:
        """After a resume, when the ledger has the live groups. Returns the number of kept tokens that are not
        continued."""
        attempts = [*self.ledger.running.values(), *self.ledger.finished.values()]
        if any(attempt.versions is None for attempt in attempts):
            why = "the checkpoint is of a run that was not deterministic: its groups have no positions"
            raise RefusedError(why, hint="resume with run.deterministic=false")
        self.live = {attempt.position: attempt for attempt in attempts}
        self.judged, self._resumed_version = judged, self.version
        self._entered = max([self._first - 1 + self.taken_in_window, *self.live]) + 1
        before = sum(attempt.ended_tokens() for attempt in attempts)
        for attempt in self.ledger.running.values():
            self._continue(attempt)
        return before - sum(attempt.ended_tokens() for attempt in attempts)

    def _continue(self, attempt: Attempt) -> None:
        """Its responses go on from their last whole stretch. If one needs a version that is gone, all begin
        again with the present one."""
        versions = attempt.versions
        assert versions is not None
        cut = {index: kept.cut(versions) for index, kept in attempt.partial.items()}
        attempt.partial = {index: kept for index, kept in cut.items() if kept is not None}
        whole = {index: kept for index, kept in attempt.partial.items() if kept.is_whole}
        left = [attempt.partial.get(index) for index in attempt.unplaced if index not in whole]
        if any(versions.at(kept.tokens if kept is not None else 0) < self.version for kept in left):
            attempt.partial = whole
            last = max(self.version, versions.last)
            attempt.versions = VersionPlan(self.version, last, versions.stretch_tokens)

    @property
    def _first(self) -> int:
        """The window's first position."""
        return self.trained_groups + len(self.ledger.training) - self.taken_in_window

    def vacancies(self) -> list[int]:
        """The positions that enter now."""
        return [*range(self._entered, min(self._first + self.budget, self._total_groups))]

    def enter(self, attempt: Attempt, position: int) -> None:
        ahead = (position - self._first) // self.window_groups if self._is_partial else 0
        attempt.position = position
        attempt.versions = VersionPlan(self.version, self.version + ahead, self._stretch_tokens)
        attempt.unplaced, attempt.deadline = tuple(range(self._n)), self.deadline_from(self.version)
        self.ledger.admit(attempt)
        self.live[position] = self.unplaced[attempt.key] = attempt
        self._entered = max(self._entered, position + 1)

    def enter_again(self, attempt: Attempt, lost: Attempt) -> None:
        """A finished group has lost its arrays: it is generated anew, with the same seeds and versions."""
        attempt.position, attempt.versions, attempt.deadline = lost.position, lost.versions, lost.deadline
        attempt.unplaced, attempt.num_parts = tuple(range(self._n)), lost.num_parts
        self.ledger.admit(attempt)
        self.live[attempt.position] = self.unplaced[attempt.key] = attempt

    def to_judge(self) -> Attempt | None:
        """The next group in order that has finished."""
        attempt = self.live.get(self.judged) if self.judged < self._first + self.window_size else None
        return attempt if attempt is not None and attempt.stage is Stage.FINISHED else None

    def needs(self, attempt: Attempt) -> int:
        """The version that its responses begin with, or in a resumed run go on with."""
        assert attempt.versions is not None
        return max(attempt.versions.first, self._resumed_version)

    def oldest_needed(self) -> int:
        """The oldest version that any untaken group may still need, if its worker dies."""
        return min(map(self.needs, self.live.values()), default=self.version)

    def awaited(self) -> list[int]:
        """The versions that responses wait for which have no place."""
        return [self.needs(attempt) for attempt in self.unplaced.values()]

    def load_blockers(self, worker: WorkerSlots) -> list[str]:
        """Those whose responses run there, and have not been reported to end or hold, and those that wait for
        a place."""
        running = [key.attempt for key, unfinished in worker.unfinished.items() if unfinished]
        waiting = [key for key, attempt in self.unplaced.items() if self.needs(attempt) == worker.version]
        return [*map(str, dict.fromkeys([*running, *waiting]))]

    @property
    def needs_only_newest(self) -> bool:
        """Whether no response needs weights older than the newest: workers hold these, or are being restarted
        (and may wait for resources that the trainer has) while none of their responses needs others."""
        up = [worker for worker in self.workers.values() if not worker.down]
        are_current = all(worker.version == self.version and not worker.loading for worker in up)
        return are_current and (
            len(up) == len(self.workers) or min(self.awaited(), default=self.version) >= self.version
        )

    def first_lost(self) -> Attempt | None:
        """The first group by position that has a place now for some of its responses."""
        free: dict[int, int] = {}
        for worker in self.workers.values():
            if not (worker.loading or worker.down):
                free[worker.version] = free.get(worker.version, 0) + max(0, worker.slots - worker.used)
        waiting = [one for one in self.unplaced.values() if free.get(self.needs(one))]
        return min(waiting, key=lambda attempt: attempt.position, default=None)

    def place_again(self, attempt: Attempt, placement: Placement) -> list[Part]:
        """Each response is a part of its own, so that their order does not depend on where they ran."""
        placed = [
            part
            for name, number in placement.responses.items()
            for _ in range(number)
            for part in self._place(attempt, Placement({name: 1}, placement.version))
        ]
        if not attempt.unplaced:
            del self.unplaced[attempt.key]
        return placed

    def takeable(self, num_groups: int, *, unscored: bool = False) -> list[Attempt]:
        first = self._first + self.taken_in_window
        end = min(first + num_groups, self._first + self.window_size, self.judged)
        attempts = (self.live[position] for position in range(first, end))
        return [*takewhile(lambda attempt: attempt.stage is Stage.FINISHED, attempts)]

    def leave(self, attempt: Attempt, to: Stage, reason: str = "") -> None:
        super().leave(attempt, to, reason)
        if to is not Stage.FINISHED:
            del self.live[attempt.position]

    def take(self, attempt: Attempt) -> None:
        super().take(attempt)
        del self.live[attempt.position]

    def _choose(self) -> tuple[Placement | None, Closed]:
        if self.stopping:
            return None, Closed.STOPPING
        if not self.unplaced:
            return None, Closed.END if self._entered >= self._total_groups else Closed.WINDOW
        if self._together and not self.fleet.are_current(self.version):
            return None, Closed.LOADING
        if (attempt := self.first_lost()) is None:
            is_loading = all(worker.loading for worker in self.workers.values())
            return None, Closed.LOADING if is_loading else Closed.SLOTS
        return self._spread(attempt), Closed.OPEN

    def _spread(self, attempt: Attempt) -> Placement:
        """As many of its responses as there are slots for, each where most are free."""
        version = self.needs(attempt)
        free = {
            name: worker.slots - worker.used
            for name, worker in self.workers.items()
            if worker.version == version and not (worker.loading or worker.down)
        }
        responses: dict[str, int] = {}
        for _ in attempt.unplaced:
            name = max(free, key=lambda one: free[one])
            if free[name] < 1:
                break
            free[name] -= 1
            responses[name] = responses.get(name, 0) + 1
        return Placement(responses, version)


class LogicalSync(WeightSync):
    """Every worker loads every version, in order. Published versions are kept while anybody may need them."""

    def __init__(self, workers: list[WorkerSlots], admission: LogicalAdmission, max_staleness: int) -> None:
        super().__init__(workers)
        self._admission = admission
        self._max_lag = max_staleness + 1
        self._kept: dict[int, Published] = {}

    @property
    def has_room(self) -> bool:
        """Whether no worker lags so far that too many versions would be kept for it."""
        held = [worker.version for worker in self._workers if worker.version >= 0]
        return self.newest is None or not held or self.newest.version - min(held) <= self._max_lag

    def reserve(self) -> None:
        """No version is withdrawn."""

    def offer(self, published: Published, gather_s: float | None = None) -> None:
        super().offer(published, gather_s)
        held = [worker.version + 1 for worker in self._workers if worker.version >= 0]
        oldest = min([self._admission.oldest_needed(), published.version, *held])
        self._kept = {version: one for version, one in self._kept.items() if version >= oldest}
        self._kept[published.version] = published

    def wanted(self, worker: WorkerSlots) -> Published | None:
        if self.newest is None:
            return None
        if worker.version >= 0:
            return self._kept.get(worker.version + 1)
        return self._kept[min([self.newest.version, *self._admission.awaited()])]
