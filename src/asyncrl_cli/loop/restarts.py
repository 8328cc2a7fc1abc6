"""Restarts of rollout workers: what happens between a worker's failure and the first group on its next process.

    failed ──> down: admission closed to it, all that waits for it is cancelled ──> its prompts are requeued, its eval's too
        ──> (colocate: the trainer gives the resources back) ──> restart ──> load of the newest version ──> groups

However many of its calls fail at once, that is one failure: the first one makes the worker `down`, and a worker that is down
cannot fail. Nothing is trained twice, because the calls of the old process are cancelled before its prompts start again; what had
come back by then stays finished. Nothing starts on the next process before it has loaded: until then the worker is `loading`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from asyncrl_cli.errors import ExecutorFailed, ExecutorLost
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.ports import RolloutWorker

if TYPE_CHECKING:
    from asyncrl_cli.loop.rollouts import Rollouts

KEY = "rollout.max_restarts"


class Restarts:
    def __init__(self, board: Board, rollouts: Rollouts) -> None:
        self.are_lent = False
        """Colocate: the trainer has the resources, or they change hands."""
        self._board = board
        self._rollouts = rollouts
        self._left = dict.fromkeys((worker.name for worker in board.workers), board.profile.rollout.max_restarts)

    def failed(self, worker: RolloutWorker, error: ExecutorLost) -> None:
        """A call to the worker failed: restart it, or stop the run with that error if it has no restart left."""
        board, slots = self._board, self._board.admission.workers[worker.name]
        if slots.down:
            return
        if not self._left[worker.name]:
            if not board.profile.rollout.max_restarts and not board.stopping:
                board.event("warning", message=f"{worker.name} is not replaced: {KEY} = 0")
            board.stop(error)
            return
        slots.set_down(True)
        if board.stopping:
            board.event("warning", message=f"{error}; the run is stopping, so it is not restarted")
            return
        board.groups.tokens_discarded += board.reports.lost(worker.name, board.now_s())
        self._use_one(worker.name, error)
        self._rollouts.spawn(partial(self._restart, worker, self._rollouts.end_life(worker)), f"restart of {worker.name}")

    def _use_one(self, name: str, error: ExecutorFailed) -> None:
        board = self._board
        self._left[name] -= 1
        board.restarts += 1
        left, allowed = self._left[name], board.profile.rollout.max_restarts
        board.restarting[name] = f"{allowed - left} of {allowed}"
        board.event("lost", worker=name, error=str(error), restarts_left=left)
        board.event("warning", message=f"{str(error).rstrip('.')}; it is restarted ({allowed - left} of {KEY} = {allowed})")

    async def _restart(self, worker: RolloutWorker, ending: list[asyncio.Task[None]]) -> None:
        """Waits for the cancelled tasks, which end at once, then for the worker's start, which its port bounds."""
        board, name = self._board, worker.name
        if ending:
            await asyncio.wait(ending)
        self._give_back(name)
        began_s = board.now_s()
        if not await self._replace(worker):
            return
        board.admission.workers[name].set_down(False)
        del board.restarting[name]
        board.reports.returned(name, board.now_s())
        board.event("restarted", worker=name, restart_s=board.now_s() - began_s, restarts_left=self._left[name])
        self._rollouts.begin_life(worker)
        board.changes.notify()

    def _give_back(self, name: str) -> None:
        """What the worker's process had, others may have."""
        board = self._board
        board.sync.lost(name)
        version = board.evaluator.worker_lost()
        if version is not None:
            message = f"the eval of version {version} was lost with {name}: it begins again on the next version that a worker loads"
            board.event("warning", message=message)
        board.groups.lost(name)
        board.changes.notify()

    async def _replace(self, worker: RolloutWorker) -> bool:
        """A fresh process in the worker's place, tried again while restarts are left. False at a stop."""
        board, who = self._board, f"{worker.name} (restart)"
        while True:
            lender = "the trainer to give the resources back"
            await board.changes.until(lambda: not self.are_lent or board.stopping, who, lender, (Change.RUN,))
            if board.stopping:
                return False
            try:
                with board.changes.waiting(who, "a fresh process"):
                    await worker.restart()
                return True
            except ExecutorFailed as error:
                if not self._left[worker.name]:
                    raise
                self._use_one(worker.name, error)
