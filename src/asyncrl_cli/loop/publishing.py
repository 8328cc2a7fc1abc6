"""From the trainer's weights to the workers: gather, raise the version, publish beside training, and wait for
the workers' loads (which are in rollouts.py) where that is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncrl_cli.base.errors import AsyncrlError, StallError
from asyncrl_cli.loop import causes
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.rollouts import Rollouts
from asyncrl_cli.loop.run_state import RunState
from asyncrl_cli.measure.states import State, StepTimes


class Publishing:
    """Publishes the versions of one run, one at a time. It holds what the trainer waits for."""

    def __init__(self, run: RunState, tasks: asyncio.TaskGroup, rollouts: Rollouts, times: StepTimes) -> None:
        self._run = run
        self._tasks = tasks
        self._rollouts = rollouts
        self._times = times
        self._publishing: asyncio.Task[None] | None = None

    async def first(self) -> None:
        """Publish the first version for the workers: 0 in a fresh run, the checkpoint's version in a resumed
        one."""
        run = self._run
        # Within a window the trainer's weights are newer than the version: the checkpoint has the version's.
        begins_window = run.admission.taken_in_window == 0
        self._publish_beside(await self._gather(run.version) if begins_window else None)
        await self.until_held_by_all()

    async def end_window(self) -> None:
        """Gather the weights and raise the version. Workers receive it during the next step."""
        run, who = self._run, "trainer (gather)"

        def older_loads() -> str:
            begun = [worker for worker in run.admission.workers.values() if worker.begun is not None]
            return f"workers to finish older loads: {', '.join(causes.lags(run, begun))}"

        # Keep at most two published versions: the last publish has to end, and loads while workers have begun
        # two.
        with self._times.spending("gather"):
            if self._publishing is not None:
                with run.changes.waiting(who, f"version {run.version} to be published"):
                    await self._publishing
            try:
                await run.changes.until(
                    lambda: run.sync.has_room or run.failure.stopping,
                    who,
                    older_loads,
                    (Change.LOADED,),
                    run.settings.sync_timeout_s,
                )
            except StallError as error:
                run.failure.stop(error)
        has_room = run.sync.has_room
        run.sync.reserve()
        gather_s = await self._gather(run.version + 1)
        self._times.add("gather", gather_s)
        try:
            self._rollouts.abort(run.groups.open_window())
        except AsyncrlError as error:
            run.failure.stop(error)
        self._tasks.create_task(run.failure.guarded(run.groups.data.sweep), name="sweep")
        # After a stop nothing starts, and a hung worker would delay it.
        if run.settings.profile.placement.colocate and not run.failure.stopping:
            await self._rollouts.hand_over(to_trainer=False)
        # There may be no room after a stop: workers keep their version, and a resume publishes first.
        if has_room or run.sync.has_room:
            self._publish_beside(gather_s)
        run.changes.notify()
        with self._times.waiting("gather"):
            await self.until_held_by_all()

    async def finish(self) -> None:
        """Wait until every worker holds the last version and its eval has ended. A run resumed at its last
        step does this, too."""
        run, evaluator = self._run, self._run.evaluator
        run.progress.enter("evaluating")

        def is_scored() -> bool:
            return not evaluator.tries or evaluator.last_ended == run.version

        def missing() -> str:
            scoring = f"eval of {evaluator.running}" if evaluator.running else "its eval has not begun"
            parts = [*causes.lags(run), *([] if is_scored() else [scoring])]
            return f"version {run.version} to be loaded and scored: {', '.join(parts)}"

        eval_s = 2 * run.settings.profile.eval.timeout_s if evaluator.tries else 0.0
        still_s = run.settings.sync_timeout_s + eval_s
        with self._times.waiting("gather"):
            await self._until(
                lambda: self._all_hold_newest() and is_scored(), "trainer (last version)", missing, still_s
            )

    async def until_held_by_all(self) -> None:
        """weights.mode = "sync": wait until every worker has loaded the version that was just published."""
        run = self._run
        if run.settings.profile.weights.mode == "async":
            return

        def missing() -> str:
            return f"every worker to load version {run.version}: {', '.join(causes.lags(run))}"

        await self._until(self._all_hold_newest, "trainer (sync)", missing, run.settings.sync_timeout_s)

    async def _gather(self, version: int) -> float:
        """Returns the seconds of the gather. Its report always counts: it has the spans since the last
        one."""
        executors = self._run.executors
        with executors.calling_trainer(State.SYNCING, f"version {version} to be gathered"):
            gather_s, report = await executors.trainer.gather(version)
        executors.reports.add(report, self._run.now_s())
        return gather_s

    def _all_hold_newest(self) -> bool:
        return self._run.admission.fleet.are_current(self._run.version)

    async def _until(
        self, condition: Callable[[], bool], who: str, what: Callable[[], str], still_s: float
    ) -> None:
        """Wait for a condition on all workers, or for a stop. Stops the run with a StallError if nothing has
        moved for `still_s` while all of them were up; restarts have their own limit."""
        run, fleet = self._run, self._run.admission.fleet

        def ended() -> bool:
            return run.failure.stopping or condition()

        while not ended():
            await run.changes.until(lambda: ended() or fleet.is_whole(), who, partial(causes.restarts, run))
            try:
                await run.changes.until(lambda: ended() or not fleet.is_whole(), who, what, still_s=still_s)
            except StallError as error:
                run.failure.stop(error)

    def _publish_beside(self, gather_s: float | None) -> None:
        publish = self._publish(self._run.version, gather_s)
        self._publishing = self._tasks.create_task(publish, name="publish")

    async def _publish(self, version: int, gather_s: float | None) -> None:
        run = self._run
        published = await run.executors.trainer.publish(version)
        run.sync.offer(published, gather_s)
        facts: dict[str, Any] = {"num_bytes": published.num_bytes, "publish_s": published.publish_s}
        if published.fingerprint:
            facts["fingerprint"] = published.fingerprint
        run.progress.event("published", version=version, **facts)
        run.changes.notify(Change.PUBLISHED)
