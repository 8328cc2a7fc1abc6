"""A second set of books of a run, kept from its events alone, to hold against the loop's own.

Nothing of `loop.admission` or the ledger is used: what they count incrementally is counted here from scratch,
each time, after the formulas of docs/admission.md. Slow on purpose, and for small worlds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl_cli.contracts.ports import PartialResult
from asyncrl_cli.contracts.prompt_group import AttemptKey, PartialResponse, PartKey
from asyncrl_cli.loop.governor import Governor
from asyncrl_cli.profile.arithmetic import LoopSettings
from tests.loop.proof.travel_book import TravelBook


def in_time(deadlines: Iterable[int], version: int, takes_left: int, window_groups: int) -> bool:
    """Whether groups of these deadlines can all be trained in time: `takes_left` in this version, W in each
    later one."""
    due = sorted(deadlines)
    if not due:
        return True
    if due[0] < version:
        return False
    latest = due[-1] - version
    return all(
        sum(deadline <= version + d for deadline in due) <= takes_left + d * window_groups
        for d in range(latest + 1)
    )


@dataclass(slots=True, kw_only=True)
class PartBook:
    """Responses that were placed on a worker when it held `version`. `indices`: once the worker was asked for
    them."""

    worker: str
    version: int
    num_responses: int
    indices: tuple[int, ...] = ()
    partial: dict[int, PartialResponse] = field(default_factory=dict)
    has_ended: bool = False


@dataclass(slots=True, kw_only=True)
class LiveAttempt:
    """An attempt that is running, finished or in training. `parts` by number, without those that were lost;
    `num_lost` responses of these have not been placed again, and go on from what was `kept` of them.
    `tokens`, `num_kept`, `num_broken` (failed, but not for their versions), `rewards` and `payloads`: of what
    has ended. `columns` by scorer."""

    account: str
    deadline: int = -1
    parts: dict[int, PartBook] = field(default_factory=dict)
    num_parts: int = 0
    num_lost: int = 0
    kept: dict[int, PartialResponse] = field(default_factory=dict)
    num_kept: int = 0
    num_broken: int = 0
    rewards: set[float] = field(default_factory=set)
    tokens: int = 0
    payloads: dict[int, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether every response has come back."""
        return not self.num_lost and all(part.has_ended for part in self.parts.values())

    @property
    def began(self) -> int:
        """The oldest version that it started on."""
        return min(part.version for part in self.parts.values())

    @property
    def kept_tokens(self) -> int:
        return sum(kept.tokens for kept in self.kept.values())

    @property
    def payload(self) -> tuple[Any, ...]:
        return tuple(self.payloads[number] for number in sorted(self.payloads))


@dataclass(slots=True, kw_only=True)
class WorkerBook:
    """What the loop may know of one worker. It counts as loading until its first load has ended."""

    slots: int
    version: int = -1
    loading: bool = True
    down: bool = False
    was_lost: bool = False
    away: bool = False
    paused: bool = False
    held_when_lost: int = -1
    running_tokens: int = 0
    so_far: PartialResult = field(default_factory=PartialResult)
    unfinished: dict[PartKey, int] = field(default_factory=dict)
    eval_sequences: int = 0
    is_lent: bool = False
    has_device: bool = False
    """Of the trainer."""

    @property
    def used(self) -> int:
        return sum(self.unfinished.values()) + self.eval_sequences

    def sleep(self, is_asleep: bool) -> None:
        """A lent worker counts as away while it is asleep, and then forgets its weights."""
        self.held_when_lost = max(self.held_when_lost, self.version)
        self.down = self.away = is_asleep
        self.version, self.loading = -1, True

    def lost(self) -> int:
        """Its process is gone. Returns the tokens of what ran there, as last reported."""
        lost_tokens, self.held_when_lost = self.running_tokens, max(self.held_when_lost, self.version)
        self.version, self.loading, self.down, self.was_lost, self.running_tokens = -1, True, True, True, 0
        return lost_tokens


