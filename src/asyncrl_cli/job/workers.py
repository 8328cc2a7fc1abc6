"""Starts and ends the actors of a job: reserves a placement-group bundle for each, then starts all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl_cli.checkpoint.payloads import read_payloads
from asyncrl_cli.checkpoint.sealed import Checkpoint
from asyncrl_cli.errors import AsyncrlError, PreflightError
from asyncrl_cli.job import reference_actor
from asyncrl_cli.job.adapters import RayRolloutWorker, RayTrainer
from asyncrl_cli.job.calls import all_of
from asyncrl_cli.job.lifeline import lost_session
from asyncrl_cli.job.reference_actor import RayReference, ReferenceActor
from asyncrl_cli.job.rollout_actor import RolloutActor
from asyncrl_cli.job.trainer_actor import CONCURRENCY_GROUPS, WEIGHTS_DIR, TrainerActor
from asyncrl_cli.job.transports import clear
from asyncrl_cli.models.resolve import further_models
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.job_plan import REF, ROLLOUT, TRAINER, Bundle, JobPlan, asked, check_fit, fitting_hint, place_of
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.tasks.scoring import RewardSpec
from asyncrl_cli.tasks.tool_class import ToolClass

STOP_TIMEOUT_S = 1.0
"""A kill after that loses nothing of value: checkpoints and publishes were awaited. A second Ctrl-C must end a run in 5 s."""
RELEASE_S = 1.0
"""How long Ray's view of free resources lags behind a removed placement group."""

Say = Callable[[str], None]
Options = Callable[[str, int], dict[str, Any]]
"""Ray's options for the actor of a role with an index: its bundle, CPUs and GPUs."""


@asynccontextmanager
async def started_workers(
    plan: JobPlan,
    profile: Profile,
    model_dir: Path,
    reward: RewardSpec,
    tool_class: ToolClass | None = None,
    *,
    run_dir: Path,
    log_dir: Path,
    checkpoint: Checkpoint | None = None,
    progress: Say = lambda text: None,
) -> AsyncIterator[tuple[RayTrainer, list[RayRolloutWorker], list[Any], list[RayReference]]]:
    """Start all trainer ranks, rollout workers and scorers; yield them ready: trainer, workers, handles of the checkpoint's
    finished groups, scorers.

    Workers hold the weights of `model_dir` until the loop has published a version. `log_dir`: where each actor writes
    `<name>.log`. Leaving the block ends the actors and gives the bundles back, within about `STOP_TIMEOUT_S`.

    Raises:
        PreflightError: no room for the plan within `placement.timeout_s`.
        ExecutorFailed: an actor failed to start, or not all were ready in time.
        RefusedError: the checkpoint is of another model.
    """
    progress("placing the job")
    async with placed(plan, timeout_s=profile.placement.timeout_s) as options:
        await asyncio.to_thread(clear, run_dir / WEIGHTS_DIR)
        is_direct = profile.weights.transport in DIRECT_TRANSPORTS
        place = place_of(plan, ROLLOUT, model_dir, checkpoint.version if checkpoint else 0)
        trainer = make_trainer(plan, profile, model_dir, options, run_dir=run_dir, log_dir=log_dir)
        makers = makers_of(plan, ROLLOUT, RolloutActor, options, log_dir)
        workers = [
            RayRolloutWorker(name, partial(make, profile, place, reward, tool_class), profile, place.workers)
            for name, make in makers.items()
        ]
        scorers = [make_reference(plan, profile, model_dir, options, log_dir)] if plan.ref_workers else []
        try:
            progress(f"starting {plan}")
            await all_of(_started(executor, progress) for executor in (trainer, *workers, *scorers))
            if is_direct:
                for worker in workers:  # one by one: making an NCCL group changes rank 0's environment for a moment
                    progress(f"{worker.name} and trainer-0 agree on how weights come")
                    await worker.connect(trainer.actors[0])
            yield trainer, workers, await _restored(trainer, checkpoint, progress) if checkpoint else [], scorers
        finally:
            await _stop(trainer, workers, scorers)
            await asyncio.to_thread(clear, run_dir / WEIGHTS_DIR)


def make_trainer(plan: JobPlan, profile: Profile, model_dir: Path, options: Options, *, run_dir: Path, log_dir: Path) -> RayTrainer:
    """The trainer with the actors of its ranks, not yet started."""
    num_direct = plan.rollout_workers if profile.weights.transport in DIRECT_TRANSPORTS else 1
    threads = CONCURRENCY_GROUPS | {"direct": num_direct}
    makers = makers_of(plan, TRAINER, TrainerActor, options, log_dir, concurrency_groups=threads)
    place = replace(place_of(plan, TRAINER, model_dir), **further_models(profile, model_dir))
    ranks = [make(profile, place, run_dir.absolute()) for make in makers.values()]
    return RayTrainer(ranks, profile, samples_dir=run_dir / "samples")


def make_reference(plan: JobPlan, profile: Profile, model_dir: Path, options: Options, log_dir: Path) -> RayReference:
    """The reference with the actors of its processes, not yet started."""
    place = replace(place_of(plan, REF, model_dir), **further_models(profile, model_dir))
    makers = makers_of(plan, REF, ReferenceActor, options, log_dir, concurrency_groups=reference_actor.CONCURRENCY_GROUPS)
    return RayReference(lambda: [make(profile, place) for make in makers.values()], profile)


