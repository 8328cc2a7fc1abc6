"""Where time goes: how long an executor is in each state, integrated where it runs, and the parts of a train
step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

WAITS_FOR_RESTART = "a restart"
"""What an executor without a process waits for."""
_STEP_PARTS = ("wait_data", "old_logprob", "train", "gather", "checkpoint", "eval")


class State(StrEnum):
    """An executor is in exactly one of these at any moment."""

    STARVED = "starved"
    BUSY = "busy"
    WAITING = "waiting for tools"
    """Rollout workers only: nothing runs, because all trajectories wait for their environments between
    turns."""
    BLOCKED = "blocked"
    SCORING = "scoring"
    """The trainer only: it computes columns (logprobs, values) before it trains on them. Not idle time."""
    LOADING = "loading"
    SYNCING = "syncing"
    SENDING = "sending"
    """The machine param_update only: rank 0 sends a version's buckets, or a worker receives them."""
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stay in one state, in seconds of the executor's own clock."""

    state: State
    start_s: float
    end_s: float


class SlotInterval(NamedTuple):
    """A sequence's time in a slot of an engine, in seconds of the executor's own clock. A trajectory with
    several turns has one interval per turn. Recorded if `logging.trace_sequences` is set."""

    slot: int
    sequence: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorReport:
    """An executor's report on itself. All sums are cumulative since the executor started, so a lost report
    loses nothing.

    `now_s` is the executor's clock when the report was made; the driver uses it to map spans to its own
    clock. `spans` are those that ended since the previous report, plus the current one up to `now_s`. `sums`
    are role-specific cumulative figures, e.g. `running_sequence_s`, `idle_s`, `sampled_tokens`,
    `trained_tokens`. `gauges` are momentary figures, e.g. `running_sequences`, `slots`, `version`.
    `slot_intervals` are those that ended since the previous report, if they are recorded. `machines`:
    reports of further machines in the same process (machines.py).
    """

    name: str
    role: str
    now_s: float
    state: State
    waiting_for: str
    state_s: dict[State, float]
    spans: tuple[Span, ...]
    sums: dict[str, float]
    gauges: dict[str, float]
    slot_intervals: tuple[SlotInterval, ...] = ()
    machines: tuple[ExecutorReport, ...] = ()


class StateClock:
    """Integrates one executor's time in states on the clock it is given (`loop.time` or `time.monotonic`).

    Not thread-safe: call it from one thread, or under the caller's lock.
    """

    def __init__(self, name: str, role: str, starved_for: str, now: Callable[[], float]) -> None:
        """`starved_for`: what the executor waits for while it is starved."""
        self.name = name
        self.role = role
        self.state = State.STARVED
        self.waiting_for = self._starved_for = starved_for
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.gauges: dict[str, float] = {}
        self._now = now
        self._since_s = now()
        self._state_s: defaultdict[State, float] = defaultdict(float)
        self._spans: list[Span] = []

    def enter(self, state: State, waiting_for: str = "") -> None:
        """Enter `state`. `waiting_for` says what or whom the executor waits for in it."""
        if state is not self.state:
            self._close(self._now())
            self.state = state
        self.waiting_for = waiting_for or (self._starved_for if state is State.STARVED else "")

    def report(
        self, slot_intervals: tuple[SlotInterval, ...] = (), machines: tuple[ExecutorReport, ...] = ()
    ) -> ExecutorReport:
        now_s = self._now()
        self._close(now_s)
        spans, self._spans = tuple(self._spans), []
        return ExecutorReport(
            name=self.name,
            role=self.role,
            now_s=now_s,
            state=self.state,
            waiting_for=self.waiting_for,
            state_s=dict(self._state_s),
            spans=spans,
            sums=dict(self.sums),
            gauges=dict(self.gauges),
            slot_intervals=slot_intervals,
            machines=machines,
        )

    def _close(self, now_s: float) -> None:
        if now_s > self._since_s:
            self._state_s[self.state] += now_s - self._since_s
            self._spans.append(Span(state=self.state, start_s=self._since_s, end_s=now_s))
        self._since_s = now_s


class StepTimes:
    """Divides the time of a train step into parts. `eval_s()` returns the seconds for which evals have run so
    far."""

    def __init__(self, now: Callable[[], float], eval_s: Callable[[], float]) -> None:
        self._now = now
        self._eval_s = eval_s
        self._began_s = now()
        self._spent_s: defaultdict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """Begin the first step now. Parts added before this call count towards it."""
        self._began_s = self._now()

    def add(self, part: str, seconds: float) -> None:
        self._spent_s[part] += seconds

    @contextmanager
    def spending(self, part: str) -> Iterator[None]:
        began_s = self._now()
        try:
            yield
        finally:
            self.add(part, self._now() - began_s)

    @contextmanager
    def waiting(self, part: str) -> Iterator[None]:
        """Like `spending`, but time during which an eval ran counts as the part `eval`."""
        eval_began_s, began_s = self._eval_s(), self._now()
        try:
            yield
        finally:
            eval_s = self._eval_s() - eval_began_s
            self.add("eval", eval_s)
            self.add(part, self._now() - began_s - eval_s)

    def so_far(self) -> dict[str, float]:
        """The step's parts in seconds, by name."""
        step_s = self._now() - self._began_s
        timing_s = {**dict.fromkeys(_STEP_PARTS, 0.0), **self._spent_s}
        return timing_s | {"other": step_s - sum(timing_s.values()), "step": step_s}

    def close(self) -> dict[str, float]:
        """End the step and begin the next one. Returns the ended step's parts."""
        timing_s = self.so_far()
        self._began_s = self._now()
        self._spent_s.clear()
        return timing_s
