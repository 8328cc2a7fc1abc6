"""Starting and ending the actors of a job: all at once, each in its bundle, with one deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from asyncrl_cli.checkpoint.find import Checkpoint
from asyncrl_cli.checkpoint.payloads import read_payloads
from asyncrl_cli.errors import AsyncrlError
from asyncrl_cli.job.calls import all_of
from asyncrl_cli.job.placement import Placement, place
from asyncrl_cli.job.ports import RayRolloutWorker, RayTrainer, put_payloads
from asyncrl_cli.job.rollout_actor import RolloutActor
from asyncrl_cli.job.trainer_actor import CONCURRENCY_GROUPS, WEIGHTS_DIR, TrainerActor
from asyncrl_cli.job.transports import clear
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan, place_of
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.tasks.scoring import RewardSpec

START_TIMEOUT_S = 600.0
"""Imports, a large model's weights from a slow disk, an engine's memory profiling."""
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
    log_dir: Path | None = None,
    checkpoint: Checkpoint | None = None,
    progress: Say = lambda text: None,
    timeout_s: float = START_TIMEOUT_S,
) -> AsyncIterator[tuple[RayTrainer, list[RayRolloutWorker], list[Any]]]:
    """All trainer ranks and rollout workers, placed and ready, and the payloads of the checkpoint's finished groups.

    Workers hold the weights of `model_dir` until the loop has published a version. `log_dir`: where each actor writes
    `<name>.log`. Leaving the block ends the actors and gives the bundles back, within about `STOP_TIMEOUT_S`.

    Raises:
        PreflightError: no room for the plan within `placement.timeout_s`.
        ExecutorFailed: an actor failed to start, or not all were ready within `timeout_s`.
        RefusedError: the checkpoint is of another model.
    """
    progress("placing the job")
    placement = await place(plan, timeout_s=profile.placement.timeout_s)
    try:
        crew = _Crew(plan=plan, profile=profile, model_dir=model_dir, run_dir=run_dir, log_dir=log_dir)
        await asyncio.to_thread(clear, run_dir / WEIGHTS_DIR)
        trainer = RayTrainer(_trainer_actors(crew, placement), profile, samples_dir=run_dir / "samples")
        workers = _rollout_workers(crew, placement, reward, checkpoint.version if checkpoint else 0, timeout_s)
        try:
            progress(f"starting {plan}")
            starts = [_started(trainer.start(timeout_s), "trainer", progress)]
            starts += [_started(worker.start(timeout_s), worker.name, progress) for worker in workers]
            await all_of(starts)
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
    return put_payloads(await asyncio.to_thread(read_payloads, checkpoint.directory))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crew:
    """What all actors of a job have in common."""

    plan: JobPlan
    profile: Profile
    model_dir: Path
    run_dir: Path
    log_dir: Path | None

    def log_path(self, name: str) -> Path | None:
        return None if self.log_dir is None else (self.log_dir / f"{name}.log").absolute()


def _trainer_actors(crew: _Crew, placement: Placement) -> list[Any]:
    role = crew.plan.role(TRAINER)
    place = place_of(crew.plan, TRAINER, crew.model_dir)
    direct = crew.profile.weights.transport in DIRECT_TRANSPORTS
    groups = CONCURRENCY_GROUPS | {"direct": crew.plan.role(ROLLOUT).workers if direct else 1}
    actor_class = ray.remote(concurrency_groups=groups, **NEVER_AGAIN)(TrainerActor)
    return [
        actor_class.options(**placement.options(TRAINER, rank)).remote(
            rank,
            crew.profile,
            place,
            run_dir=crew.run_dir.absolute(),
            log_path=crew.log_path(f"trainer-{rank}"),
        )
        for rank in range(role.workers)
    ]


def _rollout_workers(
    crew: _Crew, placement: Placement, reward: RewardSpec, version: int, timeout_s: float
) -> list[RayRolloutWorker]:
    place = place_of(crew.plan, ROLLOUT, crew.model_dir, version)
    actor_class = ray.remote(**NEVER_AGAIN)(RolloutActor)
    workers: list[RayRolloutWorker] = []
    for index in range(place.workers):
        name = f"rollout-{index}"
        make = actor_class.options(**placement.options(ROLLOUT, index)).remote
        make_actor = partial(make, name, crew.profile, place, reward, crew.log_path(name))
        workers.append(RayRolloutWorker(name, make_actor, crew.profile, restart_timeout_s=timeout_s, workers=place.workers))
    return workers