def makers_of(
    plan: JobPlan, role: str, actor: type, options: Options, log_dir: Path, **settings: Any
) -> dict[str, Callable[..., Any]]:
    """By worker name, a function that makes its actor in its bundle, with a log of its own. `settings` are for `ray.remote`."""
    actor_class = ray.remote(max_restarts=0, max_task_retries=0, **settings)(actor)
    makers = {}
    for index in range(plan.role(role).workers):
        name = f"{role}-{index}"
        make = actor_class.options(**options(role, index)).remote
        makers[name] = partial(make, index, log_path=log_dir.absolute() / f"{name}.log")
    return makers


async def _started(executor: RayTrainer | RayRolloutWorker | RayReference, say: Say) -> None:
    await executor.start()
    say(f"{executor.name} is ready")


async def _restored(trainer: RayTrainer, checkpoint: Checkpoint, progress: Say) -> list[Any]:
    """Load the trainer's state; return handles of the finished groups, each whole. The loop publishes the checkpoint's version."""
    progress(f"restoring {checkpoint.directory.name}")
    await trainer.load(checkpoint.directory)
    return [(ray.put(payload),) for payload in await asyncio.to_thread(read_payloads, checkpoint.directory)]


async def _stop(trainer: RayTrainer, workers: Sequence[RayRolloutWorker], scorers: Sequence[RayReference]) -> None:
    """Ask all actors to stop, wait `STOP_TIMEOUT_S` in total, then kill them. Does not raise for an actor that is already dead."""
    stops = [executor.stop(STOP_TIMEOUT_S) for executor in (trainer, *workers, *scorers)]
    outcomes = await asyncio.gather(*stops, return_exceptions=True)
    for actor in chain(trainer.actors, (worker.actor for worker in workers), *(scorer.actors for scorer in scorers)):
        ray.kill(actor)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, AsyncrlError):
            raise outcome


@asynccontextmanager
async def placed(plan: JobPlan, *, timeout_s: float) -> AsyncIterator[Options]:
    """Reserve every bundle within `timeout_s` in total, else raise PreflightError; at once if the cluster is too small.

    Leaving the block gives the bundles back and kills what still runs in them.
    """
    check_fit(plan, ray_cluster())
    groups: dict[str, PlacementGroup] = {}

    def options(role_name: str, index: int) -> dict[str, Any]:
        """`num_gpus` is set although the bundle has the GPUs: else Ray leaves the actor's CUDA_VISIBLE_DEVICES empty."""
        role = plan.role(role_name)
        bundle = PlacementGroupSchedulingStrategy(placement_group=groups[role.placement_group], placement_group_bundle_index=index)
        return {"num_cpus": role.cpus_per_worker, "num_gpus": role.gpus_per_worker, "scheduling_strategy": bundle}

    try:
        try:
            async with asyncio.timeout(timeout_s):
                groups |= {name: _create(bundles) for name, bundles in plan.groups.items()}
                await asyncio.gather(*(_ready(group) for group in groups.values()))
        except TimeoutError:
            _remove(groups)
            await asyncio.sleep(RELEASE_S)
            free = ray_cluster(free=True)
            raise PreflightError(
                f"no room within placement.timeout_s = {timeout_s:g} s: {asked(plan)}; "
                f"the cluster has {ray_cluster()}, of which are free {free}",
                hint=f"wait until other jobs end; now this would fit: {fitting_hint(plan, free)}",
            ) from None
        yield options
    finally:
        _remove(groups)


def ray_cluster(*, free: bool = False) -> ClusterResources:
    """All resources of the connected cluster's living nodes; with `free`, only those that no job uses now."""
    left = ray._private.state.available_resources_per_node() if free else {}
    nodes = []
    for node in (node for node in ray.nodes() if node["Alive"]):
        has = left.get(node["NodeID"], {}) if free else node["Resources"]
        name, cpus, gpus = node["NodeManagerAddress"], int(has.get("CPU", 0)), int(has.get("GPU", 0))
        nodes.append(NodeResources(name=name, cpus=cpus, gpus=gpus))
    return ClusterResources(nodes=tuple(nodes))


def _create(bundles: Sequence[Bundle]) -> PlacementGroup:
    """One placement group. PACK: on as few nodes as possible, but it may spread over more."""
    amounts = [{"CPU": float(bundle.cpus), "GPU": float(bundle.gpus)} for bundle in bundles]
    return placement_group([{name: amount for name, amount in bundle.items() if amount} for bundle in amounts], strategy="PACK")


async def _ready(group: PlacementGroup) -> None:
    """Wait in a thread, because `wait` blocks; for a second at a time, so that the thread ends soon after a timeout."""
    while not await asyncio.to_thread(group.wait, 1):
        pass


def _remove(groups: dict[str, PlacementGroup]) -> None:
    """Give the bundles back, unless the session is lost: Ray would wait for a daemon that is gone."""
    while groups and lost_session() is None:
        remove_placement_group(groups.popitem()[1])
