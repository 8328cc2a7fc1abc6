"""The rollout actor: an engine, a group runner and the rewards in one asyncio process.

    exchange ─> GroupRunner ─> Engine (slots) ─> RewardPool (child processes) ─> (PartResult, GroupPayload) ─>
    exchange prefetch ─> second buffer ─> load ─> Engine.load at an interrupt ─> probes scored by the engine
    itself

Who waits for whom: a part for slots, the engine and rewards; `prefetch` for the transport, in a thread,
beside generation; `load` for the engine's interrupt (with `drain`: for running trajectories, tools included);
`exchange` for a change, one second at most.

Without a second buffer (`weights.dual_buffer = false`) `prefetch` only notes where the buckets are, and
`load` fetches them during the interrupt; with `nccl` and `ipc`, rank 0 sends them then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.builtin.builtin_tasks import environment_of
from asyncrl_cli.contracts.environment import Environment
from asyncrl_cli.contracts.ports import EvalRequest, EvalResult, PartialResult, Progress
from asyncrl_cli.contracts.prompt_group import AttemptKey, PartRequest, PartResult
from asyncrl_cli.contracts.reward_spec import RewardSpec
from asyncrl_cli.contracts.trajectories import GroupPayload
from asyncrl_cli.contracts.weight_version import LoadReport
from asyncrl_cli.engines.port import Engine, Sampling, make_engine
from asyncrl_cli.envs import find_environment
from asyncrl_cli.envs.call_log import SUFFIX, CallLog
from asyncrl_cli.envs.places import Places
from asyncrl_cli.envs.tool_environment import ToolEnvironment
from asyncrl_cli.job.calls import RayRankZero
from asyncrl_cli.job.exchange import PARTS_PER_ANSWER, PartDesk
from asyncrl_cli.job.process import no_collection_while_starting, set_up_process
from asyncrl_cli.job.transports import arriving, merging
from asyncrl_cli.measure.meters import LongPoll, MeteredRewards, RolloutMeter
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Interrupt, ProcessPlace, Profile, WeightsSection
from asyncrl_cli.sandbox.parent_processes import ProcessEnded, Processes, environment_processes
from asyncrl_cli.sandbox.parent_rewards import RewardPool, default_workers
from asyncrl_cli.tasks.code_choice import import_limit_s
from asyncrl_cli.tasks.tool_class import ToolClass
from asyncrl_cli.weights.versions import Manifest, judge, mean_abs_diff, median_abs_diff

if TYPE_CHECKING:
    import torch

    from asyncrl_cli.envs.chat import Chat
    from asyncrl_cli.envs.episode import Limits
    from asyncrl_cli.envs.gateway.server import Gateway
    from asyncrl_cli.job.transports import Whole
    from asyncrl_cli.weights.buckets import Bucket


logger = logging.getLogger(__name__)


class RolloutActor:
    """Its methods mirror `loop.ports.RolloutWorker`; `RayRolloutWorker` calls them."""

    def __init__(
        self,
        index: int,
        profile: Profile,
        place: ProcessPlace,
        reward: RewardSpec,
        tool_class: ToolClass | None = None,
        *,
        log_path: Path,
    ) -> None:
        set_up_process(threads=place.threads, log_path=log_path)
        self._name = f"rollout-{index}"
        self._profile = profile
        self._place = place
        self._reward = reward
        self._tool_class = tool_class
        self._log_path = log_path
        self._processes: Processes | None = None
        self._gateway: Gateway | None = None

    def __repr__(self) -> str:
        return self._name

    async def start(self) -> tuple[str, str]:
        """Load the model and start the reward processes, side by side. May take minutes. Returns its node's
        id and address."""
        with no_collection_while_starting():
            await self._start()
        logger.info("%s started: %s", self._name, self._place)
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    async def _start(self) -> None:
        profile, place = self._profile, self._place
        self._changes = LongPoll()
        self._desk = PartDesk(self._play, self._changes)
        self._meter = RolloutMeter(self._name, profile.rollout.slots, time.monotonic, self._changes.note)
        self._engine = make_engine(profile, place, self._meter.running)
        self._pool = self._make_pool()
        self._rewards = MeteredRewards(
            self._name.replace("rollout", "reward"), self._pool.score, time.monotonic
        )
        await asyncio.gather(self._engine.start(), self._start_pool(), self._start_environments())
        self._places = Places(profile.rollout.slots, hold=profile.rollout.hold_slots)
        whole = await asyncio.to_thread(merging, profile, place)
        self._loader = Loader(
            self._engine, profile.weights, self._meter, place.version - 1, self._places, whole
        )
        self._runner = await self._make_runner()

    def _make_pool(self) -> RewardPool:
        """The processes that compute rewards, or that play agents."""
        task, env = self._profile.task, self._profile.env
        workers = task.reward_workers or default_workers()
        timeout_s, block_s = task.reward_timeout_s, None
        if task.has_agent:
            timeout_s, block_s = env.episode_timeout_s, env.tool_timeout_s
        name = self._name.replace("rollout", "agent" if task.has_agent else "reward")
        log_path = self._log_path.with_name(f"{name}.log")
        return RewardPool(
            self._reward, timeout_s=timeout_s, block_s=block_s, workers=workers, log_path=log_path
        )

    async def _start_pool(self) -> None:
        if self._reward.kind != "episode":
            await self._pool.start()

    async def _start_environments(self) -> None:
        if self._tool_class is not None:
            self._processes = environment_processes(
                self._tool_class, import_limit_s=import_limit_s(self._profile)
            )
            try:
                await self._processes.start()
            except ProcessEnded as why:
                raise ExecutorFailed(f"environments cannot start: {why}") from None

    def _environment_maker(self) -> Callable[[], Environment]:
        if self._tool_class is None or self._processes is None:
            return partial(find_environment(environment_of(self._profile.task)), self._rewards)
        rewards = None if self._reward.kind == "episode" else self._rewards
        calls = CallLog(self._log_path.with_suffix(SUFFIX))
        return partial(
            ToolEnvironment,
            self._processes,
            self._tool_class,
            rewards,
            calls,
            self._profile.env.tool_timeout_s,
        )

    async def _make_runner(self) -> Any:
        from asyncrl_cli.envs.chat import load_chat
        from asyncrl_cli.envs.episode import Limits, Means
        from asyncrl_cli.envs.group_runner import GroupRunner

        profile = self._profile
        limits, sampling = Limits.of(profile), Sampling.of(profile.rollout, profile.rollout.temperature)
        trusted, max_tokens = profile.model.trust_remote_code, limits.max_context_tokens
        chat = load_chat(self._place.model_dir, trust_remote_code=trusted, max_tokens=max_tokens)
        if profile.task.has_agent:
            from asyncrl_cli.envs.gateway.agent_episodes import AgentEnvironment

            self._gateway = await self._served(chat, sampling, limits)
            environment = partial(AgentEnvironment, self._gateway, self._rewards)
        else:
            environment = self._environment_maker()
        return GroupRunner(
            Means(self._engine, chat, environment, limits, self._places, self._meter.waiting), sampling
        )

    async def _served(self, chat: Chat, sampling: Sampling, limits: Limits) -> Gateway:
        """A gateway that listens; its address and the admin's key are in a file beside the log, for this user
        alone."""
        from asyncrl_cli.envs.gateway.admin_routes import admin_routes
        from asyncrl_cli.envs.gateway.server import Gateway

        gateway = Gateway(self._engine, chat, sampling, limits)
        await gateway.start(admin_routes(gateway, self._loader))
        gateway.write_address(self._log_path.with_suffix(".gateway.json"))
        return gateway

    async def connect(self, rank_zero: RayRankZero) -> None:
        """For `nccl` and `ipc`: connect the engine's processes to the trainer's first actor. Both have
        started."""
        await self._engine.connect(rank_zero)

    async def stop(self) -> None:
        """End the running parts, the processes of rewards and environments, the gateway and the engine."""
        await self._desk.close()
        if self._gateway is not None:
            await self._gateway.close()
        ends = [] if self._processes is None else [self._processes.close()]
        await asyncio.gather(self._pool.close(), self._engine.close(), *ends)

    async def _play(
        self, request: PartRequest, on_sequence: Callable[[int], None]
    ) -> tuple[PartResult, GroupPayload]:
        (so_far,) = await request.so_far if request.goes_on else (None,)
        return await self._runner.run(request, on_sequence, so_far)

    @ray.method(num_returns=2)
    async def so_far(self) -> tuple[PartialResult, Sequence[GroupPayload]]:
        """What running parts have so far; the tokens are a separate Ray object."""
        return self._runner.so_far()

    async def submit(self, requests: Sequence[PartRequest]) -> None:
        self._desk.begin(requests)

    @ray.method(num_returns=1 + PARTS_PER_ANSWER)
    async def exchange(
        self, requests: Sequence[PartRequest], seen: int
    ) -> tuple[Progress | GroupPayload | None, ...]:
        """New parts in, ended ones and a report out (see exchange.py). Answers when something has changed
        since `seen`.

        Each part's arrays are a separate Ray object, which the trainer fetches: the driver gets the metadata
        only. Unused objects are None.
        """
        self._desk.begin(requests)
        seen = await self._changes.after(seen)
        ended = self._desk.take()
        progress = self._progress(seen, tuple(result for result, _ in ended))
        return progress, *(payload for _, payload in ended), *[None] * (PARTS_PER_ANSWER - len(ended))

    async def abort(self, key: AttemptKey) -> None:
        await asyncio.sleep(0)  # let a part begin that was submitted in the same turn of the loop
        await self._runner.abort(key)

    async def prefetch(self, manifest: Manifest, bucket_refs: list[Any]) -> float:
        return await self._loader.prefetch(manifest, bucket_refs)

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        return await self._loader.load(version, interrupt)

    @ray.method(num_returns=2)
    async def evaluate(self, request: EvalRequest) -> tuple[EvalResult, Any]:
        """The tokens, for a reward model, are a separate Ray object."""
        sampling = Sampling.of(self._profile.rollout, self._profile.eval.temperature)
        self._meter.evals(+1)
        try:
            with_tokens = self._profile.reward_model.path is not None
            result = await self._runner.evaluate(request, sampling, with_tokens=with_tokens)
            return replace(result, payload=None), result.payload
        finally:
            self._meter.evals(-1)

    async def abort_evals(self) -> None:
        await self._runner.abort(None)

    async def pause(self) -> None:
        self._meter.pause(True)
        await self._engine.sleep()

    async def resume(self) -> None:
        await self._engine.wake()
        self._meter.pause(False)

    def _progress(self, seen: int, ended: tuple[PartResult, ...]) -> Progress:
        counters = self._engine.counters()
        report = self._meter.report(
            version=self._engine.version,
            sampled_tokens=self._engine.sampled_tokens,
            decode_steps=self._engine.decode_steps,
            running_tokens=self._runner.running_tokens,
            sums=counters.sums,
            gauges=counters.gauges,
            stays=self._engine.take_stays(),
        )
        finished = {key: number for key, number in self._desk.freed_slots.items() if number}
        return Progress(
            seen=seen, ended=ended, freed_slots=finished, reports=(report, self._rewards.report())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A version that waits to be loaded. `weights` is None if the load itself is to fetch them by `refs`."""

    manifest: Manifest
    refs: Sequence[Any]
    weights: Mapping[str, torch.Tensor] | None


