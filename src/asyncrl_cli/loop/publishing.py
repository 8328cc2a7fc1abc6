"""New weights, from the trainer to the workers: gather, publish beside training, and the waits for the workers' loads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asyncrl_cli.errors import AsyncrlError, StallError
from asyncrl_cli.loop import causes
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.ports import GatherReport
from asyncrl_cli.loop.rollouts import Rollouts
from asyncrl_cli.loop.states import State, StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable


class Publishing:
    def __init__(self, board: Board, tasks: asyncio.TaskGroup, rollouts: Rollouts, times: StepTimes) -> None:
        self._board = board
        self._tasks = tasks
        self._rollouts = rollouts
        self._times = times
        self._publishing: asyncio.Task[None] | None = None

    async def first(self) -> None:
        """The first version for the workers: 0 in a fresh run, in a resumed one the version that it was at."""
        board = self._board
        if board.step == 0 or board.settings.ends_window(board.step):
            await self._gather(board.version)
        self._publish_beside()
        await self._held_by_all()

    async def end_window(self) -> None:
        """Gather; the version rises; workers get it beside the next step."""
        board = self._board
        if board.step == board.schedule.train_steps:
            board.last_version = board.version + 1
        with self._times.spending("gather"):
            await self._room_to_publish()
        board.sync.reserve()
        gathered = await self._gather(board.version + 1)
        self._times.add("gather", gathered.gather_s)
        board.reports.add(gathered.report, board.now_s())
        try:
            self._rollouts.abort(board.groups.publish())
        except AsyncrlError as error:
            board.stop(error)
        if board.profile.placement.colocate and not board.stopping:  # at a stop nothing starts, and a hung worker would hold it up
            await self._rollouts.hand_over(to_trainer=False)
        if board.sync.room:  # a stop does not wait for room: the workers end with what they have, a resume publishes first
            self._publish_beside()
        board.changes.notify()
        with self._times.waiting("gather"):
            await self._held_by_all()

    async def finish(self) -> None:
        """The run ends when every worker holds the last version and its eval has ended (also in a run resumed there)."""
        board = self._board
        board.phase, board.last_version = "evaluating", board.version
        evaluator = board.evaluator

        def ended() -> bool:
            scored = not evaluator.items or evaluator.last_version == board.last_version
            return self._all_hold_newest() and scored and evaluator.running is None

        def missing() -> str:
            scoring = [f"eval of {evaluator.running}"] if evaluator.running else []
            return f"version {board.last_version} to be loaded and scored: {', '.join([*causes.lags(board), *scoring])}"

        still_s = board.settings.sync_timeout_s + (2 * board.profile.eval.timeout_s if evaluator.items else 0)
        with self._times.waiting("gather"):
            await self._until(ended, "trainer (last version)", missing, still_s)

    async def _gather(self, version: int) -> GatherReport:
        with self._board.calling_trainer(State.SYNCING, f"version {version} to be gathered"):
            gathered = await self._board.trainer.gather(version)
        self._board.sync.gathered(gathered.version, gathered.gather_s)
        return gathered

    async def _room_to_publish(self) -> None:
        """At most two published versions exist: waits for the last publish, and for a load of the one before it."""
        board, who = self._board, "trainer (gather)"
        if self._publishing is not None:
            with board.changes.waiting(who, f"version {board.version} to be published"):
                await self._publishing

        def older_loads() -> str:
            return f"workers to finish older loads: {causes.older_loads(board)}"

        still_s, loaded = board.settings.sync_timeout_s, (Change.LOADED,)
        try:
            await board.changes.until(lambda: board.sync.room or board.stopping, who, older_loads, loaded, still_s)
        except StallError as error:
            board.stop(error)

    async def _held_by_all(self) -> None:
        """weights.mode = "sync": waits until every worker has loaded the version that was just published."""
        board = self._board
        if board.profile.weights.mode == "async":
            return

        def missing() -> str:
            return f"every worker to load version {board.version}: {', '.join(causes.lags(board))}"

        try:
            await self._until(self._all_hold_newest, "trainer (sync)", missing, board.settings.sync_timeout_s)
        except StallError as error:
            board.stop(error)

    def _all_hold_newest(self) -> bool:
        return self._board.admission.fleet.are_current(self._board.version)

    async def _until(self, condition: Callable[[], bool], who: str, what: Callable[[], str], still_s: float) -> None:
        """Waits for something that every worker has to do, or a stop. StallError when nothing has moved for `still_s` with all of
        them up; a restart has a limit of its own."""
        board, fleet = self._board, self._board.admission.fleet

        def ended() -> bool:
            return board.stopping or condition()

        while not ended():
            await board.changes.until(lambda: ended() or fleet.is_whole(), who, lambda: causes.restarts(board))
            await board.changes.until(lambda: ended() or not fleet.is_whole(), who, what, still_s=still_s)

    def _publish_beside(self) -> None:
        self._publishing = self._tasks.create_task(self._publish(self._board.version), name="publish")

    async def _publish(self, version: int) -> None:
        board = self._board
        published = await board.trainer.publish(version)
        board.sync.offer(published)
        board.event("published", version=version, num_bytes=published.num_bytes, publish_s=published.publish_s)
        board.changes.notify(Change.PUBLISHED)
