"""The tasks that wait for an executor whose process can be replaced, and its restarts.

    failed ──> down: tasks that wait for it are cancelled, what it had is taken back ──> restart ──> its tasks
    begin again

Any number of calls that fail at once count as one failure: the first one makes the executor `down`, and while
it is down, further failures are ignored. If no restart is left, the failure stops the run in good order
(`Board.stop`), unless the run can go on with the other workers: then the executor is away. If it is away for
lack of room, the loop asks for it every `LOOK_EVERY_S` seconds.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial

from asyncrl_cli.base.errors import ExecutorFailed, ExecutorLost, NoRoom
from asyncrl_cli.contracts.ports import RolloutWorker, Scorer
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.changes import Change

RESTARTS_KEY = "rollout.max_restarts"
LOOK_EVERY_S = 10.0
"""How often the loop looks for room for an executor that is away."""


class Restarts:
    """`rollout.max_restarts`: the restarts of one executor, successful or not."""

    def __init__(self, allowed: int) -> None:
        self.allowed = self.left = allowed

    def use(self) -> str:
        """Use one. Returns its number, such as "1 of 3"."""
        self.left -= 1
        return f"{self.allowed - self.left} of {self.allowed}"


class RestartableTasks(ABC):
    """The tasks of one executor. A new process is started once the tasks of the old one have ended."""

    def __init__(self, board: Board, executor: RolloutWorker | Scorer, tasks: asyncio.TaskGroup) -> None:
        self.is_down = False
        self._board = board
        self._executor = executor
        self._tasks = tasks
        self._running: dict[asyncio.Task[None], None] = {}
        self._restarting: asyncio.Task[None] | None = None
        self._restarts = Restarts(board.profile.rollout.max_restarts)

    @abstractmethod
    def begin(self) -> None:
        """Start the tasks that follow the executor's process for as long as it lives."""

    def _set_down(self, is_down: bool) -> None:
        """The process is gone or, if false, a new one has taken its place."""
        self.is_down = is_down

    def _can_be_away(self) -> bool:
        """Whether the run may continue without the executor."""
        return False

    @abstractmethod
    def _lose(self) -> None:
        """Take back the work of the lost process. Its tasks may still run."""

    @abstractmethod
    def _give_back(self) -> None:
        """Take back the work of its tasks, which have ended by now."""

    def spawn(self, work: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
        """Start a task that waits for the executor; the loss of its process cancels it."""
        task = self._tasks.create_task(self._board.guarded(work, self._lost), name=name)
        self._running[task] = None
        task.add_done_callback(self._running.pop)
        return task

    def cancel(self) -> None:
        for task in [*self._running, *([self._restarting] if self._restarting else [])]:
            task.cancel()

    def _lost(self, error: ExecutorLost) -> None:
        """A call failed. Restart the executor if a restart is left; else let it be away, or stop the run with
        that error."""
        board, name = self._board, self._executor.name
        if self.is_down:
            return
        if not self._restarts.left and not self._can_be_away():
            if not self._restarts.allowed and not board.stopping:
                board.warn(f"{name} is not restarted: {RESTARTS_KEY} = 0")
            board.stop(error)
            return
        self._set_down(True)
        if board.stopping:
            board.warn(f"{error}; the run is stopping, so it is not restarted")
            return
        board.groups.tokens_discarded += board.reports.lost(name, board.now_s())
        self._lose()
        if self._restarts.left:
            self._use_restart(error)
        else:
            self._go_away(error, f"{RESTARTS_KEY} = {self._restarts.allowed} are used up")
        ending = [task for task in self._running if task is not asyncio.current_task()]
        for task in ending:
            task.cancel()
        restart = board.guarded(partial(self._restart, ending))
        self._restarting = self._tasks.create_task(restart, name=f"restart of {name}")

    def _use_restart(self, error: ExecutorFailed) -> None:
        board, name = self._board, self._executor.name
        board.restarts += 1
        board.restarting[name] = number = self._restarts.use()
        board.event("lost", worker=name, error=str(error), restarts_left=self._restarts.left)
        number = number.replace("of ", f"of {RESTARTS_KEY} = ")
        board.warn(f"{str(error).rstrip('.')}; restarting it ({number})")

    def _go_away(self, error: ExecutorFailed, why: str) -> None:
        board, name = self._board, self._executor.name
        board.restarting.pop(name, None)
        if name not in board.away:
            board.event("away", worker=name, error=str(error), why=why)
            board.warn(f"{str(error).rstrip('.')}; the run continues without it: {why}")
        board.away[name] = why
        board.changes.notify()

    async def _restart(self, ending: list[asyncio.Task[None]]) -> None:
        """Replace a lost process. Waits for its cancelled tasks, which end at once, then for a new start,
        bounded by the port."""
        board, name = self._board, self._executor.name
        if ending:
            await asyncio.wait(ending)
        self._give_back()
        began_s = board.now_s()
        if name in board.away or not await self._replace():
            return
        self._set_down(False)
        board.restarting.pop(name, None)
        board.away.pop(name, None)
        board.reports.returned(name, board.now_s())
        board.event(
            "restarted", worker=name, restart_s=board.now_s() - began_s, restarts_left=self._restarts.left
        )
        self.begin()
        board.changes.notify()

    async def _replace(self) -> bool:
        """Start a new process. A failed start is retried while restarts are left; one that found no room, for
        as long as the run can do without the executor. Returns false at a stop, or if the executor stays
        away."""
        board, who = self._board, f"{self._executor.name} (restart)"
        while True:
            lender = "the trainer to give the resources back"
            await board.changes.until(lambda: not board.is_lent or board.stopping, who, lender, (Change.RUN,))
            if board.stopping:
                return False
            try:
                with board.changes.waiting(who, "a fresh process"):
                    await self._executor.restart()
                return True
            except ExecutorFailed as error:
                if isinstance(error, NoRoom) and self._can_be_away():
                    self._go_away(error, "no room")
                    await asyncio.sleep(LOOK_EVERY_S)
                elif self._restarts.left:
                    self._use_restart(error)
                elif self._can_be_away():
                    self._go_away(error, "no restart is left")
                    return False
                else:
                    raise
