"""The scorers of a run. While other groups are trained, each scorer computes a column for every finished
group, in the order in which groups can be taken.

    finished ──> [unscored] ──score──> takeable ──> training

A group stays `finished` in the ledger while it is scored, and takes skip it as if it were still running. The
rules on slots, window and deadlines (admission.py) know nothing of scorers. Checkpoints hold no columns: if a
scorer dies before its groups are taken, or a run resumes with finished groups, these are scored again.

    ref      logprobs of the reference policy. They never change.
    reward   scores of the reward model. They never change, and are added to the rewards when the group is taken.
    prox     logprobs under the weights that the window begins with, loaded as soon as these are published. Only groups that this
             window can still take are scored. A column is valid for its window only.
    critic   values of the critic after all earlier train steps. It learns from a step while the policy is trained on it; then it
             scores the groups that the next step takes. A column is valid until the next take only.

The state of a critic exists only in its process: its loss fails the run at once, as a trainer's does; resume
from a checkpoint.

A call has enough groups to fill the scorer, so that a slow scorer is used well. It has no more than a train
step needs, because the trainer may be waiting for those. There is one call at a time.
"""

from __future__ import annotations

import asyncio

from asyncrl_cli.base.errors import ExecutorLost
from asyncrl_cli.contracts.attempts import Attempt
from asyncrl_cli.contracts.ports import Published, Scorer
from asyncrl_cli.loop.board import Board
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.restarting import RestartableTasks
from asyncrl_cli.profile.sharing import CRITIC, PROX, REWARD

_REPORT_S = 1.0


class ScorerTasks(RestartableTasks):
    def __init__(self, board: Board, scorer: Scorer, tasks: asyncio.TaskGroup) -> None:
        super().__init__(board, scorer, tasks)
        self.scorer = scorer
        self._held = -1
        """`prox` only: the version of its weights."""

    def begin(self) -> None:
        self.spawn(self._score, f"columns of {self.scorer.name}")
        self.spawn(self._follow, f"reports of {self.scorer.name}")

    def _lost(self, error: ExecutorLost) -> None:
        if self.scorer.name == CRITIC:
            raise error
        super()._lost(error)

    def _lose(self) -> None:
        """Its columns may be lost with its node, so their groups are scored again. Rewards are held by value,
        and stay."""
        self._held = -1
        if self.scorer.name != REWARD:
            self._board.groups.columns_lost(self.scorer.name)

    def _give_back(self) -> None:
        """Nothing to take back."""

    async def _score(self) -> None:
        board, name = self._board, self.scorer.name
        while True:
            await board.changes.until(
                lambda: board.groups.may_score(name), name, "finished groups", (Change.GROUPS,)
            )
            if name == PROX and self._held != board.version:
                await self._load_window()
                continue
            age, attempts = self._age(), self._next_call()
            groups, items = (
                [attempt.outcome() for attempt in attempts],
                [attempt.prompt.item for attempt in attempts],
            )
            with board.changes.waiting(name, f"the columns of {len(groups)} groups"):
                columns, report = await self.scorer.score(groups, items)
            if age == self._age():
                board.groups.scored(name, dict(zip([group.key for group in groups], columns, strict=True)))
            board.scorer_reported(name, report)
            board.changes.notify(Change.GROUPS)
            board.groups.check_limits()

    def _age(self) -> int:
        """A number that rises whenever the columns of untaken groups become useless."""
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
        """The first unscored groups: as many as fill the scorer, at least one, at most as many as a train
        step takes."""
        chosen, tokens, num_groups = list[Attempt](), 0, self._board.schedule.step_groups
        for attempt in self._board.groups.unscored(self.scorer.name)[:num_groups]:
            tokens += sum(
                meta.prompt_tokens + meta.response_tokens for meta in attempt.outcome().trajectories
            )
            if chosen and tokens > self.scorer.call_tokens:
                break
            chosen.append(attempt)
        return chosen

    async def _follow(self) -> None:
        """Fetch a report every second, which also detects a scorer that dies while it has nothing to do."""
        while True:
            self._board.scorer_reported(self.scorer.name, await self.scorer.report())
            await asyncio.sleep(_REPORT_S)
