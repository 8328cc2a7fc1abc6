"""The rollout workers together, as the training side sees them: admitting groups, aborting them, and handing
over the resources."""

from __future__ import annotations

import asyncio
from functools import partial

from asyncrl_cli.contracts.prompt_group import AttemptKey
from asyncrl_cli.loop import causes
from asyncrl_cli.loop.run_state import RunState
from asyncrl_cli.loop.worker_tasks import WorkerTasks
from asyncrl_cli.measure.states import State, StateClock


class Rollouts:
    def __init__(self, run: RunState, tasks: asyncio.TaskGroup) -> None:
        """Start admitting groups, and start the tasks of every worker."""
        self.feed_clock = StateClock("feed", "feed", "", run.now_s)
        self._run = run
        self._workers = {worker.name: WorkerTasks(run, worker, tasks) for worker in run.executors.workers}
        self._admitting = tasks.create_task(run.failure.guarded(self._admit), name="admit")
        for worker in self._workers.values():
            worker.begin()

    def cancel(self) -> None:
        self._admitting.cancel()
        for worker in self._workers.values():
            worker.cancel()

    async def _admit(self) -> None:
        """Start groups while admission is open, and wait while it is closed. Freed slots, loads and publishes
        reopen it."""
        run, clock = self._run, self.feed_clock
        while True:
            clock.enter(State.BUSY)
            while requests := run.groups.start():
                for name, request in requests:
                    self._workers[name].worker.submit(request)
            clock.enter(State.BLOCKED, "admission")
            await run.changes.until(
                run.admission.is_open, "feed", lambda: f"admission: {causes.admission_wait(run)}"
            )

    def abort(self, aborts: list[tuple[str, AttemptKey]]) -> None:
        for name, key in aborts:
            tasks = self._workers[name]
            if not tasks.is_down:
                tasks.spawn(partial(tasks.worker.abort, key), f"abort of {key}")

    async def hand_over(self, *, to_trainer: bool) -> None:
        """Colocate: hand the resources to the trainer, or back to the workers. Skips workers that are down;
        they restart later.

        A stop ends the wait: no later step needs the resources, and a worker that hangs must not delay the
        stop.
        """
        run = self._run
        run.executors.lend(True)
        calls = []
        for tasks in self._workers.values():
            if not tasks.is_down:
                worker, what = tasks.worker, "pauses" if to_trainer else "resumes"
                calls.append(
                    tasks.spawn(worker.pause if to_trainer else worker.resume, f"{worker.name} {what}")
                )
                calls[-1].add_done_callback(lambda _: run.changes.notify())

        def missing() -> list[str]:
            return [call.get_name() for call in calls if not call.done()]

        resources = f"the resources to go to the {'trainer' if to_trainer else 'workers'}"
        await run.changes.until(
            lambda: run.failure.stopping or not missing(),
            "trainer (hand-over)",
            lambda: f"{resources}: {', '.join(missing())}",
        )
        run.executors.lend(to_trainer)
