"""The tasks that wait for an executor whose process can be replaced, and its restarts.

    failed ──> down: tasks that wait for it are cancelled, what it had is taken back
           ──> (colocate: the trainer gives the resources back) ──> restart ──> its tasks begin again

Any number of calls that fail at once count as one failure: the first one makes the executor `down`, and while
it is down, further failures are ignored. If no restart is left, the failure stops the run in good order
(`RunFailure.stop`), unless the run can go on with the other workers: then the executor is away. If it is away
for lack of room, the loop asks for it every `LOOK_EVERY_S` seconds.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial

from asyncrl_cli.base.errors import ExecutorFailed, ExecutorLost, NoRoom
from asyncrl_cli.contracts.ports import RolloutWorker, Scorer
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.executors import RESTARTS_KEY, Restarts
from asyncrl_cli.loop.run_state import RunState

LOOK_EVERY_S = 10.0
"""How often the loop looks for room for an executor that is away."""


class ExecutorTasks(ABC):
    """The tasks of one executor. A new process is started once the tasks of the old one have ended."""

    def __init__(self, run: RunState, executor: RolloutWorker | Scorer, tasks: asyncio.TaskGroup) -> None:
        self.is_down = False
        self.restarts = Restarts(run.settings.profile.rollout.max_restarts)
        self._run = run
        self._executor = executor
        self._tasks = tasks
        self._running: dict[asyncio.Task[None], None] = {}
        self._restarting: asyncio.Task[None] | None = None

    @abstractmethod
    def begin(self) -> None:
        """Start the tasks that follow the executor's process for as long as it lives."""

    @abstractmethod
    def take_back(self) -> None:
        """Take back the work of the lost process. Its tasks may still run."""

    async def tasks_ended(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for the tasks of the lost process, which are cancelled and end at once, and take back their
        work."""
        if tasks:
            await asyncio.wait(tasks)

    def set_down(self, is_down: bool) -> None:
        """The process is gone or, if false, a new one has taken its place."""
        self.is_down = is_down

    def can_be_away(self) -> bool:
        """Whether the run may continue without the executor."""
        return False

    def spawn(self, work: Callable[[], Awaitable[object]], name: str) -> asyncio.Task[None]:
        """Start a task that waits for the executor; the loss of its process cancels it."""
        task = self._tasks.create_task(self._run.failure.guarded(work, self.lost), name=name)
        self._running[task] = None
        task.add_done_callback(self._running.pop)
        return task

    def cancel(self) -> None:
        for task in [*self._running, *([self._restarting] if self._restarting else [])]:
            task.cancel()

    def lost(self, error: ExecutorLost) -> None:
        """A call failed: restart the executor, let it be away, or stop the run with that error."""
        run, name, failure = self._run, self._executor.name, self._run.failure
        if self.is_down:
            return
        if not self.restarts.left and not self.can_be_away():
            if not self.restarts.allowed and not failure.stopping:
                run.progress.warn(f"{name} is not restarted: {RESTARTS_KEY} = 0")
            failure.stop(error)
            return
        self.set_down(True)
        if failure.stopping:
            run.progress.warn(f"{error}; the run is stopping, so it is not restarted")
            return
        run.groups.tokens_discarded += run.executors.reports.lost(name, run.now_s())
        self.take_back()
        if self.restarts.left:
            run.executors.restart_begins(name, error, self.restarts)
        else:
            self.go_away(error, f"{RESTARTS_KEY} = {self.restarts.allowed} are used up")
        ending = [task for task in self._running if task is not asyncio.current_task()]
        for task in ending:
            task.cancel()
        restart = failure.guarded(partial(self._restart, ending))
        self._restarting = self._tasks.create_task(restart, name=f"restart of {name}")

    def go_away(self, error: ExecutorFailed, why: str) -> None:
        self._run.executors.goes_away(self._executor.name, error, why)

    async def _restart(self, ending: list[asyncio.Task[None]]) -> None:
        """Replace a lost process. (The port bounds a start.) A failed start is tried again while restarts are
        left; one that found no room, for as long as the run can do without the executor."""
        run, name, executors = self._run, self._executor.name, self._run.executors
        await self.tasks_ended(ending)
        began_s, who = run.now_s(), f"{name} (restart)"
        is_back = False
        if name in executors.away:  # for want of a restart: it never comes back
            return
        while not is_back:
            await run.changes.until(
                lambda: run.failure.stopping or not executors.trainer_has_resources,
                who,
                "the trainer to give the resources back",
                (Change.RUN,),
            )
            if run.failure.stopping:
                return
            try:
                with run.changes.waiting(who, "a fresh process"):
                    await self._executor.restart()
                is_back = True
            except ExecutorFailed as error:
                if isinstance(error, NoRoom) and self.can_be_away():
                    self.go_away(error, "no room")
                    await asyncio.sleep(LOOK_EVERY_S)
                elif self.restarts.left:
                    executors.restart_begins(name, error, self.restarts)
                elif self.can_be_away():
                    self.go_away(error, "no restart is left")
                    return
                else:
                    raise
        self.set_down(False)
        executors.returned(name, run.now_s(), began_s, self.restarts)
        self.begin()
        run.changes.notify()
