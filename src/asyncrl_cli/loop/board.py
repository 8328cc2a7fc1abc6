"""What the parts of the loop share: settings, state machines, and who watches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl_cli.errors import AsyncrlError, ExecutorFailed
from asyncrl_cli.loop import causes
from asyncrl_cli.loop.admission import Admission
from asyncrl_cli.loop.attempts import AttemptKey
from asyncrl_cli.loop.changes import Changes
from asyncrl_cli.loop.evals import Evaluator
from asyncrl_cli.loop.groups import Groups
from asyncrl_cli.loop.ledger import Ledger
from asyncrl_cli.loop.ports import RolloutWorker, Trainer
from asyncrl_cli.loop.reports import ReportBook
from asyncrl_cli.loop.settings import LoopSettings
from asyncrl_cli.loop.states import ExecutorReport, State, StateClock
from asyncrl_cli.loop.sync import WeightSync
from asyncrl_cli.loop.watching import ENDED, EvalSummary, Event, Observer, Snapshot
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import Profile


@dataclass(slots=True, kw_only=True)
class Board:
    """One per run. Only the event loop's thread touches it."""

    settings: LoopSettings
    trainer: Trainer
    workers: Sequence[RolloutWorker]
    groups: Groups
    sync: WeightSync
    evaluator: Evaluator
    feed_clock: StateClock
    observers: Sequence[Observer] = ()
    changes: Changes = field(default_factory=Changes)
    reports: ReportBook = field(default_factory=ReportBook)
    evals_ended: list[EvalSummary] = field(default_factory=list)
    step: int = 0
    time_before_s: float = 0.0
    phase: str = "starting"
    checkpoint: str = ""
    last_version: int | None = None
    stopping: bool = False
    restarts: int = 0
    restarting: dict[str, str] = field(default_factory=dict)
    """Workers without a process, and which of their restarts it is: "1 of 3"."""
    failure: AsyncrlError | None = None
    trainer_call: tuple[State, str] | None = None
    """What the loop has asked the trainer to do, as a state and its reason; None while it asks for nothing."""

    @property
    def profile(self) -> Profile:
        return self.settings.profile

    @property
    def schedule(self) -> Schedule:
        return self.settings.schedule

    @property
    def admission(self) -> Admission:
        return self.groups.admission

    @property
    def ledger(self) -> Ledger:
        return self.groups.ledger

    @property
    def version(self) -> int:
        return self.admission.version

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def event(self, name: str, *, key: AttemptKey | None = None, **fields: Any) -> None:
        """Tell the observers; `version` and `step` default to the run's."""
        event = Event(
            time_s=self.time_before_s + self.now_s(),
            name=name,
            key=key,
            version=fields.pop("version", self.version),
            step=fields.pop("step", self.step),
            fields=fields,
        )
        for observer in self.observers:
            observer.event(event)

    def stop(self, failure: AsyncrlError | None = None) -> None:
        """Close admission and let the trainer finish its step; the first failure is the run's."""
        if failure is not None and self.failure is None:
            self.failure = failure
            self.event("failed", error=str(failure))
        self.stopping = True
        self.admission.stopping = True
        self.changes.notify()

    def end(self, phase: str, error: BaseException | None = None) -> None:
        """The run is over: every executor is done, or failed if the error is its own."""
        self.phase = phase
        if error is not None and self.failure is None:
            self.event("failed", error=str(error))
        self.reports.end(error.executor if isinstance(error, ExecutorFailed) else "")

    @contextmanager
    def calling_trainer(self, state: State, why: str = "") -> Iterator[None]:
        """The trainer does what puts it into `state` while the block runs."""
        self.trainer_call = state, why
        try:
            yield
        finally:
            self.trainer_call = None

    def snapshot(self) -> Snapshot:
        """The run now. Executors report late, or not at all beside a long step: what the loop itself knows of their states, and of
        what they wait for, is taken from here. Times in states stay their own."""
        admission = self.admission
        running_eval = self.evaluator.running
        closed = causes.closed_by(self)
        return Snapshot(
            phase="stopping" if self.stopping and self.phase not in ENDED else self.phase,
            time_s=self.time_before_s + self.now_s(),
            step=self.step,
            version=self.version,
            groups_trained=admission.trained_groups,
            admission=closed,
            admission_cause=causes.behind_closed(self),
            window_taken=admission.taken_in_window,
            window_groups=admission.window_groups,
            window_budget=admission.budget,
            ledger=self.ledger.totals(),
            reports={name: self._as_known(report, closed) for name, report in self.reports.latest.items()},
            worker_versions=dict(self.sync.held),
            eval_running=str(running_eval) if running_eval else "",
            checkpoint=self.checkpoint,
            restarting={} if self.stopping or self.phase in ENDED else dict(self.restarting),
        )

    def _as_known(self, report: ExecutorReport, closed: str) -> ExecutorReport:
        if self.phase in ENDED:
            return report
        if report.role == "trainer":
            waits = [what for who, what in self.changes.named().items() if who.startswith("trainer")]
            state, why = self.trainer_call or (State.STARVED, waits[0] if waits else "")
            return replace(report, state=state, waiting_for=why)
        if report.role == "feed":
            wait = causes.admission_wait(self)
            return replace(report, state=State.BLOCKED if wait else State.BUSY, waiting_for=wait and f"admission: {wait}")
        if report.role == "rollout" and report.state is State.STARVED and closed:
            return replace(report, waiting_for=f"admission: {closed}")
        return report

    def observer_states(self) -> list[dict[str, Any]]:
        return [observer.state() for observer in self.observers]

    def restore_observers(self, states: Sequence[Mapping[str, Any]]) -> None:
        for observer, state in zip(self.observers, states, strict=True):
            observer.restore(state)