class Loader:
    """A rollout worker's side of a weight sync. Versions only rise: it refuses a version that is not newer
    than the loaded one and any that waits to be loaded.

    `held`: version of the engine's weights; one less if the first load may bring that same version, to verify
    it. `fingerprint`: of the last version that was loaded; "" before. `places`: a drain waits for the
    trajectories that have begun there, even if they are waiting for a tool. `whole`: converts the buckets
    that arrive to the engine's.
    """

    def __init__(
        self,
        engine: Engine,
        weights: WeightsSection,
        meter: RolloutMeter,
        held: int,
        places: Places,
        whole: Whole = iter,
    ) -> None:
        self._engine = engine
        self._whole = whole
        self._weights = weights
        self._meter = meter
        self._places = places
        self.held = held
        self.fingerprint = ""
        self.last_load: LoadReport | None = None
        self._received: Received | None = None

    async def prefetch(self, manifest: Manifest, refs: Sequence[Any]) -> float:
        """Fetch, check and copy the buckets in a thread, unless the load is to fetch them. Returns the
        seconds.

        Raises ValueError for a version not newer than what this worker holds or has received, also if a newer
        one came meanwhile.
        """
        began_s = time.monotonic()
        self._check_newer(manifest.version)
        weights = await asyncio.to_thread(self._receive, manifest, refs)
        self._check_newer(manifest.version)
        self._received = Received(manifest=manifest, refs=refs, weights=weights)
        return time.monotonic() - began_s

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        """Swap the received weights in. Raises ValueError, with the old version still loaded, if `version`
        was not received."""
        async with self._places.drained() if interrupt == "drain" else nullcontext():
            return await self._load(version, interrupt)

    async def _load(self, version: int, interrupt: Interrupt) -> LoadReport:
        received, engine = self._received, self._engine
        if received is None or received.manifest.version != version:
            raise ValueError(f"asked to load version {version}, which was not received")
        manifest, weights = received.manifest, received.weights
        self._meter.load_begins(interrupt)
        try:
            try:
                if weights is not None:
                    pause = await engine.load(weights, version, interrupt)
                else:
                    pause = await engine.load_in_place(
                        lambda: list(self._arriving(manifest, received.refs)), version, interrupt
                    )
            finally:
                if self._received is received:
                    self._received = None  # also if it failed: the version may come again
            self.held, self.fingerprint = version, manifest.fingerprint
            if engine.stops_to_score:
                # the probe also freezes the responses that began after a drain
                self._meter.load_begins("keep-kv")
            else:
                self._meter.load_ended()
            report = self.last_load = LoadReport(
                version=version,
                send_s=pause.fetch_s,
                load_s=pause.load_s,
                pause_s=pause.pause_s,
                logprob_abs_diff=None,
            )
            return await self._probed(report, manifest) if manifest.probe_tokens else report
        finally:
            self._meter.load_ended()

    async def _probed(self, report: LoadReport, manifest: Manifest) -> LoadReport:
        """Add the probes' result to `report`: the engine's logprobs against the trainer's of this version and
        the previous one."""
        scores = await self._engine.score(
            [list(tokens) for tokens in manifest.probe_tokens], manifest.temperature
        )
        judged = (
            judge(scores.logprobs, manifest.probe_logprobs, manifest.previous_logprobs)
            if manifest.previous_logprobs
            else None
        )
        return replace(
            report,
            pause_s=report.pause_s + scores.pause_s,
            logprob_abs_diff=mean_abs_diff(scores.logprobs, manifest.probe_logprobs),
            logprob_abs_diff_median=median_abs_diff(scores.logprobs, manifest.probe_logprobs),
            verdict=judged and judged.verdict,
            loaded_share=judged and judged.share,
        )

    def _receive(self, manifest: Manifest, refs: Sequence[Any]) -> Mapping[str, torch.Tensor] | None:
        """Runs in a thread. With `weights.overlap` a bucket is copied while the next ones arrive. Returns
        once all are verified."""
        if self._weights.transport in DIRECT_TRANSPORTS:
            from asyncrl_cli.weights.receivers import AnnouncedWeights

            return AnnouncedWeights(refs)
        if not self._weights.dual_buffer:
            return None
        buckets = self._arriving(manifest, refs)
        return self._engine.receive(buckets if self._weights.overlap else list(buckets))

    def _arriving(self, manifest: Manifest, refs: Sequence[Any]) -> Iterator[Bucket]:
        return self._whole(arriving(manifest, refs))

    def _check_newer(self, version: int) -> None:
        newest = self.held if self._received is None else max(self.held, self._received.manifest.version)
        if version <= newest:
            raise ValueError(
                f"version {version} of the weights is not newer than version {newest}, which this worker has "
                "already received"
            )
