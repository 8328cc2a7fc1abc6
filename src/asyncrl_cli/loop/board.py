"""The state that all parts of the loop share: settings, ports, state machines and observers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, ExecutorLost, first_error
from asyncrl_cli.contracts.attempts import AttemptKey
from asyncrl_cli.contracts.events import Event, Observer, Snapshot, StepRecord
from asyncrl_cli.contracts.ports import CheckpointWriter, Feed, RolloutWorker, Scorer, Trainer
from asyncrl_cli.loop.admission import Admission
from asyncrl_cli.loop.changes import Changes
from asyncrl_cli.loop.evals import Evaluator
from asyncrl_cli.loop.fleet import WorkerSlots
from asyncrl_cli.loop.groups import Groups
from asyncrl_cli.loop.reports import ReportBook
from asyncrl_cli.loop.weight_sync import WeightSync
from asyncrl_cli.measure.states import ExecutorReport, State, StateClock
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.sharing import CRITIC, REWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFrom:
    """What a checkpoint holds for the loop: its state, and the payload handles in the order that
    `Groups.restore` expects. `continues`: whether the engine can continue responses that had not ended; else
    they start again."""

    loop_state: Mapping[str, Any]
    payloads: Sequence[Any]
    continues: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ports that a run is wired to. `eval_sets`: items by set name; "" is the held-out split."""

    feed: Feed
    trainer: Trainer
    workers: Sequence[RolloutWorker]
    scorers: Sequence[Scorer] = ()
    eval_sets: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    observers: Sequence[Observer] = ()
    checkpoints: CheckpointWriter | None = None
    resume_from: ResumeFrom | None = None


class Board:
    """The shared state of one run. Only the event loop's thread touches it."""

    def __init__(self, settings: LoopSettings, world: World) -> None:
        """Call inside the running event loop: its clock is the run's."""
        self.settings, self.profile, self.schedule = settings, settings.profile, settings.schedule
        self.trainer, self.workers, self.observers = world.trainer, world.workers, world.observers
        self.scorers, self.checkpoints = world.scorers, world.checkpoints
        by_name = {scorer.name: scorer for scorer in world.scorers}
        self.critic = by_name.get(CRITIC)
        slots = [
            WorkerSlots(name=worker.name, slots=worker.slots, version=-1, loading=True)
            for worker in world.workers
        ]
        self.changes = Changes()
        self.reports = ReportBook()
        self.admission = Admission(settings, slots)
        self.admission.scorers = tuple(scorer.name for scorer in world.scorers)
        self.ledger = self.admission.ledger
        self.groups = Groups(settings, self.admission, world.feed, self.event)
        self.sync = WeightSync(slots)
        self.evaluator = Evaluator(
            world.eval_sets, settings.profile, self.changes, self.event, by_name.get(REWARD)
        )
        self.feed_clock = StateClock("feed", "feed", "", self.now_s)
        self.step = 0
        self.time_before_s = -self.now_s()
        self.phase = "starting"
        self.checkpoint = ""
        self.last_cut: int | None = None
        """The step of the last checkpoint that was begun, or of the one that the run was resumed from."""
        self.stopping = False
        self.failure: AsyncrlError | None = None
        self.restarts = 0
        self.restarting: dict[str, str] = {}
        """Workers and scorers without a process, by name, and the number of the restart under way: "1 of
        3"."""
        self.away: dict[str, str] = {}
        """Workers that the run continues without, by name, and why."""
        self.trainer_call: tuple[State, str] | None = None
        """What the loop has asked the trainer to do, as a state and its reason; None while it asks for
        nothing."""
        self.is_lent = False
        """Colocate: the trainer has the resources, or they are being handed over."""

    @property
    def version(self) -> int:
        return self.admission.version

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def event(self, name: str, *, key: AttemptKey | None = None, **fields: Any) -> None:
        """Notify the observers. `version` and `step` default to the run's."""
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

    def scorer_reported(self, name: str, report: ExecutorReport) -> None:
        """Record a scorer's report, with the number of groups that wait for it."""
        waiting = {"waiting_groups": float(len(self.groups.unscored(name)))}
        self.reports.add(replace(report, gauges=report.gauges | waiting), self.now_s(), name)

    def warn(self, message: str) -> None:
        self.event("warning", message=message)

    def tick(self, snapshot: Snapshot) -> None:
        for observer in self.observers:
            observer.tick(snapshot)

    def record(self, record: StepRecord) -> None:
        for observer in self.observers:
            observer.step(record)

    async def guarded(
        self, work: Callable[[], Awaitable[None]], on_lost: Callable[[ExecutorLost], None] | None = None
    ) -> None:
        """Run a part of the loop. An AsyncrlError stops the run in good order, unless `on_lost` handles it as
        an executor's loss.

        `work` is a function that is called only here, so a task that is cancelled before it begins leaves no
        unawaited coroutine.
        """
        try:
            await work()
        except (AsyncrlError, ExceptionGroup) as error:
            found = first_error(error, AsyncrlError)
            if found is None:
                raise
            if on_lost is not None and isinstance(found, ExecutorLost):
                on_lost(found)
            else:
                self.stop(found)

    def stop(self, failure: AsyncrlError | None = None) -> None:
        """Close admission and let the trainer finish its step. The first `failure` given becomes the
        run's."""
        if failure is not None and self.failure is None:
            self.failure = failure
            self.event("failed", error=str(failure))
        self.stopping = True
        self.admission.stopping = True
        self.changes.notify()

    def end(self, phase: str, error: BaseException | None = None) -> None:
        """The run is over: every executor counts as done, or as failed if it raised `error`."""
        self.phase = phase
        if error is not None and self.failure is None:
            self.event("failed", error=str(error))
        self.reports.end(error.executor if isinstance(error, ExecutorFailed) else "")

    @contextmanager
    def calling_trainer(self, state: State, why: str = "") -> Iterator[None]:
        """While the block runs, the trainer counts as being in `state`, for the reason `why`."""
        self.trainer_call = state, why
        try:
            yield
        finally:
            self.trainer_call = None
