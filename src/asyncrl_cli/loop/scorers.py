"""The scorers of a run: each computes a column for every finished group, in the order in which groups can be taken, while others
are trained.

    finished ──> [unscored] ──score──> takeable ──> training

A finished group stays `finished` in the ledger while it is scored, and a take leaves it out as if it were still running: slots,
window and deadlines (admission.py) know nothing of scorers. Columns are in no checkpoint, and none is lost for good: a group whose
call fails with its scorer, or that a run resumes with, is scored again.

A call takes as many groups as fill the scorer, so that a slow one, for which groups queue, is used well. There is one call
at a time.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from asyncrl_cli.loop.attempts import Attempt
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.ports import Scorer
from asyncrl_cli.loop.restarting import RestartableTasks

_REPORT_S = 1.0


class ScorerTasks(RestartableTasks):
    def __init__(self, board: Board, scorer: Scorer, tasks: asyncio.TaskGroup) -> None:
        super().__init__(board, scorer, tasks)
        self.scorer = scorer

    def begin(self) -> None:
        self.spawn(self._score, f"columns of {self.scorer.name}")
        self.spawn(self._follow, f"reports of {self.scorer.name}")

    def _lose(self) -> None:
        """Nothing to take back: a group without its column is unscored."""

    def _give_back(self) -> None:
        """Nothing to take back."""

    async def _score(self) -> None:
        board, name = self._board, self.scorer.name
        while True:
            await board.changes.until(lambda: bool(board.groups.unscored(name)), name, "finished groups", (Change.GROUPS,))
            groups = [attempt.outcome() for attempt in self._next_call()]
            with board.changes.waiting(name, f"the columns of {len(groups)} groups"):
                columns, report = await self.scorer.score(groups)
            keys = [group.key for group in groups]
            board.groups.scored(name, dict(zip(keys, columns, strict=True)))
            waiting = {"waiting_groups": float(len(board.groups.unscored(name)))}
            board.reports.add(replace(report, gauges=report.gauges | waiting), board.now_s(), name)
            board.changes.notify(Change.GROUPS)

    def _next_call(self) -> list[Attempt]:
        """The first unscored groups: as many as fill the scorer, at least one."""
        chosen, tokens = list[Attempt](), 0
        for attempt in self._board.groups.unscored(self.scorer.name):
            tokens += sum(meta.prompt_tokens + meta.response_tokens for meta in attempt.outcome().trajectories)
            if chosen and tokens > self.scorer.call_tokens:
                break
            chosen.append(attempt)
        return chosen

    async def _follow(self) -> None:
        """Collects a report a second, and notices a scorer that dies while it has nothing to do."""
        while True:
            report = await self.scorer.report()
            self._board.reports.add(report, self._board.now_s(), self.scorer.name)
            await asyncio.sleep(_REPORT_S)
