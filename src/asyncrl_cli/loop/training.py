"""The training side of the loop: wait for groups, take and train them, publish (rollouts.py), checkpoint,
record every step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.contracts.attempts import GroupResult
from asyncrl_cli.contracts.events import StepRecord
from asyncrl_cli.contracts.ports import Scorer, TrainBatch, TrainReport
from asyncrl_cli.loop import causes
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.cuts import Checkpointer
from asyncrl_cli.loop.rollouts import Publishing, Rollouts
from asyncrl_cli.measure.bands import Bands
from asyncrl_cli.measure.states import State, StepTimes
from asyncrl_cli.measure.values import shown


class Training:
    def __init__(
        self, board: Board, tasks: asyncio.TaskGroup, rollouts: Rollouts, checkpointer: Checkpointer
    ) -> None:
        self._board = board
        self._tasks = tasks
        self._learning: asyncio.Task[TrainReport] | None = None
        """The separate critic's learning from the last train step."""
        self._rollouts = rollouts
        self._checkpointer = checkpointer
        self._times = StepTimes(board.now_s, lambda: board.evaluator.active_s)
        self._publishing = Publishing(board, tasks, rollouts, self._times)
        self._warned_in: int | None = None
        self._bands = Bands(board.profile.algorithm)

    async def run(self) -> None:
        """Train until the last step or a stop. Returns once the weights are published and every checkpoint is
        written."""
        board, train_steps = self._board, self._board.schedule.train_steps
        await self._publishing.first()
        board.phase = "running"
        self._times.begin()
        await self._checkpoint()
        if board.step == train_steps:
            await self._publishing.finish()
        while board.step < train_steps:
            groups = await self._next_groups()
            if groups is None:
                break
            report = await self._train(groups)
            await self._close_step(groups, report)
        if board.stopping:
            await self._checkpoint()
        await self._checkpointer.finish()

    async def _next_groups(self) -> tuple[GroupResult, ...] | None:
        """Wait for R takeable groups and take them; None on a stop."""
        board, may_take, num_groups = (
            self._board,
            (Change.GROUPS, Change.LOADED),
            self._board.schedule.step_groups,
        )
        while True:
            with self._times.waiting("wait_data"):
                await board.changes.until(
                    lambda: board.stopping or self._may_take(), "trainer", self._missing, may_take
                )
            if board.scorers:
                await self._scored()
            if board.stopping or not board.scorers or board.groups.takeable(num_groups):
                break  # else groups were dropped for their reward model scores
        if self._needs_resources and not board.stopping:
            await self._rollouts.hand_over(to_trainer=True)
        if board.stopping:
            return None
        groups = board.groups.take(num_groups)
        self._warn_of_stale(groups)
        return groups

    async def _scored(self) -> None:
        """Wait until R groups with every scorer's column can be taken, or until dropped groups leave fewer
        than R finished."""
        board, num_groups = self._board, self._board.schedule.step_groups

        def ended() -> bool:
            return board.stopping or board.groups.takeable(num_groups) or not self._may_take()

        with self._times.waiting("wait_scores"):
            await board.changes.until(ended, "trainer", lambda: causes.scores_wait(board), (Change.GROUPS,))

    @property
    def _needs_resources(self) -> bool:
        """Colocate: whether the trainer has yet to get the resources, at the beginning of a window."""
        return self._board.profile.placement.colocate and self._step_in_window == 0

    @property
    def _step_in_window(self) -> int:
        """How many train steps of the current window have ended."""
        taken, training = self._board.admission.taken_in_window, len(self._board.ledger.training)
        return (taken - training) // self._board.schedule.step_groups

    def _may_take(self) -> bool:
        board, admission = self._board, self._board.admission
        if not self._needs_resources:
            return board.groups.takeable(board.schedule.step_groups, unscored=True)
        whole_window = len(board.ledger.finished) == admission.window_size
        return whole_window and board.evaluator.running is None and admission.fleet.are_current(board.version)

    def _missing(self) -> str:
        return causes.window_wait(self._board) if self._needs_resources else causes.groups_wait(self._board)

    def _warn_of_stale(self, groups: Sequence[GroupResult]) -> None:
        """on_stale = "accept" lets groups exceed the staleness bound. Warn of it once per window."""
        board, bound = self._board, self._board.schedule.max_staleness
        stale = [
            group
            for group in groups
            if min(meta.oldest for meta in group.trajectories) < board.version - bound
        ]
        if stale and self._warned_in != board.version:
            self._warned_in = board.version
            message = (
                f"{len(stale)} of {len(groups)} groups of step {board.step + 1} are older than "
                f"max_staleness = {bound}"
            )
            board.warn(message)

    async def _train(self, groups: tuple[GroupResult, ...]) -> TrainReport:
        board = self._board
        batch = TrainBatch(
            step=board.step + 1,
            window=board.version,
            step_in_window=self._step_in_window,
            groups=groups,
            columns=board.groups.columns(),
        )
        if board.critic is not None:
            self._learning = self._tasks.create_task(
                self._learn(board.critic, batch), name=f"the critic in step {batch.step}"
            )
        with board.calling_trainer(State.BUSY):
            report, executor_report = await board.trainer.train(batch)
        board.step += 1
        board.reports.add(executor_report, board.now_s())
        board.groups.trained()
        self._times.add("train", report.train_s)
        for part, seconds in report.column_s.items():
            self._times.add(part, seconds)
        self._warn_of_skipped(report, "trainer", "trainer.lr")
        rewards = [meta.reward for group in groups for meta in group.trajectories]
        for warning in (*self._bands.left(shown(report.metrics)), *self._bands.flat(rewards)):
            board.warn(f"step {board.step}: {warning}")
        board.changes.notify()
        return report

    async def _learn(self, critic: Scorer, batch: TrainBatch) -> TrainReport:
        """Let the separate critic learn beside the policy. Only then does it score the groups of the next
        step."""
        board = self._board
        with board.changes.waiting(f"{critic.name} (learning)", f"what it learns in step {batch.step}"):
            report, executor_report = await critic.learn(batch)
        board.groups.is_learning = False
        board.scorer_reported(critic.name, executor_report)
        board.changes.notify(Change.GROUPS)
        return report

    async def _with_critic(self, report: TrainReport) -> TrainReport:
        """The step's report, with a separate critic's metrics added."""
        if self._learning is None:
            return report
        board, name = self._board, "trainer (critic)"
        with (
            self._times.waiting("wait_scores"),
            board.changes.waiting(name, f"the critic to learn from step {board.step}"),
        ):
            learned = await self._learning
        self._warn_of_skipped(learned, "critic", "critic.lr")
        return replace(report, metrics={**report.metrics, **learned.metrics})

    def _warn_of_skipped(self, report: TrainReport, who: str, rate_key: str) -> None:
        """An optimizer step without a finite gradient leaves weights and optimizer as they were. Its groups
        still count as trained: they were consumed, and training them again would very likely fail the same
        way."""
        board, limit = self._board, self._board.profile.trainer.max_skipped_steps
        if report.skipped_steps:
            skipped = (
                f"{report.skipped_steps} optimizer step{'s' if report.skipped_steps > 1 else ''} of "
                f"step {board.step} skipped"
            )
            board.warn(f"{who}: {skipped}: the gradient is not finite ({report.skipped_in_a_row} in a row)")
        if report.skipped_in_a_row > limit:
            board.stop(
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
        next step's time. The last step's line has the final eval. Its checkpoint does not wait for that: it
        is written meanwhile.
        """
        board, window, step_in_window = self._board, self._board.version, self._step_in_window - 1
        if board.admission.takes_left == 0:
            await self._publishing.end_window()
        report = await self._with_critic(report)
        is_last = board.step == board.schedule.train_steps
        if is_last:
            await self._checkpoint(self._record(window, step_in_window, groups, report))
            await self._publishing.finish()
        record = replace(
            self._record(window, step_in_window, groups, report),
            timing_s=self._times.close(),
            spans=board.reports.take_spans(),
            stays=board.reports.take_stays(),
        )
        board.evaluator.ended.clear()
        board.groups.filter.rewards.clear()
        board.record(record)
        every = board.profile.checkpoint.every_steps
        if not is_last and every and board.step % every == 0:
            await self._checkpoint()

    async def _checkpoint(self, record: StepRecord | None = None) -> None:
        with self._times.spending("checkpoint"):
            await self._checkpointer.cut(record)

    def _record(
        self, window: int, step_in_window: int, groups: tuple[GroupResult, ...], report: TrainReport
    ) -> StepRecord:
        """The step so far, without spans and stays."""
        board = self._board
        return StepRecord(
            step=board.step,
            version=board.version,
            window=window,
            step_in_window=step_in_window,
            ended_s=board.now_s(),
            groups=groups,
            timing_s=self._times.so_far(),
            train=report,
            reports=board.reports.latest,
            spans={},
            sync=board.sync.summary,
            evals=tuple(board.evaluator.ended),
            ledger=board.ledger.totals(),
            tokens_discarded=board.groups.tokens_discarded,
            tokens_trained=board.groups.tokens_trained,
            filtered=tuple(board.groups.filter.rewards) if board.groups.filter.is_on else None,
            restarts=board.restarts,
            failures=dict(board.groups.failures),
        )
