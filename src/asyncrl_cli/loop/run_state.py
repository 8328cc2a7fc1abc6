"""The state of one run, which the parts of the loop share. Only the event loop's thread touches it.

    progress    steps, phase and checkpoints, and what observers hear of them
    executors   trainer, workers and scorers: their reports, and which of them have no process
    failure     whether the run ends before its last step, and for what failure

and the state machines, which do not wait: groups (with admission and the ledger), sync, evaluator. Whoever
needs one of them gets only that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl_cli.base.errors import AsyncrlError, ExecutorLost, first_error
from asyncrl_cli.contracts.events import Observer
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.ports import (
    CheckpointWriter,
    DataStore,
    Feed,
    Json,
    RolloutWorker,
    Scorer,
    Trainer,
)
from asyncrl_cli.contracts.prompt_group import DataKey
from asyncrl_cli.loop.admission import Admission
from asyncrl_cli.loop.changes import Changes
from asyncrl_cli.loop.evals import Evaluator
from asyncrl_cli.loop.executors import Executors
from asyncrl_cli.loop.fleet import WorkerSlots
from asyncrl_cli.loop.groups import Groups
from asyncrl_cli.loop.logical_order import LogicalAdmission, LogicalSync
from asyncrl_cli.loop.progress import RunProgress
from asyncrl_cli.loop.weight_sync import WeightSync
from asyncrl_cli.profile.arithmetic import REWARD, LoopSettings

GRACE_STEPS = 3
"""A stop has at least as long as this many of the run's longest train steps: one to finish, and the rest for
the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFrom:
    """What a checkpoint holds for the loop: its state, and the keys of its data in the order that
    `group_states.restore` expects. `continues`: whether the engine can continue responses that had not ended;
    else they start again."""

    loop_state: Json
    payloads: Sequence[tuple[DataKey, ...]]
    continues: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ports that a run is wired to. `eval_sets`: items by set name; "" is the held-out split. `lent`: the
    workers on the trainer's devices, which are asleep. `data`: None if there is none to be cleared
    (tests)."""

    feed: Feed
    trainer: Trainer
    workers: Sequence[RolloutWorker]
    lent: Collection[str] = ()
    scorers: Sequence[Scorer] = ()
    eval_sets: Mapping[str, Sequence[Item]] = field(default_factory=dict)
    observers: Sequence[Observer] = ()
    checkpoints: CheckpointWriter | None = None
    data: DataStore | None = None
    resume_from: ResumeFrom | None = None


class RunFailure:
    """A stop, by the user or for an `error`. Admission closes; the trainer finishes its step and
    checkpoints."""

    def __init__(self, admission: Admission, changes: Changes, progress: RunProgress) -> None:
        self.stopping = False
        self.error: AsyncrlError | None = None
        """The first failure. None if the user has asked for the stop."""
        self._admission = admission
        self._changes = changes
        self._progress = progress

    def stop(self, error: AsyncrlError | None = None) -> None:
        if error is not None and self.error is None:
            self.error = error
            self._progress.event("failed", error=str(error))
        self.stopping = self._admission.stopping = True
        self._changes.notify()

    async def guarded(
        self, work: Callable[[], Awaitable[object]], on_lost: Callable[[ExecutorLost], None] | None = None
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


class RunState:
    def __init__(self, settings: LoopSettings, world: World) -> None:
        """Call inside the running event loop: its clock is the run's."""
        self.settings = settings
        self.now_s = asyncio.get_running_loop().time
        self.changes = Changes()
        slots = [
            WorkerSlots(
                name=worker.name,
                slots=worker.slots,
                is_lent=(is_lent := worker.name in world.lent),
                version=-1,
                loading=True,
                down=is_lent,
                away=is_lent,
            )
            for worker in world.workers
        ]
        scorers = [scorer.name for scorer in world.scorers]
        self.admission = Admission(settings, slots, scorers)
        self.sync = WeightSync(slots)
        if settings.profile.run.deterministic:
            self.admission = admission = LogicalAdmission(settings, slots)
            self.sync = LogicalSync(slots, admission, settings.schedule.max_staleness)
        self.progress = RunProgress(self.admission, world.observers)
        self.executors = Executors(world.trainer, world.workers, world.scorers, self.changes, self.progress)
        self.failure = RunFailure(self.admission, self.changes, self.progress)
        self.groups = Groups(settings, self.admission, world.feed, self.progress.event, world.data)
        judge = next((scorer for scorer in world.scorers if scorer.name == REWARD), None)
        self.evaluator = Evaluator(
            world.eval_sets, settings.profile, self.changes, self.progress.event, judge, self.groups.data
        )

    @property
    def version(self) -> int:
        return self.admission.version

    @property
    def grace_s(self) -> float:
        """Seconds that a stop may take, from when it is asked for."""
        return max(self.settings.profile.run.stop_grace_s, GRACE_STEPS * self.progress.longest_step_s)
