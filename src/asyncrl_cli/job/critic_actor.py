"""The critic with processes of its own: a scorer that also learns, and whose state is a part of the trainer's checkpoints.

    group main     start, load, score, learn, snapshot, restore, in the order in which they were called: what is scored after a
                   `learn` is scored by what that has learned
    group write    writes snapshots to disk, beside all else

Who waits for whom: as in scorer_actor.py; for snapshots and files weights.timeout_s at most, as the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from asyncrl_cli.job.calls import all_of
from asyncrl_cli.job.scorer_actor import CONCURRENCY_GROUPS as SCORER_GROUPS
from asyncrl_cli.job.scorer_actor import RayScorer, ScorerActor
from asyncrl_cli.job.step_share import arguments, taken
from asyncrl_cli.loop.ports import TrainBatch, TrainReport
from asyncrl_cli.loop.states import ExecutorReport, State
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.sharing import CRITIC, REF
from asyncrl_cli.storage import telling_storage
from asyncrl_cli.train.balance import RankPlan, plan_train_step, training_order

CONCURRENCY_GROUPS = SCORER_GROUPS | {"write": 1}


class CriticActor(ScorerActor):
    """Methods mirror those of `RayCritic`, per process."""

    @ray.method(concurrency_group="main")
    def learn(self, plan: RankPlan, names: Sequence[str], *given: Any) -> tuple[TrainReport, ExecutorReport]:
        """One train step on the groups of `plan.groups`. `given`: those of `step_share.arguments`."""
        with self._meter.doing(State.BUSY):
            payloads, scores = taken(plan, names, given)
            report = self._scorer.learn(plan, payloads, scores)
        return report, self._meter.report()

    @ray.method(concurrency_group="main")
    def snapshot(self, step: int) -> None:
        with self._meter.doing(State.BUSY, "a checkpoint's snapshot"):
            self._scorer.snapshot(step)

    @ray.method(concurrency_group="write")
    def write(self, step: int, directory: str) -> None:
        with telling_storage():
            self._scorer.write(step, Path(directory))

    @ray.method(concurrency_group="main")
    def restore(self, directory: str) -> None:
        """Load a checkpoint's state."""
        with self._meter.doing(State.BUSY, "a checkpoint to be read"):
            self._scorer.restore(Path(directory))


class RayCritic(RayScorer):
    """`loop.ports.Scorer` on all `CriticActor`s."""

    def __init__(self, name: str, make_actors: Callable[[], list[Any]], profile: Profile) -> None:
        super().__init__(name, make_actors, profile)
        alone = profile.trainer.model_copy(update={"sequence_parallel_size": 1})
        self._profile = profile.model_copy(update={"trainer": alone})

    async def learn(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        """The optimizer steps that the trainer makes, with the same groups in each."""
        minibatches = self._profile.async_training.require_batches
        groups = training_order(batch.groups, num_minibatches=minibatches, seed=self._profile.run.seed, step=batch.step)
        plans = plan_train_step(groups, self._profile, ranks=len(self.actors), step=batch.step, window=batch.window)
        names = (CRITIC, REF) if self._profile.algorithm.use_kl_in_reward else (CRITIC,)
        refs = [
            actor.learn.remote(plan, names, *arguments(batch, groups, plan, names))
            for actor, plan in zip(self.actors, plans, strict=True)
        ]
        call = f"what it learns in step {batch.step}"
        told: list[tuple[TrainReport, ExecutorReport]] = await all_of(
            self._answer(ref, call, process) for process, ref in enumerate(refs)
        )
        return told[0]

    async def snapshot(self, step: int) -> None:
        await self._all("snapshot", step, call=f"the snapshot of step {step}", limit=self._weights)

    async def write(self, step: int, directory: str) -> None:
        await self._all("write", step, directory, call=f"the checkpoint of step {step}", limit=self._weights)

    async def restore(self, directory: str) -> None:
        await self._all("restore", directory, call=f"the load of {directory}", limit=self._weights)
