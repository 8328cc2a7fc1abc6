"""The critic in its own processes: a scorer that also learns, and whose state is part of the trainer's
checkpoints.

    group main     start, load, score, learn, snapshot, restore, in the order in which they were called: a `score` after a `learn`
                   uses the updated weights
    group write    writes snapshots to disk while everything else goes on

Who waits for whom: as in scorer_actor.py; for a train step at most trainer.step_timeout_s, for snapshots and
files checkpoint.timeout_s, as in the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from asyncrl_cli.base.storage import telling_storage
from asyncrl_cli.contracts.ports import Cut
from asyncrl_cli.contracts.train_step import TrainBatch, TrainReport
from asyncrl_cli.job.rank_actors import taken
from asyncrl_cli.job.scorer_actor import RayScorer, ScorerActor
from asyncrl_cli.measure.states import ExecutorReport, State
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.sharing import CRITIC, REF
from asyncrl_cli.train.step_plan import RankPlan


class CriticActor(ScorerActor):
    """One process. Its methods mirror `loop.ports.Scorer` and, for its part of a checkpoint, those of
    `TrainerActor`."""

    THREADS = ScorerActor.THREADS | {"write": 1}

    @ray.method(concurrency_group="main")
    def learn(self, plan: RankPlan, names: Sequence[str], *given: Any) -> tuple[TrainReport, ExecutorReport]:
        """One train step on the groups of `plan.groups`. `given`: their columns and parts."""
        with self._meter.doing(State.BUSY):
            payloads, columns = taken(plan, names, given)
            report = self._scorer.learn(plan, payloads, columns)
        return report, self._meter.report()

    @ray.method(concurrency_group="main")
    def snapshot(self, step: int) -> None:
        with self._meter.doing(State.BUSY, "a checkpoint's snapshot"):
            self._scorer.snapshot(step)

    @ray.method(concurrency_group="write")
    def write(self, directory: str, cut: Cut) -> None:
        with telling_storage():
            self._scorer.write(cut.step, Path(directory))

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
        """Make the same optimizer steps as the trainer, each with the same groups."""
        names = (CRITIC, REF) if self._profile.algorithm.use_kl_in_reward else (CRITIC,)
        *_, given = self._shares(batch, names)
        refs = [actor.learn.remote(*own) for actor, own in zip(self.actors, given, strict=True)]
        told: list[tuple[TrainReport, ExecutorReport]] = await self._answers(
            f"what it learns in step {batch.step}", refs, self._steps
        )
        return told[0]
