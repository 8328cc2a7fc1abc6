"""Starts and ends the actors of a job, all of them at once, each in its bundle (ray/placement.py). Runs in
the driver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.base.named_code import UserCode
from asyncrl_cli.checkpoint.payloads import read_payloads
from asyncrl_cli.checkpoint.reader import Checkpoint
from asyncrl_cli.contracts.environment import RewardSpec
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.prompt_group import AttemptKey, DataKey
from asyncrl_cli.data.backends import started_store
from asyncrl_cli.data.ray_store import RayStore
from asyncrl_cli.data.store import Store
from asyncrl_cli.job.driver_preflight import Wanted, examined, refuse
from asyncrl_cli.job.driver_ranks import RayRanks, RayScorer, RayTrainer
from asyncrl_cli.job.driver_rollout import RayRolloutWorker
from asyncrl_cli.job.rank_host import THREADS, RankHost
from asyncrl_cli.job.ray.calls import all_of, start_limit
from asyncrl_cli.job.ray.placement import Options, Say, nodes_of, placed
from asyncrl_cli.job.rollout_host import RolloutHost
from asyncrl_cli.plan.cluster import LOOPBACK
from asyncrl_cli.plan.job_plan import LENT, ROLLOUT, TRAINER, JobPlan, place_of
from asyncrl_cli.profile.arithmetic import CRITIC, REF, TEACHER
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.tasks.tool_class import ToolClass
from asyncrl_cli.weights.directory import versions_at

logger = logging.getLogger(__name__)
FROZEN_SCORERS = {REF: "reference_logprob", TEACHER: "teacher_logprob"}
"""Scorers that are never trained, with the counters of their weights in a checkpoint (trainer_state.py)."""
STOP_TIMEOUT_S = 1.0
"""A kill after that loses nothing of value: checkpoints and publishes were awaited. A second Ctrl-C must end
a run in 5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrewOrder:
    """What a crew is to be. `further`: what `further_models` found. `log_dir`: where each actor writes
    `<name>.log`. `probe_items`: the probes are pieces of their prompts. `store`: the driver's end of
    the data store, which `started_crew` starts. `expected`: the reference answer of a prompt's uid, for the
    samples. `warn` gets warnings of nodes and of the trainer."""

    plan: JobPlan
    profile: Profile
    model_dir: Path
    further: Mapping[str, Any]
    run_dir: Path
    log_dir: Path
    reward: RewardSpec
    tool_class: ToolClass | None = None
    scorers: Mapping[str, UserCode] = field(default_factory=dict)
    probe_items: Sequence[Item] = ()
    checkpoint: Checkpoint | None = None
    store: Store = field(default_factory=RayStore)
    expected: Callable[[str], str | None] = lambda uid: None
    say: Say = lambda text: None
    warn: Say = lambda text: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The executors of a job, started, and the store of their data. `payloads`: in a resumed run, the keys of
    the checkpoint's groups, in the order of the file."""

    trainer: RayTrainer
    workers: Sequence[RayRolloutWorker]
    scorers: Sequence[RayScorer]
    store: Store
    payloads: Sequence[tuple[DataKey, ...]] = ()


@asynccontextmanager
async def started_crew(order: CrewOrder) -> AsyncIterator[Crew]:
    """Start all trainer ranks, rollout workers and scorers, and yield them when all are ready.

    Workers hold the weights of `model_dir` until the loop has published a version. Leaving the block ends the
    actors and releases the bundles, within about `STOP_TIMEOUT_S`.

    Raises:
        PreflightError: no room for the plan within `placement.timeout_s`, or a node that cannot be used.
        ExecutorFailed: an actor failed to start, or not all were ready in time.
        RefusedError: the checkpoint belongs to another model.
    """
    plan, profile, say = order.plan, order.profile, order.say
    say("placing the job")
    async with placed(plan, timeout_s=profile.placement.timeout_s, say=say) as options:
        if ray.util.get_node_ip_address() != LOOPBACK:  # a cluster: not this machine's own session
            wanted = Wanted.of(profile, order.model_dir, order.further, order.run_dir)
            names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            groups = [options(role.role, 0)["scheduling_strategy"].placement_group for role in plan.roles]
            nodes = {node: names[node] for node in nodes_of(groups)}  # the trainer's first
            for warning in refuse(await examined(nodes, wanted, say)):
                order.warn(warning)
        # without a URL in the run's own directory, whatever transport a killed attempt had
        files = versions_at(profile.weights, order.run_dir)
        await asyncio.to_thread(files.keep, ())
        store = await asyncio.to_thread(started_store, profile, order.run_dir.name)
        order = replace(order, store=store)
        scorers = [make_scorer(name, order, options) for name in plan.scorers]
        critic = next((scorer for scorer in scorers if scorer.name == CRITIC), None)
        trainer, workers = make_trainer(order, options, critic), list[RayRolloutWorker]()
        try:
            say(f"starting {plan}")
            if plan.shares_gpus:
                # each rank has its GPU before a worker is given the rest of one (RANK_SHARE)
                await trainer.prepare()
            version = order.checkpoint.version if order.checkpoint else 0
            for role in [ROLLOUT, *([LENT] if plan.lend else [])]:
                place = place_of(plan, role, order.model_dir, version)
                for name, make in makers_of(order, role, RolloutHost, options).items():
                    make_actor = partial(make, profile, place, order.reward, order.tool_class, store.address)
                    own = name, make_actor, profile, store, place.workers, role == LENT
                    workers.append(RayRolloutWorker(*own))
            # vLLM counts what others take of a GPU while it measures as its own, so the trainer takes none
            # before vLLM is ready.
            turns: list[list[RayRanks | RayRolloutWorker]] = [[*workers], [trainer, *scorers]]
            if not plan.shares_gpus:
                turns = [[*workers, trainer, *scorers]]
            for executors in turns:
                await all_of(_started(executor, say) for executor in executors)
                # the trainer has its devices until it lends them
                await all_of(one.pause() for one in workers if plan.lend and one.is_lent and one in executors)
            if profile.weights.transport in DIRECT_TRANSPORTS:
                # one by one: making an NCCL group changes rank 0's environment for a moment
                for worker in workers:
                    say(f"connecting {worker.name} to trainer-0 for weights")
                    await worker.connect(trainer.actors[0])
            for warning in trainer.warnings:
                order.warn(warning)
            await share_frozen_logprobs(trainer, scorers, profile)
            payloads = await _restored(trainer, store, order.checkpoint, say) if order.checkpoint else []
            yield Crew(trainer=trainer, workers=workers, scorers=scorers, store=store, payloads=payloads)
        finally:
            await _stop([trainer, *workers, *scorers])
            await asyncio.to_thread(store.close)
            try:
                await asyncio.to_thread(files.keep, ())
            except AsyncrlError as left:
                logger.warning("%s", left.message)


