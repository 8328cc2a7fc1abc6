"""The scorers of a run. While other groups are trained, each scorer computes a column for every finished
group, in the order in which groups can be taken.

    finished ──> [unscored] ──score──> takeable ──> training

A group stays `finished` in the ledger while it is scored, and takes skip it as if it were still running. The
rules on slots, window and deadlines (admission.py) know nothing of scorers. Checkpoints hold no columns: if a
scorer dies before its groups are taken, or a run resumes with finished groups, these are scored again.

    ref      logprobs of the reference policy. They never change.
    teacher  logprobs of the teachers. They never change.
    reward   scores of the reward model. They never change, and are added to the rewards when the group is
             taken.
    prox     logprobs under the weights that the window begins with, loaded as soon as these are published.
             Only groups that this window can still take are scored. A column is valid for its window only.
    others   fields that the user's own classes compute (`task.scorers`). They never change.
    critic   values of the critic after all earlier train steps. It learns from a step while the policy is
             trained on it; then it scores the groups that the next step takes. A column is valid until the
             next take only.

The state of a critic exists only in its process: its loss fails the run at once, as a trainer's does; resume
from a checkpoint.

A call has enough groups to fill the scorer, so that a slow scorer is used well. It has no more than a train
step needs, because the trainer may be waiting for those. There is one call at a time.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from dataclasses import replace

from asyncrl_cli.base.errors import ExecutorLost
from asyncrl_cli.contracts.ports import Scorer
from asyncrl_cli.contracts.prompt_group import TrainBatch, TrainReport
from asyncrl_cli.loop.changes import Change
from asyncrl_cli.loop.executor_tasks import ExecutorTasks
from asyncrl_cli.loop.ledger import Attempt
from asyncrl_cli.loop.run_state import RunState
from asyncrl_cli.measure.states import ExecutorReport
from asyncrl_cli.profile.arithmetic import CRITIC, PROX, REWARD

_REPORT_S = 1.0


class ScorerTasks(ExecutorTasks):
    def __init__(self, run: RunState, scorer: Scorer, tasks: asyncio.TaskGroup) -> None:
        super().__init__(run, scorer, tasks)
        self.scorer = scorer
        self._version = -1
        """`prox` only: the version of its weights."""

    def begin(self) -> None:
        self.spawn(self._score, f"columns of {self.scorer.name}")
        self.spawn(self._follow, f"reports of {self.scorer.name}")

    def lost(self, error: ExecutorLost) -> None:
        if self.scorer.name == CRITIC:
            raise error
        super().lost(error)

    def take_back(self) -> None:
        """Its columns may be lost with its node, so their groups are scored again. Rewards are held by value,
        and stay."""
        self._version = -1
        if self.scorer.name != REWARD:
            self._run.groups.columns_lost(self.scorer.name)

    async def learn(self, batch: TrainBatch, needed: AbstractContextManager[object]) -> TrainReport:
        """Let a separate critic learn beside the policy. Only then does it score the groups of the next
        step. `needed` keeps the batch's data until then."""
        run, name = self._run, self.scorer.name
        what = f"what it learns in step {batch.step}"
        with needed, run.changes.waiting(f"{name} (learning)", what):
            learned, report = await self.scorer.learn(batch)
        run.groups.is_learning = False
        self._reported(report)
        run.changes.notify(Change.GROUPS)
        return learned

    async def _score(self) -> None:
        run, groups, name = self._run, self._run.groups, self.scorer.name

        def may_score() -> bool:
            """Whether there are groups to score. The critic scores none while it learns."""
            return bool(groups.unscored(name)) and not (name == CRITIC and groups.is_learning)

        while True:
            await run.changes.until(may_score, name, "finished groups", (Change.GROUPS,))
            if name == PROX and self._version != run.version:
                # The weights that the window begins with. They may not be published yet, and when they are
                # loaded it may be another window.
                newest = await run.changes.until(
                    lambda: one if (one := run.sync.newest) and one.version == run.version else None,
                    name,
                    lambda: f"version {run.version} to be published",
                    (Change.PUBLISHED,),
                )
                with run.changes.waiting(name, f"version {newest.version} to be loaded"):
                    await self.scorer.load(newest)
                self._version = newest.version
                continue
            age, attempts = self._age(), self._next_call()
            results, items = [one.outcome() for one in attempts], [one.prompt.item for one in attempts]
            with run.changes.waiting(name, f"the columns of {len(results)} groups"):
                columns, report = await self.scorer.score(results, items)
            if age == self._age():
                groups.scored(name, dict(zip([one.key for one in attempts], columns, strict=True)))
            self._reported(report)
            run.changes.notify(Change.GROUPS)
            groups.check_limits()

    def _age(self) -> int:
        """A number that rises whenever the columns of untaken groups become useless."""
        admission = self._run.admission
        taken_groups = admission.trained_groups + len(admission.ledger.training)
        return {PROX: admission.version, CRITIC: taken_groups}.get(self.scorer.name, 0)

    def _next_call(self) -> list[Attempt]:
        """The first unscored groups: as many as fill the scorer, at least one, at most as many as a train
        step takes."""
        chosen, tokens, num_groups = list[Attempt](), 0, self._run.settings.schedule.step_groups
        for attempt in self._run.groups.unscored(self.scorer.name)[:num_groups]:
            trajectories = attempt.outcome().trajectories
            tokens += sum(meta.prompt_tokens + meta.response_tokens for meta in trajectories)
            if chosen and tokens > self.scorer.call_tokens:
                break
            chosen.append(attempt)
        return chosen

    async def _follow(self) -> None:
        """Fetch a report every second, which also detects a scorer that dies while it has nothing to do."""
        while True:
            self._reported(await self.scorer.report())
            await asyncio.sleep(_REPORT_S)

    def _reported(self, report: ExecutorReport) -> None:
        """Record a report, with the number of groups that wait for the scorer."""
        run, name = self._run, self.scorer.name
        gauges = report.gauges | {"waiting_groups": float(len(run.groups.unscored(name)))}
        run.executors.reports.add(replace(report, gauges=gauges), run.now_s(), name)
