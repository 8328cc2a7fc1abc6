"""The training side of the loop: wait for groups, take and train them, publish (publishing.py), checkpoint,
record every step."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.contracts.events import StepRecord
from asyncrl_cli.contracts.prompt_group import GroupResult, TrainBatch, TrainReport
from asyncrl_cli.loop import causes
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.checkpointer import Checkpointer
from asyncrl_cli.loop.lending import Lending
from asyncrl_cli.loop.publishing import Publishing
from asyncrl_cli.loop.rollouts import Rollouts
from asyncrl_cli.loop.run_state import RunState
from asyncrl_cli.loop.scorer_tasks import ScorerTasks
from asyncrl_cli.measure.bands import Bands
from asyncrl_cli.measure.states import State, StepTimes
from asyncrl_cli.measure.values import shown


class Training:
    """The trainer's side of one run. `run` tells the story of a step, in four methods."""

    def __init__(
        self,
        run: RunState,
        tasks: asyncio.TaskGroup,
        rollouts: Rollouts,
        critic: ScorerTasks | None,
        checkpointer: Checkpointer,
        lending: Lending | None = None,
    ) -> None:
        """`critic`: a critic with its own process, if there is one."""
        self._run = run
        self._tasks = tasks
        self._rollouts = rollouts
        self._critic = critic
        self._learning: asyncio.Task[TrainReport] | None = None
        """The critic's learning from the last train step."""
        self._checkpointer = checkpointer
        self._lending = lending
        self._times = StepTimes(run.now_s, lambda: run.evaluator.active_s)
        self._publishing = Publishing(run, tasks, rollouts, self._times)
        self._stale_warning_version: int | None = None
        """The window in which stale groups were last warned of."""
        self._bands = Bands(run.settings.profile.algorithm)

    async def run(self) -> None:
        """Train until the last step or a stop. Returns once the weights are published and every checkpoint is
        written."""
        progress, train_steps = self._run.progress, self._run.settings.schedule.train_steps
        await self._publishing.first()
        progress.enter("running")
        self._times.begin()
        await self._checkpoint()
        if progress.step == train_steps:
            await self._publishing.finish()
        while progress.step < train_steps:
            groups = await self._next_groups()
            if groups is None:
                break
            report = await self._train(groups)
            await self._close_step(groups, report)
        if self._run.failure.stopping:
            await self._checkpoint()
        await self._checkpointer.finish()
        with self._run.changes.waiting("trainer (end)", "the last sweep of the data store"):
            await self._run.groups.data.last_sweep()

    async def _next_groups(self) -> tuple[GroupResult, ...] | None:
        """Wait for R takeable groups and take them; None on a stop."""
        run, failure, lending = self._run, self._run.failure, self._lending
        num_groups = run.settings.schedule.step_groups

        def may_take() -> bool:
            return failure.stopping or self._may_take()

        def may_go_on() -> bool:
            return failure.stopping or run.groups.takeable(num_groups) or not self._may_take()

        def missing() -> str:
            return causes.window_wait(run) if self._needs_resources else causes.groups_wait(run)

        while True:
            with self._times.waiting("wait_data"):
                concerned = (Change.GROUPS, Change.LOADED, Change.PUBLISHED)
                if lending is not None:
                    await run.changes.until(
                        lambda: may_take() or lending.pays(), "trainer", missing, concerned
                    )
                    if not may_take():
                        lending.lend()
                await run.changes.until(may_take, "trainer", missing, concerned)
            if run.admission.scorers:
                with self._times.waiting("wait_scores"):
                    await run.changes.until(
                        may_go_on, "trainer", lambda: causes.scores_wait(run), (Change.GROUPS,)
                    )
            if lending is not None and not failure.stopping:
                with self._times.waiting("wait_data"):
                    await lending.recall()
            if failure.stopping or run.groups.takeable(num_groups):
                break  # else groups were dropped for their scores, or lost with a node, and too few are left
        if self._needs_resources and not failure.stopping:
            await self._rollouts.hand_over(to_trainer=True)
        if failure.stopping:
            return None
        groups, bound = run.groups.take(num_groups), run.settings.schedule.max_staleness
        oldest = [min(meta.oldest for meta in group.trajectories) for group in groups]
        num_stale = sum(version < run.version - bound for version in oldest)
        # With on_stale = "accept" groups may be stale. There is one warning per window.
        if num_stale and self._stale_warning_version != run.version:
            self._stale_warning_version = run.version
            run.progress.warn(
                f"{num_stale} of {num_groups} groups of step {run.progress.step + 1} are older than "
                f"max_staleness = {bound}"
            )
        return groups

    @property
    def _needs_resources(self) -> bool:
        """Colocate: whether the trainer has yet to get the resources: at the beginning of a window, or after
        a resume within one."""
        return self._run.settings.profile.placement.colocate and not self._run.executors.trainer_has_resources

    @property
    def _step_in_window(self) -> int:
        """How many train steps of the current window have ended."""
        admission = self._run.admission
        taken_groups = admission.taken_in_window - len(admission.ledger.training)
        return taken_groups // self._run.settings.schedule.step_groups

    def _may_take(self) -> bool:
        """Whether R groups could be taken, were they scored. Colocate: the first step takes the resources
        with them, so the rest of the window must be finished, and nothing else may run on the workers."""
        run, admission = self._run, self._run.admission
        if not self._needs_resources:
            return run.groups.takeable(run.settings.schedule.step_groups, unscored=True)
        whole_window = len(admission.ledger.finished) == admission.takes_left
        return whole_window and run.evaluator.running is None and admission.fleet.are_current(run.version)

    async def _train(self, groups: tuple[GroupResult, ...]) -> TrainReport:
        run, progress, executors = self._run, self._run.progress, self._run.executors
        batch = TrainBatch(
            step=progress.step + 1,
            window=run.version,
            step_in_window=self._step_in_window,
            groups=groups,
            columns=run.groups.columns(),
        )
        if self._critic is not None:
            name = f"the critic in step {batch.step}"
            needed = ExitStack()  # it may learn for longer than the trainer trains, which clears the data
            needed.enter_context(run.groups.data.pinned([key for one in groups for key in one.payload or ()]))
            self._learning = self._tasks.create_task(self._critic.learn(batch, needed), name=name)
        began_s = run.now_s()
        with executors.calling_trainer(State.BUSY):
            report, executor_report = await executors.trainer.train(batch)
        progress.step += 1
        progress.longest_step_s = max(progress.longest_step_s, run.now_s() - began_s)
        executors.reports.add(executor_report, run.now_s())
        run.groups.trained()
        for part, seconds in {"train": report.train_s, **report.column_s}.items():
            self._times.add(part, seconds)
        self._check_skipped(report, "trainer", "trainer.lr")
        rewards = [meta.reward for group in groups for meta in group.trajectories]
        for warning in (*self._bands.left(shown(report.metrics)), *self._bands.flat(rewards)):
            progress.warn(f"step {progress.step}: {warning}")
        run.changes.notify()
        return report

    def _check_skipped(self, report: TrainReport, who: str, rate_key: str) -> None:
        """Warn of optimizer steps that were skipped, and stop the run after too many in a row.

        An optimizer step without a finite gradient leaves weights and optimizer as they were. Its groups
        still count as trained: they were consumed, and training them again would very likely fail the same
        way.
        """
        run, limit = self._run, self._run.settings.profile.trainer.max_skipped_steps
        if report.skipped_steps:
            skipped = f"{report.skipped_steps} optimizer step{'s' if report.skipped_steps > 1 else ''}"
            run.progress.warn(
                f"{who}: {skipped} of step {run.progress.step} skipped: the gradient is not finite "
                f"({report.skipped_in_a_row} in a row)"
            )
        if report.skipped_in_a_row > limit:
            run.failure.stop(
                AsyncrlError(
                    f"{who}: the last {report.skipped_in_a_row} optimizer steps had no finite gradient, "
                    f"trainer.max_skipped_steps is {limit}; the weights are those of the step before",
                    hint=f"resume with a lower {rate_key}, or look at correction/ratio_max and at the "
                    "samples of these steps",
                )
            )

    async def _close_step(self, groups: tuple[GroupResult, ...], report: TrainReport) -> None:
        """Publish if a window ends, write the step's line, then write a checkpoint if one is due.

        In this order the checkpoint's counters include this step; the stall that it causes is part of the
        next step's time.
        """
        run, progress, executors = self._run, self._run.progress, self._run.executors
        self._govern(groups, report)
        window, step_in_window = run.version, self._step_in_window - 1
        if run.admission.takes_left == 0:
            await self._publishing.end_window()
        if self._learning is not None:
            critic_waits = run.changes.waiting(
                "trainer (critic)", f"the critic to learn from step {progress.step}"
            )
            with self._times.waiting("wait_scores"), critic_waits:
                learned = await self._learning
            self._check_skipped(learned, "critic", "critic.lr")
            report = replace(report, metrics={**report.metrics, **learned.metrics})

        def record() -> StepRecord:
            """The step so far, without spans and slot intervals."""
            return StepRecord(
                step=progress.step,
                version=run.version,
                window=window,
                step_in_window=step_in_window,
                ended_s=run.now_s(),
                groups=groups,
                timing_s=self._times.so_far(),
                train=report,
                reports=executors.reports.latest,
                covered_s=executors.reports.covered_s,
                spans={},
                sync=run.sync.summary,
                evals=tuple(run.evaluator.ended),
                ledger=run.groups.ledger.totals(),
                tokens_discarded=run.groups.tokens_discarded,
                tokens_trained=run.groups.tokens_trained,
                filtered=tuple(run.groups.filter.rewards) if run.groups.filter.is_on else None,
                restarts=executors.num_restarts,
                failures=dict(run.groups.failures),
                orphans=run.groups.data.orphans,
                feed=run.groups.feed.figures(),
                bias=dict(run.groups.bias.values),
                governor=governor.figures() if (governor := run.admission.governor) is not None else {},
                lent=[worker.name for worker in run.admission.workers.values() if worker.is_lent],
                lending=self._lending.figures() if self._lending is not None else {},
            )

        is_last = progress.step == run.settings.schedule.train_steps
        if is_last:  # its line has the final eval; its checkpoint does not wait for that
            await self._checkpoint(record())
            await self._publishing.finish()
        spans, slot_intervals = executors.reports.take_spans(), executors.reports.take_slot_intervals()
        ended = replace(record(), timing_s=self._times.close(), spans=spans, slot_intervals=slot_intervals)
        run.evaluator.ended.clear()
        run.groups.filter.rewards.clear()
        run.groups.bias.values.clear()
        if self._lending is not None:
            self._lending.step_ended()
        for observer in progress.observers:
            observer.step(ended)
        every = run.settings.profile.checkpoint.every_steps
        if not is_last and every and progress.step % every == 0:
            await self._checkpoint()

    def _govern(self, groups: tuple[GroupResult, ...], report: TrainReport) -> None:
        """Report the step to the governor, if there is one."""
        if (governor := self._run.admission.governor) is None:
            return
        kl = shown(report.metrics).get("correction/kl")
        reports = self._run.executors.reports.latest.values()
        governor.trained(
            kl if isinstance(kl, float) else None,
            num_tokens=report.tokens,
            num_responses=sum(len(group.trajectories) for group in groups),
            preemptions=sum(report.sums.get("preemptions", 0.0) for report in reports),
            timing_s=self._times.so_far(),
        )
        self._run.changes.notify()

    async def _checkpoint(self, record: StepRecord | None = None) -> None:
        with self._times.spending("checkpoint"):
            await self._checkpointer.begin(record)