def make_trainer(order: CrewOrder, options: Options, critic: RayScorer | None = None) -> RayTrainer:
    """The trainer with the actors of its ranks, not yet started."""
    make_actors = partial(_make_ranks, TRAINER, order, options, order.probe_items)
    samples_dir = order.run_dir / "samples"
    return RayTrainer(
        make_actors,
        order.profile,
        order.store,
        samples_dir=samples_dir,
        critic=critic,
        warn=order.warn,
        expected=order.expected,
    )


def make_scorer(name: str, order: CrewOrder, options: Options) -> RayScorer:
    """A scorer with the actors of its processes, not yet started."""
    return RayScorer(name, partial(_make_ranks, name, order, options), order.profile, order.store)


def _make_ranks(
    role: str, order: CrewOrder, options: Options, probe_items: Sequence[Item] = ()
) -> list[ActorHandle]:
    is_direct = order.profile.weights.transport in DIRECT_TRANSPORTS
    threads = THREADS | {"direct": order.plan.rollout_workers if is_direct else 1}
    place = replace(place_of(order.plan, role, order.model_dir), **order.further, scorers=order.scorers)
    makers = makers_of(order, role, RankHost, options, concurrency_groups=threads)
    run_dir = order.run_dir.absolute()
    given = role, order.profile, place, run_dir, probe_items, order.store.address
    return [make(*given) for make in makers.values()]


def makers_of(
    order: CrewOrder, role: str, host: type, options: Options, **settings: object
) -> dict[str, Callable[..., ActorHandle]]:
    """By worker name, a function that creates its actor in its bundle, with its own log. `settings` are for
    `ray.remote`."""
    actor_class = ray.remote(max_restarts=0, max_task_retries=0, **settings)(host)
    makers: dict[str, Callable[..., ActorHandle]] = {}
    # lent workers are numbered after the others
    kind, first = (ROLLOUT, order.plan.rollout_workers) if role == LENT else (role, 0)
    for index in range(order.plan.role(role).workers):
        name = f"{kind}-{first + index}"
        make = actor_class.options(**options(role, index)).remote
        makers[name] = partial(make, first + index, log_path=order.log_dir.absolute() / f"{name}.log")
    return makers


async def _started(executor: RayRanks | RayRolloutWorker, say: Say) -> None:
    await executor.start()
    say(f"{executor.name} is ready")


async def share_frozen_logprobs(trainer: RayTrainer, scorers: Sequence[RayScorer], profile: Profile) -> None:
    """Tell the trainer what identifies the weights of scorers that are never trained: its checkpoints have
    it, and a resume compares it."""
    limit, logprobs = start_limit(profile), dict[str, float]()
    for scorer in scorers:
        if (counter := FROZEN_SCORERS.get(scorer.name)) is not None:
            logprobs[counter], *_ = await scorer.collective("its first scores", "fixed_logprob", limit=limit)
    if logprobs:
        await trainer.collective("the scorers' logprobs", "add_frozen_logprobs", logprobs, limit=limit)


async def _restored(
    trainer: RayTrainer, store: Store, checkpoint: Checkpoint, say: Say
) -> list[tuple[DataKey]]:
    """Load the trainer's state, and put the groups' data into the store. Returns its keys, in the order of
    the file. The loop publishes the checkpoint's version."""
    say(f"restoring {checkpoint.directory.name}")
    await trainer.restore(checkpoint.directory)

    def held() -> list[tuple[DataKey]]:
        keys = []
        for i, payload in enumerate(read_payloads(checkpoint.directory, store.schema)):
            attempt = AttemptKey(payload.uid, payload.epoch, payload.attempt)
            stored = store.put(f"{attempt}/restored-{i}", payload.trajectories)
            store.hold(stored)
            keys.append((stored.key,))
        return keys

    return await asyncio.to_thread(held)


async def _stop(executors: Sequence[RayRanks | RayRolloutWorker]) -> None:
    """Ask all actors to stop, wait `STOP_TIMEOUT_S` in total, then kill them. Does not raise for an actor
    that is already dead."""
    stops = [executor.stop(STOP_TIMEOUT_S) for executor in executors]
    outcomes = await asyncio.gather(*stops, return_exceptions=True)
    for actor in (actor for executor in executors for actor in executor.actors):
        ray.kill(actor)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, AsyncrlError):
            raise outcome
