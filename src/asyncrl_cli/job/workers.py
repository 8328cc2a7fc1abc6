"""Starts and ends the actors of a job, all of them at once, each in its bundle (placing.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import ray

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.checkpoint.payloads import read_payloads
from asyncrl_cli.checkpoint.sealed import Checkpoint
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.reward_spec import RewardSpec
from asyncrl_cli.job.calls import all_of
from asyncrl_cli.job.critic_actor import CriticActor, RayCritic
from asyncrl_cli.job.placing import Options, Say, is_local_session, placed, used_nodes
from asyncrl_cli.job.preflight import Wanted, examined, refuse
from asyncrl_cli.job.rank_actors import RayRanks
from asyncrl_cli.job.ray_ports import RayRolloutWorker, RayTrainer
from asyncrl_cli.job.rollout_actor import RolloutActor
from asyncrl_cli.job.scorer_actor import RayScorer, ScorerActor
from asyncrl_cli.job.trainer_actor import WEIGHTS_DIR, TrainerActor
from asyncrl_cli.job.transports import clear
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan, place_of
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.profile.sharing import CRITIC
from asyncrl_cli.tasks.tool_class import ToolClass

STOP_TIMEOUT_S = 1.0
"""A kill after that loses nothing of value: checkpoints and publishes were awaited. A second Ctrl-C must end
a run in 5 s."""


@asynccontextmanager
async def started_workers(
    plan: JobPlan,
    profile: Profile,
    model_dir: Path,
    reward: RewardSpec,
    tool_class: ToolClass | None = None,
    *,
    further: Mapping[str, str],
    run_dir: Path,
    log_dir: Path,
    probe_items: Sequence[Item] = (),
    checkpoint: Checkpoint | None = None,
    progress: Say = lambda text: None,
    warn: Say = lambda text: None,
) -> AsyncIterator[tuple[RayTrainer, list[RayRolloutWorker], list[Any], list[RayScorer]]]:
    """Start all trainer ranks, rollout workers and scorers. Yields, when all are ready: trainer, workers,
    handles of the checkpoint's groups, scorers.

    Workers hold the weights of `model_dir` until the loop has published a version. `further`: what
    `further_models` found. `log_dir`: where each actor writes `<name>.log`. `probe_items`: the probes are
    pieces of their prompts. `warn` gets warnings of nodes and of the trainer. Leaving the block ends the
    actors and releases the bundles, within about `STOP_TIMEOUT_S`.

    Raises:
        PreflightError: no room for the plan within `placement.timeout_s`, or a node that cannot be used.
        ExecutorFailed: an actor failed to start, or not all were ready in time.
        RefusedError: the checkpoint belongs to another model.
    """
    progress("placing the job")
    async with placed(plan, timeout_s=profile.placement.timeout_s, say=progress) as options:
        if not is_local_session():
            found = await examined(
                used_nodes(plan, options), Wanted.of(profile, model_dir, further, run_dir), progress
            )
            for warning in refuse(found):
                warn(warning)
        await asyncio.to_thread(clear, run_dir / WEIGHTS_DIR)
        is_direct = profile.weights.transport in DIRECT_TRANSPORTS
        place = place_of(plan, ROLLOUT, model_dir, checkpoint.version if checkpoint else 0)
        trainer = make_trainer(
            plan, profile, model_dir, further, options, probe_items, run_dir=run_dir, log_dir=log_dir
        )
        makers = makers_of(plan, ROLLOUT, RolloutActor, options, log_dir)
        workers: list[RayRolloutWorker] = []
        scorers = [
            make_scorer(task, plan, profile, model_dir, further, options, log_dir) for task in plan.scorers
        ]
        trainer.critic = next((scorer for scorer in scorers if isinstance(scorer, RayCritic)), None)
        try:
            progress(f"starting {plan}")
            if plan.shares_gpus:
                # each rank has its GPU before a worker is given the rest of one (RANK_SHARE)
                await trainer.prepare()
            workers += [
                RayRolloutWorker(
                    name, partial(make, profile, place, reward, tool_class), profile, place.workers
                )
                for name, make in makers.items()
            ]
            # vLLM counts what others take of a GPU while it measures as its own, so the trainer takes none
            # before vLLM is ready.
            turns = [workers, [trainer, *scorers]] if plan.shares_gpus else [[trainer, *workers, *scorers]]
            for executors in turns:
                await all_of(_started(executor, progress) for executor in executors)
            if is_direct:
                # one by one: making an NCCL group changes rank 0's environment for a moment
                for worker in workers:
                    progress(f"connecting {worker.name} to trainer-0 for weights")
                    await worker.connect(trainer.actors[0])
            for warning in trainer.warnings:
                warn(warning)
            yield (
                trainer,
                workers,
                await _restored(trainer, checkpoint, progress) if checkpoint else [],
                scorers,
            )
        finally:
            await _stop(trainer, workers, scorers)
            await asyncio.to_thread(clear, run_dir / WEIGHTS_DIR)


def make_trainer(
    plan: JobPlan,
    profile: Profile,
    model_dir: Path,
    further: Mapping[str, str],
    options: Options,
    probe_items: Sequence[Item] = (),
    *,
    run_dir: Path,
    log_dir: Path,
) -> RayTrainer:
    """The trainer with the actors of its ranks, not yet started."""
    num_direct = plan.rollout_workers if profile.weights.transport in DIRECT_TRANSPORTS else 1
    threads = {**TrainerActor.THREADS, "direct": num_direct}
    makers = makers_of(plan, TRAINER, TrainerActor, options, log_dir, concurrency_groups=threads)
    place = replace(place_of(plan, TRAINER, model_dir), **further)
    ranks = [make(profile, place, run_dir.absolute(), probe_items) for make in makers.values()]
    return RayTrainer(ranks, profile, samples_dir=run_dir / "samples")


def make_scorer(
    task: str,
    plan: JobPlan,
    profile: Profile,
    model_dir: Path,
    further: Mapping[str, str],
    options: Options,
    log_dir: Path,
) -> RayScorer:
    """A scorer with the actors of its processes, not yet started."""
    place = replace(place_of(plan, task, model_dir), **further)
    actor, ports = (CriticActor, RayCritic) if task == CRITIC else (ScorerActor, RayScorer)
    makers = makers_of(plan, task, actor, options, log_dir, concurrency_groups=actor.THREADS)
    return ports(task, lambda: [make(task, profile, place) for make in makers.values()], profile)


def makers_of(
    plan: JobPlan, role: str, actor: type, options: Options, log_dir: Path, **settings: Any
) -> dict[str, Callable[..., Any]]:
    """By worker name, a function that creates its actor in its bundle, with its own log. `settings` are for
    `ray.remote`."""
    actor_class = ray.remote(max_restarts=0, max_task_retries=0, **settings)(actor)
    makers = {}
    for index in range(plan.role(role).workers):
        name = f"{role}-{index}"
        make = actor_class.options(**options(role, index)).remote
        makers[name] = partial(make, index, log_path=log_dir.absolute() / f"{name}.log")
    return makers


async def _started(executor: RayRanks | RayRolloutWorker, say: Say) -> None:
    await executor.start()
    say(f"{executor.name} is ready")


async def _restored(trainer: RayTrainer, checkpoint: Checkpoint, progress: Say) -> list[Any]:
    """Load the trainer's state. Returns handles of the arrays, in the order of the file. The loop publishes
    the checkpoint's version."""
    progress(f"restoring {checkpoint.directory.name}")
    await trainer.restore(checkpoint.directory)
    payloads = await asyncio.to_thread(read_payloads, checkpoint.directory)
    first_kept = len(payloads) - sum(
        bool(entry.get("kept")) for entry in checkpoint.loop_state["groups"]["running"]
    )
    return [
        (ray.put([payload] if index >= first_kept else payload),) for index, payload in enumerate(payloads)
    ]


async def _stop(
    trainer: RayTrainer, workers: Sequence[RayRolloutWorker], scorers: Sequence[RayScorer]
) -> None:
    """Ask all actors to stop, wait `STOP_TIMEOUT_S` in total, then kill them. Does not raise for an actor
    that is already dead."""
    stops = [executor.stop(STOP_TIMEOUT_S) for executor in (trainer, *workers, *scorers)]
    outcomes = await asyncio.gather(*stops, return_exceptions=True)
    for actor in chain(
        trainer.actors, (worker.actor for worker in workers), *(scorer.actors for scorer in scorers)
    ):
        ray.kill(actor)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, AsyncrlError):
            raise outcome
