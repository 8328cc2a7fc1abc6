"""Starting and ending the actors of a job: all at once, each in its bundle, with one deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray

from asyncrl_cli.checkpoint.find import Checkpoint
from asyncrl_cli.checkpoint.payloads import read_payloads
from asyncrl_cli.errors import AsyncrlError
from asyncrl_cli.job.calls import all_of
from asyncrl_cli.job.placement import Placement, place
from asyncrl_cli.job.ports import RayRolloutWorker, RayTrainer
from asyncrl_cli.job.rollout_actor import RolloutActor
from asyncrl_cli.job.trainer_actor import CONCURRENCY_GROUPS, WEIGHTS_DIR, TrainerActor
from asyncrl_cli.job.transports import clear
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan, place_of
from asyncrl_cli.profile.place import Place
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.tasks.scoring import RewardSpec

STOP_TIMEOUT_S = 1.0
"""A kill loses nothing of value: checkpoints and publishes were awaited; and a second Ctrl-C must be out in 5 s."""
NEVER_AGAIN = {"max_restarts": 0, "max_task_retries": 0}

Say = Callable[[str], None]


@asynccontextmanager
async def started_workers(
    plan: JobPlan,
    profile: Profile,
    model_dir: Path,
    reward: RewardSpec,
    *,
    run_dir: Path,
    log_dir: Path,
    checkpoint: Checkpoint | None = None,
    progress: Say = lambda text: None,
) -> AsyncIterator[tuple[RayTrainer, list[RayRolloutWorker], list[Any]]]:
    """All trainer ranks and rollout workers, placed and ready, and the payloads of the checkpoint's finished groups.

    Workers hold the weights of `model_dir` until the loop has published a version. `log_dir`: where each actor writes
    `<name>.log`. Leaving the block ends the actors and gives the bundles back, within about `STOP_TIMEOUT_S`.

    Raises:
        PreflightError: no room for the plan within `placement.timeout_s`.
        ExecutorFailed: an actor failed to start, or not all were ready in time.
        RefusedError: the checkpoint is of another model.
    """
    progress("placing the job")
    placement = await place(plan, timeout_s=profile.placement.timeout_s)
    try:
        await asyncio.to_thread(clear, run_dir / WEIGHTS_DIR)
        ranks = _trainer_actors(placement, profile, model_dir, run_dir.absolute(), log_dir.absolute())
        trainer = RayTrainer(ranks, profile, samples_dir=run_dir / "samples")
        version = checkpoint.version if checkpoint else 0
        workers = _rollout_workers(placement, profile, place_of(plan, ROLLOUT, model_dir, version), reward, log_dir.absolute())
        try:
            progress(f"starting {plan}")
            starts = [_started(trainer.start(), "trainer", progress)]
            await all_of([*starts, *(_started(worker.start(), worker.name, progress) for worker in workers)])
            if profile.weights.transport in DIRECT_TRANSPORTS:
                await _connect(trainer, workers, progress)
            yield trainer, workers, await _restore(trainer, checkpoint, progress) if checkpoint else []
        finally:
            await stop_workers(trainer, workers)
            await asyncio.to_thread(clear, run_dir / WEIGHTS_DIR)
    finally:
        placement.remove()


async def _connect(trainer: RayTrainer, workers: Sequence[RayRolloutWorker], progress: Say) -> None:
    """One after the other: making an NCCL group changes rank 0's environment for a moment."""
    for worker in workers:
        progress(f"{worker.name} and trainer-0 agree on how weights come")
        await worker.connect(trainer.actors[0])


async def _restore(trainer: RayTrainer, checkpoint: Checkpoint, progress: Say) -> list[Any]:
    """The trainer's state, and the finished groups' arrays; the loop publishes the checkpoint's version itself."""
    progress(f"restoring {checkpoint.directory.name}")
    await trainer.load(checkpoint.directory)
    return [ray.put(payload) for payload in await asyncio.to_thread(read_payloads, checkpoint.directory)]


async def stop_workers(trainer: RayTrainer, workers: Sequence[RayRolloutWorker]) -> None:
    """End the actors: asked first, for `STOP_TIMEOUT_S` together; killed then. Never raises for a dead one."""
    stops = [trainer.stop(STOP_TIMEOUT_S), *(worker.stop(STOP_TIMEOUT_S) for worker in workers)]
    outcomes = await asyncio.gather(*stops, return_exceptions=True)
    for actor in [*trainer.actors, *(worker.actor for worker in workers)]:
        ray.kill(actor)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, AsyncrlError):
            raise outcome


async def _started(start: Coroutine[Any, Any, None], name: str, say: Say) -> None:
    await start
    say(f"{name} is ready")


def _trainer_actors(placement: Placement, profile: Profile, model_dir: Path, run_dir: Path, log_dir: Path) -> list[Any]:
    plan, direct = placement.plan, profile.weights.transport in DIRECT_TRANSPORTS
    groups = CONCURRENCY_GROUPS | {"direct": plan.role(ROLLOUT).workers if direct else 1}
    actor_class = ray.remote(concurrency_groups=groups, **NEVER_AGAIN)(TrainerActor)
    place = place_of(plan, TRAINER, model_dir)
    return [
        actor_class.options(**placement.options(TRAINER, rank)).remote(
            rank, profile, place, run_dir=run_dir, log_path=log_dir / f"trainer-{rank}.log"
        )
        for rank in range(place.workers)
    ]


def _rollout_workers(
    placement: Placement, profile: Profile, place: Place, reward: RewardSpec, log_dir: Path
) -> list[RayRolloutWorker]:
    actor_class = ray.remote(**NEVER_AGAIN)(RolloutActor)
    workers: list[RayRolloutWorker] = []
    for index in range(place.workers):
        name = f"rollout-{index}"
        make = actor_class.options(**placement.options(ROLLOUT, index)).remote
        make_actor = partial(make, name, profile, place, reward, log_dir / f"{name}.log")
        workers.append(RayRolloutWorker(name, make_actor, profile, place.workers))
    return workers
