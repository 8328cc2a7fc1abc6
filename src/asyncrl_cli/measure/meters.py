"""Meters of executors, real or simulated. Each integrates times in states and running sequences in the
executor's own process."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

from asyncrl_cli.measure.machines import GENERATE, LOGP, PARAM_UPDATE, REF_LOGP
from asyncrl_cli.measure.states import ExecutorReport, SlotInterval, State, StateClock
from asyncrl_cli.profile.schema import Interrupt

DEBOUNCE_S, POLL_S = 0.1, 1.0
"""A worker's report: how long after the last one at the earliest, and after how long without a change."""
MACHINES_EVERY_S = 1.0
"""Not every report of a worker has those of its machines, each of which costs the driver as much."""
PROMPTS = "prompts"
COLUMN_MACHINES = {"old_logprob": LOGP, "ref": REF_LOGP}
"""Columns that a trainer may compute itself -> the machine that does."""
MAX_INTERVALS = 10_000
"""At most this many untaken intervals are kept, the newest: a driver that does not ask must not fill the
worker's memory."""


class RolloutMeter:
    """How one rollout worker spends its time. Call it from the event loop, at every change.

    busy                at least one sequence runs (including those that a drain waits for)
    waiting for tools   none runs, and at least one trajectory waits for its environment between two turns
    blocked             neither, but trajectories are under way: they wait for rewards, say
    starved             none is under way
    loading             an interrupt and the load itself; with `drain`, only once nothing runs or waits
    paused              colocate: the trainer has the resources

    Its report has those of two machines beside it. `generate`, the engine, is busy, loading or paused with
    the worker, else starved, for the worker's reason. `param_update` is sending while buckets arrive, blocked
    until their load begins and running sequences have ended, and then loading.
    """

    def __init__(
        self, name: str, slots: int, now: Callable[[], float], on_change: Callable[[], None]
    ) -> None:
        self._clock = StateClock(name, "rollout", PROMPTS, now)
        self._clock.gauges["slots"] = slots
        self._engine = StateClock(name.replace("rollout", GENERATE), GENERATE, PROMPTS, now)
        self._update = StateClock(f"{PARAM_UPDATE}-{name}", PARAM_UPDATE, "a version", now)
        self._now = now
        self._on_change = on_change
        self._since_s = self._machines_due_s = now()
        self._running = 0
        self._waiting: dict[str, tuple[str, float]] = {}
        """By trajectory, longest wait first: what it waits for, and since when."""
        self._interrupt: Interrupt | None = None
        self._is_paused = False
        self._num_parts = self._num_evals = 0

    def running(self, running: int) -> None:
        """The number of generating sequences changed."""
        self._advance()
        self._running = running
        self._settle()

    def waiting(self, trajectory: str, for_what: str) -> None:
        """The trajectory has ended a turn and waits for `for_what`, such as a tool; "" when it no longer
        waits."""
        self._advance()
        if for_what:
            self._waiting[trajectory] = (for_what, self._now())
        else:
            del self._waiting[trajectory]
        self._settle()

    def parts(self, change: int) -> None:
        """A part of a group began (+1) or ended (-1): all its trajectories have their rewards."""
        self._advance()
        self._num_parts += change
        self._settle()

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """A version's buckets arrive during the block. If it does not fail, a load follows."""
        self._update.enter(State.SENDING, "its buckets")
        after = State.STARVED
        try:
            yield
            after = State.BLOCKED
        finally:
            self._update.enter(after, "its load to begin" if after is State.BLOCKED else "")

    def load_begins(self, interrupt: Interrupt) -> None:
        self._advance()
        self._interrupt = interrupt
        self._settle()

    def load_ended(self) -> None:
        self._advance()
        if self._interrupt is not None:
            self._update.enter(State.STARVED)
        self._interrupt = None
        self._settle()

    def pause(self, is_paused: bool) -> None:
        self._advance()
        self._is_paused = is_paused
        self._settle()

    def evals(self, change: int) -> None:
        """An evaluation began (+1) or ended (-1); `eval_s` is the time with at least one."""
        self._advance()
        self._num_evals += change
        self._settle()

    def report(
        self,
        *,
        version: int,
        sampled_tokens: int,
        decode_steps: float,
        running_tokens: int,
        sums: Mapping[str, float] | None = None,
        gauges: Mapping[str, float] | None = None,
        slot_intervals: tuple[SlotInterval, ...] = (),
        machines: bool = True,
    ) -> ExecutorReport:
        """The worker's report. `sums` and `gauges`: further figures of the engine, by name.
        `slot_intervals`: those of its sequences. `machines`: with those of the machines, if they are due."""
        self._advance()
        if self._waiting:
            self._settle()  # the text says how long it has waited
        if "waiting_trajectory_s" in self._clock.sums:
            self._clock.gauges["waiting_trajectories"] = len(self._waiting)
        self._clock.sums |= {"sampled_tokens": sampled_tokens, "decode_steps": decode_steps, **(sums or {})}
        self._clock.gauges |= {
            **(gauges or {}),
            "running_sequences": self._running,
            "running_tokens": running_tokens,
            "version": version,
        }
        if not machines or self._since_s < self._machines_due_s:
            return self._clock.report(slot_intervals)
        self._machines_due_s = self._since_s + MACHINES_EVERY_S
        return self._clock.report(slot_intervals, (self._engine.report(), self._update.report()))

    def _advance(self) -> None:
        """Add the time since the last change to the sums. Call it before a change: the time counts under the
        old state."""
        now_s = self._now()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        is_busy = self._clock.state is State.BUSY
        self._clock.sums["running_sequence_s"] += self._running * elapsed_s if is_busy else 0.0
        self._clock.sums["idle_s"] += 0.0 if is_busy else elapsed_s
        if self._num_evals:
            self._clock.sums["eval_s"] += elapsed_s
        if self._waiting:
            self._clock.sums["waiting_trajectory_s"] += len(self._waiting) * elapsed_s

    def _settle(self) -> None:
        before, drains = self._clock.state, self._interrupt == "drain"
        if self._is_paused:
            self._clock.enter(State.PAUSED, "trainer")
        elif self._interrupt is not None and not (drains and (self._running or self._waiting)):
            self._clock.enter(State.LOADING, "weights")
        elif self._running:
            self._clock.enter(State.BUSY, "running sequences before a load" if drains else "")
        elif self._waiting:
            # what the longest-waiting trajectory waits for, and how many others wait
            trajectory, (for_what, since_s) = next(iter(self._waiting.items()))
            others = f" and {len(self._waiting) - 1} more" if len(self._waiting) > 1 else ""
            waited_s = self._now() - since_s
            self._clock.enter(State.WAITING, f"{for_what} of {trajectory} ({waited_s:.0f} s so far){others}")
        elif self._num_parts or self._num_evals:
            self._clock.enter(State.BLOCKED, "rewards, environments or versions")
        else:
            self._clock.enter(State.STARVED)
        state, why = self._clock.state, self._clock.waiting_for
        is_engines = state in (State.BUSY, State.LOADING, State.PAUSED)
        self._engine.enter(state if is_engines else State.STARVED, why)
        if self._interrupt is not None:
            is_loading = state is State.LOADING
            self._update.enter(
                State.LOADING if is_loading else State.BLOCKED, "" if is_loading else "running sequences"
            )
        if self._clock.state is not before:
            self._on_change()


