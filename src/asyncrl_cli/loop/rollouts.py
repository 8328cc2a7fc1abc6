"""The rollout side of the loop, as the training side sees it: admitting groups, handing over resources, and
publishing new weights to the workers. The workers' own tasks are in worker_tasks.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from asyncrl_cli.base.errors import AsyncrlError, StallError
from asyncrl_cli.contracts.attempts import AttemptKey
from asyncrl_cli.loop import causes
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.worker_tasks import WorkerTasks
from asyncrl_cli.measure.states import State, StepTimes


class Rollouts:
    def __init__(self, board: Board, tasks: asyncio.TaskGroup) -> None:
        """Start admitting groups, and start the tasks of every worker."""
        self._board = board
        self._workers = {worker.name: WorkerTasks(board, worker, tasks) for worker in board.workers}
        self._admitting = tasks.create_task(board.guarded(self._admit), name="admit")
        for worker in self._workers.values():
            worker.begin()

    def cancel(self) -> None:
        self._admitting.cancel()
        for worker in self._workers.values():
            worker.cancel()

    def abort(self, aborts: list[tuple[str, AttemptKey]]) -> None:
        for name, key in aborts:
            tasks = self._workers[name]
            if not tasks.slots.down:
                tasks.spawn(partial(tasks.worker.abort, key), f"abort of {key}")

    async def hand_over(self, *, to_trainer: bool) -> None:
        """Colocate: hand the resources to the trainer, or back to the workers. Skips workers that are down;
        they restart later.

        A stop ends the wait: no later step needs the resources, and a worker that hangs must not delay the
        stop.
        """
        board = self._board
        board.is_lent = True
        calls = []
        for tasks in self._workers.values():
            if not tasks.slots.down:
                worker, what = tasks.worker, "pauses" if to_trainer else "resumes"
                calls.append(
                    tasks.spawn(worker.pause if to_trainer else worker.resume, f"{worker.name} {what}")
                )
                calls[-1].add_done_callback(lambda _: board.changes.notify())

        def missing() -> list[str]:
            return [call.get_name() for call in calls if not call.done()]

        resources = f"the resources to go to the {'trainer' if to_trainer else 'workers'}"
        await board.changes.until(
            lambda: board.stopping or not missing(),
            "trainer (hand-over)",
            lambda: f"{resources}: {', '.join(missing())}",
        )
        board.is_lent = to_trainer
        board.changes.notify()

    async def _admit(self) -> None:
        """Start groups while admission is open, and wait while it is closed. Freed slots, loads and publishes
        reopen it."""
        board, clock = self._board, self._board.feed_clock
        while True:
            clock.enter(State.BUSY)
            while requests := board.groups.start():
                for name, request in requests:
                    self._workers[name].worker.submit(request)
            clock.enter(State.BLOCKED, "admission")
            await board.changes.until(
                board.admission.is_open, "feed", lambda: f"admission: {causes.admission_wait(board)}"
            )


class Publishing:
    def __init__(self, board: Board, tasks: asyncio.TaskGroup, rollouts: Rollouts, times: StepTimes) -> None:
        self._board = board
        self._tasks = tasks
        self._rollouts = rollouts
        self._times = times
        self._publishing: asyncio.Task[None] | None = None

    async def first(self) -> None:
        """Publish the first version for the workers: 0 in a fresh run, the checkpoint's version in a resumed
        one."""
        board = self._board
        begins_window = board.admission.taken_in_window == 0
        self._publish_beside(await self._gather(board.version) if begins_window else None)
        await self.until_held_by_all()

    async def end_window(self) -> None:
        """Gather the weights and raise the version. Workers receive it during the next step."""
        board = self._board
        with self._times.spending("gather"):
            await self._room_to_publish()
        board.sync.reserve()
        gather_s = await self._gather(board.version + 1)
        self._times.add("gather", gather_s)
        try:
            self._rollouts.abort(board.groups.publish())
        except AsyncrlError as error:
            board.stop(error)
        # after a stop nothing starts, and a hung worker would delay it
        if board.profile.placement.colocate and not board.stopping:
            await self._rollouts.hand_over(to_trainer=False)
        if board.sync.room:  # no room after a stop: workers keep their version, and a resume publishes first
            self._publish_beside(gather_s)
        board.changes.notify()
        with self._times.waiting("gather"):
            await self.until_held_by_all()

    async def finish(self) -> None:
        """Wait until every worker holds the last version and its eval has ended. A run resumed at its last
        step does this, too."""
        board = self._board
        board.phase = "evaluating"
        evaluator = board.evaluator

        def scored() -> bool:
            return not evaluator.tries or evaluator.last_ended == board.version

        def ended() -> bool:
            return self._all_hold_newest() and scored()

        def missing() -> str:
            scoring = f"eval of {evaluator.running}" if evaluator.running else "its eval has not begun"
            parts = [*causes.lags(board), *([] if scored() else [scoring])]
            return f"version {board.version} to be loaded and scored: {', '.join(parts)}"

        still_s = board.settings.sync_timeout_s + (2 * board.profile.eval.timeout_s if evaluator.tries else 0)
        with self._times.waiting("gather"):
            await self._until(ended, "trainer (last version)", missing, still_s)

    async def _gather(self, version: int) -> float:
        """Returns the seconds of the gather. Its report always counts: it has the spans since the last
        one."""
        with self._board.calling_trainer(State.SYNCING, f"version {version} to be gathered"):
            gather_s, report = await self._board.trainer.gather(version)
        self._board.reports.add(report, self._board.now_s())
        return gather_s

    async def _room_to_publish(self) -> None:
        """Keep at most two published versions: wait for the last publish to end, and for loads while workers
        have begun two."""
        board, who = self._board, "trainer (gather)"
        if self._publishing is not None:
            with board.changes.waiting(who, f"version {board.version} to be published"):
                await self._publishing

        still_s, loaded, missing = (
            board.settings.sync_timeout_s,
            (Change.LOADED,),
            partial(causes.older_loads, board),
        )
        try:
            await board.changes.until(
                lambda: board.sync.room or board.stopping, who, missing, loaded, still_s
            )
        except StallError as error:
            board.stop(error)

    async def until_held_by_all(self) -> None:
        """weights.mode = "sync": wait until every worker has loaded the version that was just published."""
        board = self._board
        if board.profile.weights.mode == "async":
            return

        def missing() -> str:
            return f"every worker to load version {board.version}: {', '.join(causes.lags(board))}"

        await self._until(self._all_hold_newest, "trainer (sync)", missing, board.settings.sync_timeout_s)

    def _all_hold_newest(self) -> bool:
        return self._board.admission.fleet.are_current(self._board.version)

    async def _until(
        self, condition: Callable[[], bool], who: str, what: Callable[[], str], still_s: float
    ) -> None:
        """Wait for a condition on all workers, or for a stop. Stops the run with a StallError if nothing has
        moved for `still_s` while all of them were up; restarts have their own limit."""
        board, fleet = self._board, self._board.admission.fleet

        def ended() -> bool:
            return board.stopping or condition()

        while not ended():
            await board.changes.until(
                lambda: ended() or fleet.is_whole(), who, lambda: causes.restarts(board)
            )
            try:
                await board.changes.until(lambda: ended() or not fleet.is_whole(), who, what, still_s=still_s)
            except StallError as error:
                board.stop(error)

    def _publish_beside(self, gather_s: float | None) -> None:
        self._publishing = self._tasks.create_task(
            self._publish(self._board.version, gather_s), name="publish"
        )

    async def _publish(self, version: int, gather_s: float | None) -> None:
        board = self._board
        published = await board.trainer.publish(version)
        board.sync.offer(published, gather_s)
        board.event(
            "published", version=version, num_bytes=published.num_bytes, publish_s=published.publish_s
        )
        board.changes.notify(Change.PUBLISHED)
