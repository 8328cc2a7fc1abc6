"""Checkpoints of the loop: a cut between an optimizer step and the next take, written beside training.

The trainer's state is copied to the host (that stalls it), the loop's state is frozen in one turn of the event loop, and
a background task writes both. One write at a time: the next cut waits for the last.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from asyncrl_cli.loop.board import Board, ResumeFrom
from asyncrl_cli.loop.kept_state import SCHEMA_VERSION, LoopState, read_state
from asyncrl_cli.loop.ports import CheckpointWriter, Cut
from asyncrl_cli.loop.states import State


class Checkpointer:
    """`resumed_at`: the step at which the run was resumed, which has its checkpoint already."""

    def __init__(self, board: Board, tasks: asyncio.TaskGroup, writer: CheckpointWriter | None, resumed_at: int | None) -> None:
        self._board = board
        self._tasks = tasks
        self._writer = writer
        self._last_step = resumed_at
        self._writing: asyncio.Task[None] | None = None

    async def cut(self) -> None:
        """Make a checkpoint of this moment (nothing is in training), unless this step has one."""
        board = self._board
        if self._writer is None or self._last_step == board.step:
            return
        await self.finish()
        with board.calling_trainer(State.SYNCING, "a checkpoint's snapshot"):
            await board.trainer.snapshot(board.step)
        cut = freeze(board)
        self._last_step = board.step
        self._writing = self._tasks.create_task(self._write(self._writer, cut), name=f"checkpoint {board.step}")

    async def finish(self) -> None:
        """Waits for the write in progress, bounded by the port's own timeout."""
        if self._writing is not None:
            with self._board.changes.waiting("trainer (checkpoint)", f"the checkpoint of step {self._last_step} to be written"):
                await self._writing

    async def _write(self, writer: CheckpointWriter, cut: Cut) -> None:
        path = await writer.write(cut)
        self._board.checkpoint = path.name
        self._board.event("checkpointed", step=cut.step, version=cut.version, path=path.name)


def freeze(board: Board) -> Cut:
    """The loop's state as JSON, and the payloads that have to be kept. Nothing may be in training."""
    assert not board.ledger.training, "a cut lies between two train steps"
    evals_ended: list[Any] = [asdict(summary) for summary in board.evaluator.ended]
    state: LoopState = {
        "schema_version": SCHEMA_VERSION,
        "step": board.step,
        "time_s": board.time_before_s + board.now_s(),
        "groups": board.groups.state(),
        "running_tokens": int(sum(report.gauges.get("running_tokens", 0) for report in board.reports.latest.values())),
        "restarts": board.restarts,
        "last_eval_version": None if board.evaluator.running else board.evaluator.last_version,
        "evals_ended": evals_ended,
        "observers": [observer.state() for observer in board.observers],
    }
    return Cut(
        step=board.step,
        version=board.version,
        at_window_boundary=board.step == 0 or board.settings.ends_window(board.step),
        loop_state={**state},
        payloads=tuple(attempt.outcome().payload for attempt in board.ledger.finished.values()),
    )


def thaw(board: Board, resumed: ResumeFrom) -> None:
    """Continue where `freeze` was called. Raises RefusedError for a state that no `freeze` of such a run writes."""
    state = read_state(resumed.loop_state, board.settings)
    board.step = state["step"]
    board.time_before_s = state["time_s"] - board.now_s()
    board.restarts = state.get("restarts", 0)
    board.evaluator.last_version = state["last_eval_version"]
    board.evaluator.ended = state["evals_ended"]
    for observer, observed in zip(board.observers, state["observers"], strict=True):
        observer.restore(observed)
    board.admission.version, board.admission.taken_in_window = board.settings.window_after(board.step)
    board.event("resumed", from_step=board.step)
    board.groups.restore(state["groups"], resumed.payloads, state["running_tokens"])
    for worker in board.admission.workers.values():
        worker.version = board.version - 1
