"""The actor of one rollout worker: an engine, a group runner and the rewards in one asyncio process. Runs in
that process; the driver's side is driver_rollout.py.

    exchange ─> PartDesk ─> GroupRunner ─> Engine (slots) ─> RewardPool (child processes)
             <─ (PartResult, GroupPayload)
    prefetch ─> second buffer ─> load ─> Engine.load at an interrupt ─> probes scored by the engine itself

Who waits for whom: a part for slots, the engine and rewards; `prefetch` for the transport, in a thread,
beside generation; `load` for the engine's interrupt (with `drain`: for running trajectories, tools included);
`exchange` for a change, one second at most.

Without a second buffer (`weights.dual_buffer = false`) `prefetch` only notes where the buckets are, and
`load` fetches them during the interrupt; with `nccl` and `ipc`, rank 0 sends them then (rollout_weights.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.environment import Environment, RewardSpec
from asyncrl_cli.contracts.ports import EvalRequest, PartialResult, WorkerUpdate
from asyncrl_cli.contracts.prompt_group import AttemptKey, DataKey, PartKey, PartRequest, PartResult
from asyncrl_cli.contracts.weight_version import LoadReport
from asyncrl_cli.data.backends import store_at
from asyncrl_cli.data.ray_store import shipped
from asyncrl_cli.data.sample_fields import TEACHER_NAME
from asyncrl_cli.data.store import Stored
from asyncrl_cli.data.trajectories import GroupPayload, Trajectory
from asyncrl_cli.data.transferqueue_client import Address
from asyncrl_cli.engines.port import Sampling, make_engine, worker_merges
from asyncrl_cli.envs import find_environment
from asyncrl_cli.envs.slots import Slots, VersionGate
from asyncrl_cli.envs.tool_environment import SUFFIX, CallLog, ToolEnvironment
from asyncrl_cli.job.host_process import Refs, merging, no_collection_while_starting, set_up_process
from asyncrl_cli.job.ray.endings import ProcessStart, starts_of
from asyncrl_cli.job.ray.reaper import families
from asyncrl_cli.job.rollout_weights import Loader, RayRankZero
from asyncrl_cli.measure.meters import LongPoll, MeteredRewards, RolloutMeter
from asyncrl_cli.profile.arithmetic import mixed_requeues, mixes, sends_deltas
from asyncrl_cli.profile.keys import of_lent
from asyncrl_cli.profile.schema import Interrupt, ProcessPlace, Profile
from asyncrl_cli.sandbox.parent_processes import ProcessEnded, Processes, environment_processes
from asyncrl_cli.sandbox.parent_rewards import RewardPool, default_workers
from asyncrl_cli.tasks.code_choice import environment_of, import_limit_s
from asyncrl_cli.tasks.rows import find
from asyncrl_cli.tasks.tool_class import ToolClass
from asyncrl_cli.weights.versions import Manifest

if TYPE_CHECKING:
    from asyncrl_cli.envs.gateway.server import Gateway
    from asyncrl_cli.envs.group_runner import EndedPart, GroupRunner

logger = logging.getLogger(__name__)

OBJECTS_PER_ANSWER = 8
"""Ray objects beside an answer: the data of ended parts, which does not pass through the driver. A part has
one, or a large one up to `ray_store.MOST_PIECES`. If more parts have ended, the next answer comes at once."""
GIVEN_EVERY_S = 0.01


class RolloutHost:
    """Its methods mirror `RolloutWorker` of contracts/ports.py."""

    def __init__(
        self,
        index: int,
        profile: Profile,
        place: ProcessPlace,
        reward: RewardSpec,
        tool_class: ToolClass | None = None,
        address: Address | None = None,
        *,
        log_path: Path,
    ) -> None:
        set_up_process(threads=place.threads, log_path=log_path)
        self._name = f"rollout-{index}"
        self._profile = profile = of_lent(profile) if place.is_lent else profile
        self._place = replace(place, index=index)
        self._reward = reward
        self._uses_reward_pool = reward.kind != "episode"
        """Else environments reward their own episodes, and leave the pool without work."""
        self._tool_class = tool_class
        self._store = store_at(profile, address)
        self._partial: dict[PartKey, Mapping[int, Stored]] = {}
        """What requested parts continue from, by response, until they begin."""
        self._waiting: dict[PartKey, PartRequest] = {}
        """Parts that fetch this."""
        self._recalled: set[PartKey] = set()
        self._num_given = 0
        self._num_evals = 0
        self._log_path = log_path
        self._processes: Processes | None = None
        self._gateway: Gateway | None = None

    def __repr__(self) -> str:
        return self._name

    async def start(self) -> tuple[str, str, list[ProcessStart]]:
        """Load the model and start the reward processes, side by side. May take minutes. Returns its node's
        id and address, and this process with its children, the engine's among them."""
        profile, place = self._profile, self._place
        with no_collection_while_starting():
            from asyncrl_cli.envs.group_runner import PartDesk  # torch: the driver imports this module

            self._changes = LongPoll()
            self._desk = PartDesk(self._metered, self._changes)
            self._meter = RolloutMeter(self._name, profile.rollout.slots, time.monotonic, self._changes.note)
            self._engine = make_engine(profile, place, self._meter.running)
            # the processes that compute rewards, or that play agents
            task, timeout_s, block_s, kind = profile.task, profile.task.reward_timeout_s, None, "reward"
            if task.has_agent:
                timeout_s, block_s, kind = profile.env.episode_timeout_s, profile.env.tool_timeout_s, "agent"
            self._pool = RewardPool(
                self._reward,
                timeout_s=timeout_s,
                block_s=block_s,
                workers=task.reward_workers or default_workers(),
                log_path=self._log_path.with_name(f"{self._name.replace('rollout', kind)}.log"),
            )
            rewards_name = self._name.replace("rollout", "reward")
            self._rewards = MeteredRewards(rewards_name, self._pool.score, time.monotonic)
            starts = [self._engine.start()]
            if self._uses_reward_pool:
                starts.append(self._pool.start())
            if self._tool_class is not None:
                import_s = import_limit_s(profile)
                self._processes = environment_processes(self._tool_class, import_limit_s=import_s)
                starts.append(self._processes.start())
            try:
                await asyncio.gather(*starts)
            except ProcessEnded as why:
                raise ExecutorFailed(f"environments cannot start: {why}") from None
            self._places = Slots(profile.rollout.slots, hold=profile.rollout.hold_slots)
            self._gate = VersionGate(lambda: self._engine.version)
            merges = worker_merges(profile, place.device)
            whole = await asyncio.to_thread(merging, profile, place) if merges else iter
            # one version less than the engine has: the first load may bring that same version, to verify it
            self._loader = Loader(
                self._engine,
                profile.weights,
                self._meter,
                place.version - 1,
                self._places,
                whole,
                deltas=sends_deltas(profile),
                gate=self._gate,
                node_file=self._log_path.with_name(f"{ray.get_runtime_context().get_node_id()}.weights.json"),
            )
            self._runner = await self._make_runner()
        logger.info("%s started: %s", self._name, place)
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return node, address, starts_of(families([os.getpid()]))

    async def _make_runner(self) -> GroupRunner:
        """What plays groups: with an agent against a gateway, with tools against the environments' processes,
        else in an environment of asyncrl."""
        from asyncrl_cli.envs.chat import load_chat
        from asyncrl_cli.envs.episode import Limits, Means
        from asyncrl_cli.envs.group_runner import GroupRunner

        profile = self._profile
        limits, sampling = Limits.of(profile), Sampling.of(profile.rollout, profile.rollout.temperature)
        schema = self._store.schema
        trusted, max_tokens = profile.model.trust_remote_code, limits.max_context_tokens
        chat = load_chat(self._place.model_dir, trust_remote_code=trusted, max_tokens=max_tokens)
        environment: Callable[[], Environment]
        if profile.task.has_agent or profile.gateway.enabled:
            from asyncrl_cli.envs.gateway.admin_routes import admin_routes
            from asyncrl_cli.envs.gateway.server import AgentEnvironment, Gateway

            gateway = self._gateway = Gateway(self._engine, chat, sampling, limits, schema)
            try:
                listening = socket.create_server((profile.gateway.host, 0))
            except OSError as error:
                why = f"gateway.host = {profile.gateway.host}: {error.strerror}"
                raise ExecutorFailed(why, hint="127.0.0.1, 0.0.0.0 or an address of the node") from None
            await gateway.start(admin_routes(gateway, self._loader), listening)
            gateway.url = gateway.url.replace("0.0.0.0", ray.util.get_node_ip_address())
            # its address and the admin's key, for this user alone
            gateway.write_address(self._log_path.with_suffix(".gateway.json"))
        if profile.task.has_agent:
            environment = partial(AgentEnvironment, gateway, self._rewards)  # type: ignore[abstract]
        elif self._tool_class is not None and self._processes is not None:
            rewards = self._rewards if self._uses_reward_pool else None
            log, timeout_s = CallLog(self._log_path.with_suffix(SUFFIX)), profile.env.tool_timeout_s
            environment = partial(ToolEnvironment, self._processes, self._tool_class, rewards, log, timeout_s)
        else:
            environment = partial(find_environment(environment_of(profile.task)), self._rewards)
        waiting = self._meter.waiting
        means = Means(
            self._engine,
            chat,
            environment,
            limits,
            self._places,
            waiting,
            schema,
            mixes(profile),
            self._gate,
        )
        return GroupRunner(means, sampling, mixed_requeues(profile))

    async def connect(self, rank_zero: ActorHandle) -> None:
        """For `nccl` and `ipc`: connect the engine's processes to the trainer's first actor. Both have
        started."""
        timeout_s = self._profile.weights.timeout_s
        await self._engine.connect(RayRankZero(rank_zero, self._name, timeout_s, self._place.workers))

    async def stop(self) -> None:
        """End the running parts, the processes of rewards and environments, the gateway and the engine."""
        await self._desk.close()
        if self._gateway is not None:
            await self._gateway.close()
        ends = [] if self._processes is None else [self._processes.close()]
        await asyncio.gather(self._pool.close(), self._engine.close(), *ends)

    async def _metered(self, request: PartRequest, on_sequence: Callable[[int], None]) -> EndedPart | None:
        self._meter.parts(+1)
        try:
            return await self._play(request, on_sequence)
        finally:
            self._meter.parts(-1)

    async def _play(self, request: PartRequest, on_sequence: Callable[[int], None]) -> EndedPart | None:
        so_far, (uid, epoch, attempt) = None, request.key.attempt
        if by_index := self._partial.pop(request.key, {}):
            self._waiting[request.key] = request
            each = {one.key: one for one in by_index.values()}
            found = dict(zip(each, await asyncio.to_thread(self._store.get, [*each.values()]), strict=True))
            del self._waiting[request.key]
            begun = {index: found[one.key][index] for index, one in by_index.items()}
            chosen = [begun.get(index, Trajectory()) for index in range(max(begun) + 1)]
            so_far = GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=tuple(chosen))
        if request.key not in self._recalled:
            result, payload = await self._runner.run(request, on_sequence, so_far)
        if request.key in self._recalled:
            return None
        trajectories = payload.trajectories
        if (column := self._profile.teacher.column) is not None:
            name = {TEACHER_NAME: str(find(request.item["metadata"], column))}
            trajectories = tuple(replace(one, values={**one.values, **name}) for one in trajectories)
        stored = await asyncio.to_thread(self._store.put, str(request.key), trajectories)
        return replace(result, payload=stored.key), stored

    async def partial_responses(self, most: int) -> tuple[object, ...]:
        """What running parts have so far, and the data of it: `most` further Ray objects. The call says how
        many it expects: at least one for each running part."""
        return await self._kept(*self._so_far(), most)

    def _so_far(self) -> tuple[PartialResult, list[tuple[DataKey, tuple[Trajectory, ...]]]]:
        result, payloads = self._runner.partial_responses()
        keys = tuple(f"{key}-partial" for key in result.responses)
        parts = [(key, payload.trajectories) for key, payload in zip(keys, payloads, strict=True)]
        # those that have not begun still have what they are to continue from
        waiting = {key: request.partial for key, request in self._waiting.items()}
        return replace(result, keys=keys, responses={**result.responses, **waiting}), parts

    async def _kept(
        self, result: PartialResult, parts: Sequence[tuple[DataKey, tuple[Trajectory, ...]]], most: int
    ) -> tuple[object, ...]:
        stored = await asyncio.to_thread(lambda: [self._store.put(*part) for part in parts])
        return self._shipped(result, [one.joined() for one in stored], most)

    async def submit(self, requests: Sequence[PartRequest], partial: Mapping[DataKey, Stored]) -> None:
        for one in requests:
            if one.partial:
                self._partial[one.key] = {index: partial[one.partial_tokens[index]] for index in one.partial}
        self._desk.begin(requests)
        self._num_given += len(requests)

    async def _begun(self, num_given: int) -> None:
        """Let all parts begin that the driver had given this process before its call, in the calls before it:
        Ray may start those later. The caller's limit bounds the wait."""
        while self._num_given < num_given:  # noqa: ASYNC110  (no other call waits so)
            await asyncio.sleep(GIVEN_EVERY_S)
        await asyncio.sleep(0)

    @ray.method(num_returns=1 + OBJECTS_PER_ANSWER)
    async def exchange(
        self, requests: Sequence[PartRequest], partial: Mapping[DataKey, Stored], seen: int
    ) -> tuple[object, ...]:
        """New parts in (`partial`: the data that they continue from), ended ones and a report out (see
        driver_rollout.py). Answers when something has changed since `seen`.

        The data of ended parts is further Ray objects, which the trainer fetches: the driver gets the
        metadata only. Unused objects are None.
        """
        await self.submit(requests, partial)
        seen = await self._changes.after(seen)
        ended = self._desk.take(OBJECTS_PER_ANSWER)
        update = self.report(seen, tuple(result for result, _ in ended))
        return self._shipped(update, [stored for _, stored in ended])

    def _shipped(
        self, answer: object, stored: Sequence[Stored], most: int = OBJECTS_PER_ANSWER
    ) -> tuple[object, ...]:
        heads, objects = shipped(stored, most)
        return (answer, heads), *objects

    async def abort(self, key: AttemptKey, num_given: int) -> None:
        await self._begun(num_given)
        await self._runner.abort(key)

    async def prefetch(self, manifest: Manifest, bucket_refs: Refs) -> float:
        return await self._loader.prefetch(manifest, bucket_refs)

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        if interrupt != "restart":
            return await self._loader.load(version, interrupt)
        report = await self._loader.load(version, "keep-kv")
        await self._runner.restart()
        return report

    @ray.method(num_returns=1 + OBJECTS_PER_ANSWER)
    async def evaluate(self, request: EvalRequest) -> tuple[object, ...]:
        """The data, for a reward model, is further Ray objects."""
        sampling = Sampling.of(self._profile.rollout, self._profile.eval.temperature, is_eval=True)
        self._meter.evals(+1)
        try:
            with_tokens = self._profile.reward_model.path is not None
            result, trajectories = await self._runner.evaluate(request, sampling, with_tokens=with_tokens)
            if not trajectories:
                return self._shipped(result, [])
            self._num_evals += 1
            key = f"eval-{request.version}/{self._name}-{os.getpid()}-{self._num_evals}"
            stored = await asyncio.to_thread(self._store.put, key, trajectories)
            return self._shipped(replace(result, payload=key), [stored])
        finally:
            self._meter.evals(-1)

    async def abort_evals(self) -> None:
        await self._runner.abort(None)

    async def pause(self, num_given: int, most: int) -> tuple[object, ...]:
        """Answers as `partial_responses`. A lent worker first stops what runs; what has ended is reported as
        ever."""
        await self._begun(num_given)
        result, parts = self._so_far()
        running = self._runner.part_keys
        result = replace(result, stopped=(*running, *self._waiting))
        self._recalled.update(result.stopped)
        for attempt in dict.fromkeys(key.attempt for key in running):
            await self._runner.abort(attempt)
        await self._desk.ended(result.stopped)
        self._recalled.difference_update(result.stopped)
        self._meter.pause(True)
        if self._place.is_lent:
            self._loader.forget()
        await self._engine.sleep()
        return await self._kept(result, parts, most)

    async def resume(self) -> None:
        await self._engine.wake()
        self._meter.pause(False)

    def report(self, seen: int, ended: tuple[PartResult, ...]) -> WorkerUpdate:
        counters = self._engine.counters()
        report = self._meter.report(
            version=self._engine.version,
            sampled_tokens=self._engine.sampled_tokens,
            decode_steps=self._engine.decode_steps,
            running_tokens=self._runner.running_tokens,
            sums={**counters.sums, **self._store.traffic.sums},
            gauges=counters.gauges,
            slot_intervals=self._engine.take_slot_intervals(),
        )
        finished = {key: number for key, number in self._desk.freed_slots.items() if number}
        reports = (report, self._rewards.report()) if self._uses_reward_pool else (report,)
        return WorkerUpdate(seen=seen, ended=ended, freed_slots=finished, reports=reports)
