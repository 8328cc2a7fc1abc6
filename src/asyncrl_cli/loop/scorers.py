"""The scorers of a run: each computes a column for every finished group, in the order in which groups can be taken, while others
are trained.

    finished ──> [unscored] ──score──> takeable ──> training

A finished group stays `finished` in the ledger while it is scored, and a take leaves it out as if it were still running: slots,
window and deadlines (admission.py) know nothing of scorers. Columns are in no checkpoint, and none is lost for good: groups are
scored again if their scorer dies before they are taken, or if a run resumes with them.

    ref      the reference's logprobs: never change
    reward   the reward model's scores: never change, and become part of the rewards when the group is taken
    prox     logprobs by the weights that the window begins with: loaded as soon as they are published; only groups that this window
             can still take are scored, and a column does not outlive its window
    critic   values by the critic that all train steps before have made: of the groups that the next step takes, once the critic has
             learned from the last one (which it does while the policy is trained), and no column outlives a take

A critic's state is nowhere else: its loss fails the run at once, as a trainer's does, and a resume goes on from a checkpoint.

A call takes as many groups as fill the scorer, so that a slow scorer is used well. It takes no more than a train step needs,
because the trainer may be waiting for those. There is one call at a time.
"""

from __future__ import annotations

import asyncio

from asyncrl_cli.errors import ExecutorLost
from asyncrl_cli.loop.attempts import Attempt
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.ports import Published, Scorer
from asyncrl_cli.loop.restarting import RestartableTasks
from asyncrl_cli.profile.sharing import CRITIC, PROX, REWARD

_REPORT_S = 1.0


class ScorerTasks(RestartableTasks):
    def __init__(self, board: Board, scorer: Scorer, tasks: asyncio.TaskGroup) -> None:
        super().__init__(board, scorer, tasks)
        self.scorer = scorer
        self._held = -1
        """`prox`: the version of its weights."""

    def begin(self) -> None:
        self.spawn(self._score, f"columns of {self.scorer.name}")
        self.spawn(self._follow, f"reports of {self.scorer.name}")

    def _lost(self, error: ExecutorLost) -> None:
        if self.scorer.name == CRITIC:
            raise error
        super()._lost(error)

    def _lose(self) -> None:
        """Its columns may be lost with its node: these groups are scored again. Rewards are values, and stay."""
        self._held = -1
        if self.scorer.name != REWARD:
            self._board.groups.columns_lost(self.scorer.name)

    def _give_back(self) -> None:
        """Nothing to take back."""

    async def _score(self) -> None:
        board, name = self._board, self.scorer.name
        while True:
            await board.changes.until(lambda: board.groups.may_score(name), name, "finished groups", (Change.GROUPS,))
            if name == PROX and self._held != board.version:
                await self._load_window()
                continue
            age, attempts = self._age(), self._next_call()
            groups, items = [attempt.outcome() for attempt in attempts], [attempt.prompt.item for attempt in attempts]
            with board.changes.waiting(name, f"the columns of {len(groups)} groups"):
                columns, report = await self.scorer.score(groups, items)
            if age == self._age():
                board.groups.scored(name, dict(zip([group.key for group in groups], columns, strict=True)))
            board.scorer_reported(name, report)
            board.changes.notify(Change.GROUPS)

    def _age(self) -> int:
        """It rises where columns of groups that have not been taken are of no use any more."""
        admission = self._board.admission
        taken_groups = admission.trained_groups + len(admission.ledger.training)
        return {PROX: admission.version, CRITIC: taken_groups}.get(self.scorer.name, 0)

    async def _load_window(self) -> None:
        """Load the weights that the window begins with, once they are published."""
        board, name = self._board, self.scorer.name

        def published() -> Published | None:
            newest = board.sync.newest
            return newest if newest is not None and newest.version == board.version else None

        def what() -> str:
            return f"version {board.version} to be published"

        newest = await board.changes.until(published, name, what, (Change.PUBLISHED,))
        with board.changes.waiting(name, f"version {newest.version} to be loaded"):
            await self.scorer.load(newest)
        self._held = newest.version

    def _next_call(self) -> list[Attempt]:
        """The first unscored groups: as many as fill the scorer, at least one, at most those of a train step."""
        chosen, tokens, num_groups = list[Attempt](), 0, self._board.schedule.step_groups
        for attempt in self._board.groups.unscored(self.scorer.name)[:num_groups]:
            tokens += sum(meta.prompt_tokens + meta.response_tokens for meta in attempt.outcome().trajectories)
            if chosen and tokens > self.scorer.call_tokens:
                break
            chosen.append(attempt)
        return chosen

    async def _follow(self) -> None:
        """Collects a report a second, and notices a scorer that dies while it has nothing to do."""
        while True:
            self._board.scorer_reported(self.scorer.name, await self.scorer.report())
            await asyncio.sleep(_REPORT_S)