class SlotIntervals:
    """Records when an engine's sequences are in which slot. Slots are numbered from 0; a sequence gets the
    lowest free one."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._free: list[int] = []
        self._begun: dict[str, tuple[int, float]] = {}
        self._ended: deque[SlotInterval] = deque(maxlen=MAX_INTERVALS)

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
        self._ended.append(SlotInterval(slot, sequence, start_s, self._now()))

    def take(self) -> tuple[SlotInterval, ...]:
        """The intervals that have ended since the last call, in the order in which they ended."""
        taken = tuple(self._ended)
        self._ended.clear()
        return taken


class MeteredRewards:
    """Wraps `score` with a state clock: busy while at least one reward is being computed. Passes errors
    through."""

    def __init__(
        self, name: str, score: Callable[[Any, str], Awaitable[float]], now: Callable[[], float]
    ) -> None:
        self._score = score
        self._pending = 0
        self._clock = StateClock(name, "reward", "responses", now)

    async def score(self, item: Any, response_text: str) -> float:
        self._change(+1)
        try:
            return await self._score(item, response_text)
        finally:
            self._clock.sums["rewards"] += 1
            self._change(-1)

    def report(self) -> ExecutorReport:
        return self._clock.report()

    def _change(self, change: int) -> None:
        self._pending += change
        self._clock.gauges["pending_rewards"] = self._pending
        self._clock.enter(State.BUSY if self._pending else State.STARVED)


class CallMeter:
    """How the trainer, a scorer or a machine spends its time. During a call it is in that call's state;
    between calls it is starved and waits for `starved_for`. Of several calls at once, the one that began last
    counts. Thread-safe: calls and reports may come from several threads."""

    def __init__(self, name: str, role: str, starved_for: str, now: Callable[[], float]) -> None:
        self._clock = StateClock(name, role, starved_for, now)
        self._calls: list[tuple[State, str]] = []
        self._lock = threading.Lock()

    @contextmanager
    def doing(self, state: State, waiting_for: str = "") -> Iterator[None]:
        call = state, waiting_for
        with self._lock:
            self._calls.append(call)
            self._clock.enter(*call)
        try:
            yield
        finally:
            with self._lock:
                self._calls.remove(call)
                self._clock.enter(*(self._calls[-1] if self._calls else (State.STARVED, "")))

    def add(self, *, gauges: Mapping[str, float] | None = None, **sums: float) -> None:
        """Add to the sums of these names, and set gauges."""
        with self._lock:
            for name, amount in sums.items():
                self._clock.sums[name] += amount
            self._clock.gauges |= gauges or {}

    def report(self) -> ExecutorReport:
        with self._lock:
            return self._clock.report()


class TrainerMeter(CallMeter):
    """How a trainer's process spends its time. Its report has those of the machines beside it:
    `param_update`, and `logp` and `ref_logp` if they are among the `columns` that the process computes."""

    def __init__(self, name: str, process: str, columns: Iterable[str], now: Callable[[], float]) -> None:
        super().__init__(name, "trainer", "groups", now)
        self.update = CallMeter(f"{PARAM_UPDATE}-{process}", PARAM_UPDATE, "a version", now)
        machines = {column: COLUMN_MACHINES[column] for column in columns if column in COLUMN_MACHINES}
        self._columns = {
            column: CallMeter(machine, machine, "a train step", now) for column, machine in machines.items()
        }

    @contextmanager
    def scoring(self, column: str) -> Iterator[None]:
        """A column is computed during the block."""
        machine = self._columns.get(column)
        with self.doing(State.SCORING, column), machine.doing(State.BUSY) if machine else nullcontext():
            yield

    @contextmanager
    def gathering(self) -> Iterator[None]:
        why = "weights to be gathered"
        with self.doing(State.SYNCING, why), self.update.doing(State.SYNCING, why):
            yield

    def report(self) -> ExecutorReport:
        machines = tuple(one.report() for one in (*self._columns.values(), self.update))
        return replace(super().report(), machines=machines)


class LongPoll:
    """Counts changes, and answers a poll at the next change: no earlier than `rest_s` after the last answer,
    no later than `poll_s` after the poll began. One caller at a time."""

    def __init__(self, rest_s: float = DEBOUNCE_S, poll_s: float = POLL_S) -> None:
        self.count = 0
        self._rest_s = rest_s
        self._poll_s = poll_s
        self._answered_s = float("-inf")
        self._is_urgent = False
        self._is_resting = False
        self._sleeper: asyncio.Future[None] | None = None

    def note(self, *, is_urgent: bool = False) -> None:
        """Count a change. An urgent one ends the rest at once: no further change is expected soon that could
        share the answer."""
        self.count += 1
        self._is_urgent |= is_urgent
        if is_urgent or not self._is_resting:
            self._wake()

    async def after(self, seen: int) -> int:
        """Wait for a change since `seen` or for the end of the poll, then for the end of the rest. Returns
        the count."""
        loop = asyncio.get_running_loop()
        if self.count == seen:
            await self._sleep(self._poll_s, is_rest=False)
        rest_s = self._answered_s + self._rest_s - loop.time()
        if rest_s > 0 and not self._is_urgent:
            await self._sleep(rest_s, is_rest=True)
        self._is_urgent, self._answered_s = False, loop.time()
        return self.count

    async def _sleep(self, at_most_s: float, *, is_rest: bool) -> None:
        """Sleep until a change is noted, for at most `at_most_s` seconds. Only an urgent change ends a
        rest."""
        loop = asyncio.get_running_loop()
        self._is_resting, self._sleeper = is_rest, loop.create_future()
        timer = loop.call_later(at_most_s, self._wake)
        try:
            await self._sleeper
        finally:
            timer.cancel()

    def _wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
