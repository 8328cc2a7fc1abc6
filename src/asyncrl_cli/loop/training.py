"""The training side of the loop: wait, take, train, gather, publish, checkpoint; and where the trainer's time goes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from asyncrl_cli.errors import AsyncrlError, StallError
from asyncrl_cli.loop import causes
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.cuts import Checkpointer
from asyncrl_cli.loop.ports import EvalSummary, GatherReport, GroupResult, StepRecord, TrainBatch, TrainReport
from asyncrl_cli.loop.rollouts import Rollouts
from asyncrl_cli.loop.signal import Change
from asyncrl_cli.loop.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_PARTS = ("wait_data", "old_logprob", "train", "gather", "checkpoint", "eval")


class Training:
    def __init__(self, board: Board, tasks: asyncio.TaskGroup, rollouts: Rollouts, checkpointer: Checkpointer) -> None:
        self._board = board
        self._tasks = tasks
        self._rollouts = rollouts
        self._checkpointer = checkpointer
        self._publishing: asyncio.Task[None] | None = None
        self._warned_in: int | None = None
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._step_began_s = board.now_s()

    async def run(self) -> None:
        """Train until the last step or a stop; ends with the weights published and every checkpoint written."""
        board = self._board
        if board.step == board.settings.train_steps:  # resumed at the end: who loads this version scores it, too
            board.last_version = board.version
        await self._publish_first()
        board.phase = "running"
        self._step_began_s = board.now_s()
        await self._checkpoint()
        if board.step == board.settings.train_steps:
            await self._finish_last_version()
        while board.step < board.settings.train_steps:
            groups = await self._next_groups()
            if groups is None:
                break
            report = await self._train(groups)
            await self._close_step(groups, report)
        if board.stopping:
            await self._checkpoint()
        await self._checkpointer.finish()

    async def _publish_first(self) -> None:
        """Version `board.version` for the workers: a fresh run's 0, or the one that a resumed run was at."""
        board = self._board
        if board.step == 0 or board.settings.ends_window(board.step):
            gathered = await self._gather(board.version)
            board.sync.gathered(gathered.version, gathered.gather_s)
        self._publish_beside()
        await self._held_by_all()

    async def _next_groups(self) -> tuple[GroupResult, ...] | None:
        """Waits for R takeable groups, which workers finish; None on a stop."""
        board, settings = self._board, self._board.settings
        may_take = (Change.GROUPS, Change.LOADED)
        with self._waiting("wait_data"):
            await board.changes.until(lambda: board.stopping or self._may_take(), "trainer", self._missing, may_take)
        if board.stopping:
            return None
        if settings.colocate and self._step_in_window == 0:
            await self._rollouts.hand_over(to_trainer=True)
            if board.stopping:
                return None
        groups = board.groups.take(settings.step_groups)
        self._warn_of_stale(groups)
        return groups

    def _warn_of_stale(self, groups: Sequence[GroupResult]) -> None:
        """on_stale = "accept" lets groups pass the bound, but not in silence: once per window."""
        board = self._board
        oldest_allowed = board.version - board.settings.max_staleness
        stale = [group for group in groups if min(meta.oldest for meta in group.trajectories) < oldest_allowed]
        if stale and self._warned_in != board.version:
            self._warned_in = board.version
            message = f"{len(stale)} of {len(groups)} groups of step {board.step + 1} are older than max_staleness"
            board.event("warning", message=f"{message} = {board.settings.max_staleness}")

    def _may_take(self) -> bool:
        board, settings, admission = self._board, self._board.settings, self._board.groups.admission
        if settings.colocate and self._step_in_window == 0:
            whole_window = len(admission.finished) == admission.window_size
            is_current = admission.fleet.are_current(board.version)
            return whole_window and board.evaluator.running is None and is_current
        return board.groups.takeable(settings.step_groups)

    def _missing(self) -> str:
        is_handing_over = self._board.settings.colocate and self._step_in_window == 0
        return causes.window_wait(self._board) if is_handing_over else causes.groups_wait(self._board)

    @property
    def _step_in_window(self) -> int:
        return self._board.step % self._board.settings.window_steps

    async def _train(self, groups: tuple[GroupResult, ...]) -> TrainReport:
        board = self._board
        batch = TrainBatch(step=board.step + 1, window=board.version, step_in_window=self._step_in_window, groups=groups)
        with board.calling_trainer(State.BUSY):
            report = await board.trainer.train(batch)
        board.step += 1
        board.reports.add(report.report, board.now_s())
        board.groups.trained(groups)
        self._spent_s["train"] += report.train_s
        self._spent_s["old_logprob"] += report.old_logprob_s
        self._warn_of_skipped(report)
        board.changes.notify()
        return report

    def _warn_of_skipped(self, report: TrainReport) -> None:
        """A step without a finite gradient leaves weights and optimizer as they were. Its groups are trained all the same: they
        were consumed, and would very likely do it again."""
        board, limit = self._board, self._board.settings.max_skipped_steps
        if report.skipped_steps:
            skipped = f"{report.skipped_steps} optimizer step{'s' if report.skipped_steps > 1 else ''} of step {board.step} skipped"
            board.event("warning", message=f"{skipped}: the gradient is not finite ({report.skipped_in_a_row} in a row)")
        if report.skipped_in_a_row > limit:
            board.stop(
                AsyncrlError(
                    f"trainer: the last {report.skipped_in_a_row} optimizer steps had no finite gradient, "
                    f"trainer.max_skipped_steps is {limit}; the weights are those of the step before",
                    hint="resume with a lower trainer.lr, or look at correction/ratio_max and at the samples of these steps",
                )
            )

    async def _close_step(self, groups: tuple[GroupResult, ...], report: TrainReport) -> None:
        """Publish where a window ends, write the step's line, then checkpoint where it is due.

        In that order the checkpoint holds the line's counters; its stall is part of the next step's time.
        """
        board, settings = self._board, self._board.settings
        window = board.version
        if settings.ends_window(board.step):
            await self._end_window()
        is_last = board.step == settings.train_steps
        if is_last:
            await self._finish_last_version()
        self._record(window, groups, report)
        every = settings.checkpoint_every_steps
        if is_last or (every and board.step % every == 0):
            await self._checkpoint()

    async def _end_window(self) -> None:
        """Gather; the version rises; workers get it beside the next step."""
        board = self._board
        if board.step == board.settings.train_steps:
            board.last_version = board.version + 1
        with self._spending("gather"):
            await self._room_to_publish()
        board.sync.reserve()
        gathered = await self._gather(board.version + 1)
        self._spent_s["gather"] += gathered.gather_s
        board.reports.add(gathered.report, board.now_s())
        board.sync.gathered(gathered.version, gathered.gather_s)
        try:
            self._rollouts.abort(board.groups.publish())
        except AsyncrlError as error:
            board.stop(error)
        if board.settings.colocate and not board.stopping:  # nothing starts any more, and a hung worker would hold up the end
            await self._rollouts.hand_over(to_trainer=False)
        if board.sync.room:  # a stop does not wait for room: the workers end with what they have, a resume publishes first
            self._publish_beside()
        board.changes.notify()
        with self._waiting("gather"):
            await self._held_by_all()

    async def _gather(self, version: int) -> GatherReport:
        with self._board.calling_trainer(State.SYNCING, f"version {version} to be gathered"):
            return await self._board.trainer.gather(version)

    async def _room_to_publish(self) -> None:
        """At most two published versions exist: waits for the last publish, and for a load of the one before it."""
        board, who, still_s = self._board, "trainer (gather)", self._board.settings.sync_timeout_s
        if self._publishing is not None:
            with board.changes.waiting(who, f"version {board.version} to be published"):
                await self._publishing

        def has_room() -> bool:
            return board.sync.room or board.stopping

        def older_loads() -> str:
            return f"workers to finish older loads: {', '.join(causes.lag_of(board, name) for name in board.sync.begun)}"

        try:
            await board.changes.until_still(has_room, who, older_loads, still_s, (Change.LOADED,))
        except TimeoutError:
            board.stop(StallError(f"nothing has moved for {still_s:g} s, and the trainer waits for {older_loads()}"))

    async def _held_by_all(self) -> None:
        """weights.mode = "sync": waits until every worker has loaded the version that was just published."""
        board, settings = self._board, self._board.settings
        if settings.weights_mode == "async":
            return

        def ended() -> bool:
            return board.stopping or all(held == board.version for held in board.sync.held.values())

        def missing() -> str:
            return f"every worker to load version {board.version}: {', '.join(causes.lags(board))}"

        still_s = settings.sync_timeout_s
        try:
            await self._until(ended, "trainer (sync)", missing, still_s)
        except TimeoutError:
            board.stop(StallError(f"nothing has moved for {still_s:g} s, and the trainer waits for {missing()}"))

    async def _until(self, ended: Callable[[], bool], who: str, what: Callable[[], str], still_s: float) -> None:
        """Waits for what every worker has to do: TimeoutError when nothing has moved for `still_s` with all of them up; a restart
        has its own bound."""
        changes, fleet = self._board.changes, self._board.groups.admission.fleet
        lost = partial(causes.restarts, self._board)
        while not ended():
            await changes.until(lambda: ended() or fleet.is_whole(), who, lost)
            await changes.until_still(lambda: ended() or not fleet.is_whole(), who, what, still_s)

    def _publish_beside(self) -> None:
        self._publishing = self._tasks.create_task(self._publish(self._board.version), name="publish")

    async def _publish(self, version: int) -> None:
        board = self._board
        published = await board.trainer.publish(version)
        board.sync.offer(published)
        board.event("published", version=version, num_bytes=published.num_bytes, publish_s=published.publish_s)
        board.changes.notify(Change.PUBLISHED)

    async def _checkpoint(self) -> None:
        with self._spending("checkpoint"):
            await self._checkpointer.cut()

    async def _finish_last_version(self) -> None:
        """The run ends when every worker holds the last version and its eval has ended (also in a run resumed there)."""
        board = self._board
        board.phase, board.last_version = "evaluating", board.version
        held, evaluator = board.sync.held, board.evaluator

        def ended() -> bool:
            loaded = all(version == board.last_version for version in held.values())
            scored = not evaluator.items or evaluator.last_version == board.last_version
            return board.stopping or (loaded and scored and evaluator.running is None)

        def missing() -> str:
            scoring = [f"eval of {evaluator.running}"] if evaluator.running else []
            return f"version {board.last_version} to be loaded and scored: {', '.join([*causes.lags(board), *scoring])}"

        still_s = board.settings.sync_timeout_s + (2 * board.settings.eval_timeout_s if evaluator.items else 0)
        try:
            with self._waiting("gather"):
                await self._until(ended, "trainer (last version)", missing, still_s)
        except TimeoutError:
            raise StallError(f"nothing has moved for {still_s:g} s, and the run waits for {missing()}") from None

    def _record(self, window: int, groups: tuple[GroupResult, ...], report: TrainReport) -> None:
        board, now_s = self._board, self._board.now_s()
        step_s = now_s - self._step_began_s
        timing_s = {part: self._spent_s[part] for part in _PARTS}
        timing_s["other"] = step_s - sum(timing_s.values())
        timing_s["step"] = step_s
        self._step_began_s = now_s
        self._spent_s.clear()
        evals: tuple[EvalSummary, ...] = tuple(board.evals_ended)
        board.evals_ended.clear()
        record = StepRecord(
            step=board.step,
            version=board.version,
            window=window,
            ended_s=now_s,
            groups=groups,
            timing_s=timing_s,
            train=report,
            reports=dict(board.reports.latest),
            spans=board.reports.take_spans(),
            sync=board.sync.summary,
            evals=evals,
            ledger=board.groups.ledger.totals(),
            tokens_discarded=board.groups.tokens_discarded,
            groups_trained=board.groups.admission.trained_groups,
            tokens_trained=board.groups.tokens_trained,
            restarts=board.restarts,
        )
        for observer in board.observers:
            observer.step(record)

    @contextmanager
    def _spending(self, part: str) -> Iterator[None]:
        began_s = self._board.now_s()
        try:
            yield
        finally:
            self._spent_s[part] += self._board.now_s() - began_s

    @contextmanager
    def _waiting(self, part: str) -> Iterator[None]:
        """As `_spending`, without the time in which an eval ran: that is its own part."""
        board, eval_began_s, began_s = self._board, self._board.evaluator.active_s, self._board.now_s()
        try:
            yield
        finally:
            eval_s = board.evaluator.active_s - eval_began_s
            self._spent_s["eval"] += eval_s
            self._spent_s[part] += board.now_s() - began_s - eval_s
