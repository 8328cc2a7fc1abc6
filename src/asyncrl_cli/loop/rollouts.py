"""The rollout side of the loop: admitting groups, and handing over the resources; the workers' own tasks are in worker_tasks.py."""

from __future__ import annotations

import asyncio
from functools import partial

from asyncrl_cli.loop import causes
from asyncrl_cli.loop.attempts import AttemptKey
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.states import State
from asyncrl_cli.loop.worker_tasks import WorkerTasks


class Rollouts:
    def __init__(self, board: Board, tasks: asyncio.TaskGroup) -> None:
        self._board = board
        self._workers = {worker.name: WorkerTasks(board, worker, tasks) for worker in board.workers}
        self._tasks = tasks
        self._admitting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._admitting = self._tasks.create_task(self._board.guarded(self._admit), name="admit")
        for worker in self._workers.values():
            worker.begin()

    def cancel(self) -> None:
        if self._admitting is not None:
            self._admitting.cancel()
        for worker in self._workers.values():
            worker.cancel()

    def abort(self, aborts: list[tuple[str, AttemptKey]]) -> None:
        for name, key in aborts:
            tasks = self._workers[name]
            if not tasks.slots.down:
                tasks.spawn(partial(tasks.worker.abort, key), f"abort of {key}")

    async def hand_over(self, *, to_trainer: bool) -> None:
        """Colocate: the resources change hands. A worker that is down is not asked; it is restarted when it may have them.

        A stop ends the wait: no step follows that needs the resources, and a worker that hangs must not hold it up.
        """
        board = self._board
        board.is_lent = True
        calls = []
        for tasks in self._workers.values():
            if not tasks.slots.down:
                worker, what = tasks.worker, "pauses" if to_trainer else "resumes"
                calls.append(tasks.spawn(worker.pause if to_trainer else worker.resume, f"{worker.name} {what}"))
                calls[-1].add_done_callback(lambda _: board.changes.notify())

        def missing() -> list[str]:
            return [call.get_name() for call in calls if not call.done()]

        resources = f"the resources to go to the {'trainer' if to_trainer else 'workers'}"
        await board.changes.until(
            lambda: board.stopping or not missing(), "trainer (hand-over)", lambda: f"{resources}: {', '.join(missing())}"
        )
        board.is_lent = to_trainer
        board.changes.notify()

    async def _admit(self) -> None:
        """Consumes prompts; waits for admission, which groups, loads and publishes reopen."""
        board, clock = self._board, self._board.feed_clock
        while True:
            clock.enter(State.BUSY)
            while (started := board.groups.start()) is not None:
                name, request = started
                self._workers[name].generate(request)
            clock.enter(State.BLOCKED, "admission")
            await board.changes.until(board.admission.is_open, "feed", lambda: f"admission: {causes.admission_wait(board)}")