@dataclass(slots=True, kw_only=True)
class Books:
    """Every attempt of the run, and the counters of the current window; `live` in order of admission,
    `finish_order` of finish."""

    settings: LoopSettings
    workers: dict[str, WorkerBook]
    scorers: tuple[str, ...] = ()
    version: int = 0
    taken_in_window: int = 0
    stopping: bool = False
    admitted: int = 0
    live: dict[AttemptKey, LiveAttempt] = field(default_factory=dict)
    finish_order: list[AttemptKey] = field(default_factory=list)
    ended: dict[AttemptKey, str] = field(default_factory=dict)
    waiting: list[AttemptKey] = field(default_factory=list)
    """Attempts that ended as requeued and whose prompt has not started again."""
    stale_requeues: Counter[tuple[str, int]] = field(default_factory=Counter)
    travel: TravelBook = field(init=False)
    governor: Governor | None = None
    """The loop's own. What its limits allow is checked, and that they only lower what the settings allow."""
    preempts: bool = False
    """Whether engines preempt sequences."""

    def __post_init__(self) -> None:
        self.travel = TravelBook(len(self.workers))

    @property
    def trained(self) -> int:
        return sum(account == "trained" for account in self.ended.values())

    @property
    def budget(self) -> int:
        schedule = self.settings.schedule
        most = math.floor((1 + schedule.eta) * schedule.window_groups)
        if self.governor is None:
            return most
        return max(schedule.window_groups, min(most, self.governor.budget_groups))

    @property
    def is_crowded(self) -> bool:
        """Whether a group more would be above the governor's limit of what is in flight."""
        in_flight = sum(sum(worker.unfinished.values()) for worker in self.workers.values())
        n = self.settings.profile.rollout.n
        slots = sum(worker.slots for worker in self.workers.values())
        most = math.inf if self.governor is None else max(n, self.governor.most_in_flight)
        most = math.inf if most >= slots else most  # beyond that, queues of workers
        return in_flight > 0 and in_flight + n > most

    @property
    def untaken(self) -> dict[AttemptKey, int]:
        return {key: attempt.deadline for key, attempt in self.live.items() if attempt.account != "training"}

    @property
    def window_size(self) -> int:
        """W, or the rest of the run: what was trained or taken before this window is used up."""
        in_training = len(self.live) - len(self.untaken)
        before = self.trained + in_training - self.taken_in_window
        return min(self.settings.schedule.window_groups, self.settings.schedule.groups - before)

    @property
    def takes_left(self) -> int:
        return self.window_size - self.taken_in_window

    def totals(self) -> dict[str, int]:
        """As `Ledger.totals`."""
        accounts = Counter(attempt.account for attempt in self.live.values()) + Counter(self.ended.values())
        names = ("running", "finished", "training", "trained", "dropped", "requeued")
        return {"admitted_total": self.admitted} | {name: accounts[name] for name in names}

    def late(self) -> list[AttemptKey]:
        """Untaken groups that can no longer be trained within the bound."""
        return [key for key, deadline in self.untaken.items() if deadline < self.version]

    def may_take(self, key: AttemptKey, taken: Iterable[AttemptKey] = ()) -> bool:
        """Whether `key` may be taken after `taken` were, in this same moment."""
        gone = {key, *taken}
        takes_left = self.takes_left - len(gone)
        if takes_left < 0:
            return False
        if self.settings.profile.async_training.on_stale != "wait":
            return True
        rest = [deadline for other, deadline in self.untaken.items() if other not in gone]
        return in_time(rest, self.version, takes_left, self.settings.schedule.window_groups)

    def is_scored(self, key: AttemptKey) -> bool:
        return set(self.live[key].columns) == set(self.scorers)

    def unscored(self, scorer: str) -> list[AttemptKey]:
        """What the scorer should compute next: what could be taken now, then the rest, in finish order."""
        if scorer == "prox":  # of the window's weights: what the window still takes
            most = self.takes_left
        elif scorer == "critic":  # after the train step before: what the next one takes
            most = self.settings.schedule.step_groups
        else:
            most = len(self.finish_order)
        could = self.takeable(most, unscored=True)
        order = sorted(could, key=self.finish_order.index)
        if scorer not in ("prox", "critic"):
            order += [key for key in self.finish_order if key not in could]
        return [key for key in order if scorer not in self.live[key].columns]

    def takeable(self, num_groups: int, *, unscored: bool = False) -> list[AttemptKey]:
        """In finish order as far as deadlines allow, looking at everything again after each take. `unscored`:
        also those that lack a column."""
        taken: list[AttemptKey] = []
        while len(taken) < num_groups:
            rest = [key for key in self.finish_order if key not in taken]
            able = (key for key in rest if unscored or self.is_scored(key))
            allowed = next((key for key in able if self.may_take(key, taken)), None)
            if allowed is None:
                break
            taken.append(allowed)
        return taken

    def lost_first(self) -> AttemptKey | None:
        """The first group with responses that were lost with a worker and have not been placed again."""
        return next((key for key, attempt in self.live.items() if attempt.num_lost), None)

    def placement(self, num_responses: int, at_least: int = -1) -> dict[str, int] | None:
        """Where responses are to start, one by one (or all at once); None if they find no room.

        In slots; in queues only while the slots of all workers, also of those that load, are too few.
        """
        rollout, placed = self.settings.profile.rollout, Counter[str]()
        unit = rollout.n if rollout.placement == "group" else 1
        up = [worker for worker in self.workers.values() if not worker.down]
        is_full = sum(max(0, worker.slots - worker.used) // unit for worker in up) * unit < num_responses
        queue = rollout.n * rollout.prefetch_groups if is_full else 0
        while placed.total() < num_responses:
            workers = self.workers.items()
            room = {name: worker.slots - worker.used + queue - placed[name] for name, worker in workers}
            able = [name for name in room if room[name] >= unit and not self.workers[name].loading]
            able = [name for name in able if self.workers[name].version >= at_least]
            if not able:
                return None
            placed[max(able, key=lambda name: (self.workers[name].version, room[name]))] += unit
        return dict(placed)

    def placement_now(self) -> dict[str, int] | None:
        """Where the next responses start; None if there is no room that is new enough."""
        lost = self.lost_first()
        if lost is None:
            return self.placement(self.settings.profile.rollout.n)
        attempt = self.live[lost]
        kept = [version for one in attempt.kept.values() for version, _ in one.version_tokens]
        least = attempt.deadline - self.settings.schedule.max_staleness
        return self.placement(attempt.num_lost, max([least, *kept]))

    def oldest(self, placement: Mapping[str, int]) -> int:
        return min(self.workers[name].version for name in placement)

    def start_in_time(self, version: int) -> bool:
        """Whether one more group, started on `version`, could be trained in time beside all others."""
        schedule, on_stale = self.settings.schedule, self.settings.profile.async_training.on_stale
        deadline = version + schedule.max_staleness
        if on_stale == "accept":
            return True
        if version != self.version and (deadline <= self.version or self.travel.is_short):
            return False
        deadlines = [*self.untaken.values(), deadline]
        is_in_time = in_time(deadlines, self.version, self.takes_left, schedule.window_groups)
        return on_stale != "wait" or is_in_time

    def closed(self) -> str:
        """Why nothing may start now, "" if something may; the reasons in the order of docs/admission.md."""
        profile, lost, placement = self.settings.profile, self.lost_first(), self.placement_now()
        is_asleep = all(worker.loading for worker in self.workers.values())
        num_responses = profile.rollout.n if lost is None else self.live[lost].num_lost
        is_new = lost is None
        is_late = placement is None or (is_new and not self.start_in_time(self.oldest(placement)))
        reasons = {
            "stopping": self.stopping,
            "end": is_new and len(self.live) + self.trained >= self.settings.schedule.groups,
            "window": is_new and len(self.untaken) + self.taken_in_window >= self.budget,
            "in flight": is_new and self.is_crowded,
            "loading": is_asleep or (profile.placement.colocate and not self.all_loaded()),
            "slots": self.placement(num_responses) is None,
            "deadlines": is_late,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def all_loaded(self) -> bool:
        workers = self.workers.values()
        return {(worker.version, worker.loading) for worker in workers} == {(self.version, False)}

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint; workers are not part of it."""
        return {
            "version": self.version,
            "taken_in_window": self.taken_in_window,
            "admitted": self.admitted,
            "live": [self._live_state(key, live) for key, live in self.live.items()],
            "finish_order": [list(key) for key in self.finish_order],
            "ended": [[*key, account] for key, account in self.ended.items()],
            "waiting": [list(key) for key in self.waiting],
            "stale_requeues": [[*prompt, count] for prompt, count in self.stale_requeues.items()],
        }

    def _live_state(self, key: AttemptKey, live: LiveAttempt) -> list[Any]:
        """A running part survives as what its worker has just said of it."""
        parts = live.parts.items()
        ended = [[number, part.version, part.indices] for number, part in parts if part.has_ended]
        kept = dict(live.kept)
        for number, part in live.parts.items():
            if live.account == "running" and not part.has_ended:
                kept |= self.workers[part.worker].so_far.responses.get(PartKey(key, number), {})
        shown = [[index, one.version_tokens, one.is_whole] for index, one in kept.items()]
        payloads, rewards = list(live.payloads.items()), sorted(live.rewards)
        tokens = [live.account, live.deadline, live.tokens, payloads, live.num_kept, live.num_broken, rewards]
        return [*key, *tokens, ended, live.num_parts, shown]

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version, self.taken_in_window = state["version"], state["taken_in_window"]
        self.admitted, n = state["admitted"], self.settings.profile.rollout.n
        for (
            *key,
            account,
            deadline,
            tokens,
            payloads,
            num_kept,
            num_broken,
            rewards,
            parts,
            num_parts,
            kept,
        ) in state["live"]:
            live = LiveAttempt(account=account, deadline=deadline, tokens=tokens, payloads=dict(payloads))
            live.num_parts, live.num_kept, live.rewards = num_parts, num_kept, set(rewards)
            live.num_broken = num_broken
            for number, version, indices in parts:
                part = PartBook(worker="", version=version, num_responses=len(indices), has_ended=True)
                part.indices = tuple(indices)
                live.parts[number] = part
            if account == "running":
                live.num_lost = n - sum(part.num_responses for part in live.parts.values())
            for index, versions, is_whole in kept:
                live.kept[index] = PartialResponse(tuple((v, count) for v, count in versions), is_whole)
            self.live[AttemptKey(*key)] = live
        self.finish_order = [AttemptKey(*key) for key in state["finish_order"]]
        self.ended = {AttemptKey(*key): account for *key, account in state["ended"]}
        self.waiting = [AttemptKey(*key) for key in state["waiting"]]
        self.stale_requeues = Counter({(uid, epoch): count for uid, epoch, count in state["stale_requeues"]})
