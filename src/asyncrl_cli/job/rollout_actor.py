"""The rollout actor: an engine, its group runner and its rewards in one asyncio process.

    exchange ─> GroupRunner ─> Engine (slots) ─> RewardPool (child processes) ─> (GroupResult, GroupPayload) ─> exchange
    prefetch, load ─> Loader (loading.py) ─> Engine

Who waits for whom: a group for slots, the engine and rewards; `prefetch` for the transport, in a thread; `load`
for the engine's interrupt (with `drain`: for running sequences); `exchange` for a change, one second at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from asyncrl_cli.job.exchange import GROUPS_PER_ANSWER, Exchanged, GroupDesk
from asyncrl_cli.job.loading import Loader
from asyncrl_cli.job.process import set_up_process
from asyncrl_cli.loop.attempts import AttemptKey
from asyncrl_cli.loop.meters import LongPoll, MeteredRewards, RolloutMeter
from asyncrl_cli.loop.ports import EvalRequest, EvalResult, GroupRequest, LoadReport, Progress
from asyncrl_cli.profile.place import Place
from asyncrl_cli.profile.schema import Interrupt, Profile
from asyncrl_cli.samples import GroupPayload
from asyncrl_cli.tasks.scoring import RewardSpec

if TYPE_CHECKING:
    from asyncrl_cli.weights.buckets import Manifest

logger = logging.getLogger(__name__)


class RolloutActor:
    """Methods mirror `loop.ports.RolloutWorker`; `RayRolloutWorker` calls them."""

    def __init__(self, name: str, profile: Profile, place: Place, reward: RewardSpec, log_path: Path | None = None) -> None:
        set_up_process(threads=place.threads, log_path=log_path)
        self._name = name
        self._profile = profile
        self._place = place
        self._reward = reward

    def __repr__(self) -> str:
        return self._name

    async def start(self) -> None:
        """Load the model and start the reward processes, side by side. May take minutes."""
        from asyncrl_cli.engines.registry import make_engine
        from asyncrl_cli.tasks.rewards import RewardPool, default_workers

        profile, place = self._profile, self._place
        self._changes = LongPoll()
        self._meter = RolloutMeter(self._name, profile.rollout.slots, time.monotonic, self._changes.note)
        self._engine = make_engine(profile, place, self._meter.running)
        workers = profile.task.reward_workers or default_workers()
        self._pool = RewardPool(self._reward, timeout_s=profile.task.reward_timeout_s, workers=workers)
        self._rewards = MeteredRewards(self._name.replace("rollout", "reward"), self._pool.score, time.monotonic)
        await asyncio.gather(self._engine.start(), self._pool.start())
        self._loader = Loader(self._engine, profile.weights, self._meter, place.version - 1)
        self._runner = self._make_runner()
        self._desk = GroupDesk(self._runner.run, self._changes)
        logger.info("%s started: %s", self._name, place)

    def _make_runner(self) -> Any:
        from transformers import AutoTokenizer

        from asyncrl_cli.envs import find_environment
        from asyncrl_cli.envs.group_runner import GroupRunner

        rollout = self._profile.rollout
        tokenizer = AutoTokenizer.from_pretrained(self._place.model_dir, trust_remote_code=self._profile.model.trust_remote_code)
        sampling = self._sampling(rollout.temperature)
        environment = partial(find_environment(self._profile.task.environment), self._rewards)
        return GroupRunner(self._engine, tokenizer, environment, sampling, max_prompt_tokens=rollout.max_prompt_tokens)

    async def connect(self, rank_zero: Any) -> None:
        """`nccl`, `ipc`: the engine's processes and the trainer's first actor agree on how weights come. Both have started."""
        from asyncrl_cli.job.direct import RayRankZero

        await self._engine.connect(RayRankZero(rank_zero, self._name, self._profile.weights.timeout_s, self._place.workers))

    async def stop(self) -> None:
        """End the reward processes and the engine. Running groups end with an error."""
        await asyncio.gather(self._pool.close(), self._engine.close())

    async def submit(self, requests: Sequence[GroupRequest]) -> None:
        self._desk.begin(requests)

    @ray.method(num_returns=1 + GROUPS_PER_ANSWER)
    async def exchange(self, requests: Sequence[GroupRequest], seen: int) -> tuple[Exchanged | GroupPayload | None, ...]:
        """New groups in, ended ones and a report out (see exchange.py). Answers when something has changed since `seen`.

        Metadata for the driver, arrays for the trainer: an object each, so that the arrays never pass the driver.
        """
        self._desk.begin(requests)
        seen = await self._changes.after(seen)
        ended = self._desk.take()
        if self._desk.has_more:
            self._changes.note(is_urgent=True)
        exchanged = Exchanged(progress=self._progress(seen), results=tuple(result for result, _ in ended))
        return exchanged, *(payload for _, payload in ended), *[None] * (GROUPS_PER_ANSWER - len(ended))

    async def abort(self, key: AttemptKey) -> None:
        await asyncio.sleep(0)  # a group that has come in the same turn begins first
        await self._runner.abort(key)

    async def prefetch(self, manifest: Manifest, bucket_refs: list[Any]) -> float:
        return await self._loader.prefetch(manifest, bucket_refs)

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        return await self._loader.load(version, interrupt)

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        self._meter.evals(+1)
        try:
            return await self._runner.evaluate(request, self._sampling(self._profile.eval.temperature))
        finally:
            self._meter.evals(-1)

    async def abort_evals(self) -> None:
        await self._runner.abort_evals()

    async def pause(self) -> None:
        self._meter.pause(True)
        await self._engine.sleep()

    async def resume(self) -> None:
        await self._engine.wake()
        self._meter.pause(False)

    def _progress(self, seen: int) -> Progress:
        counters = self._engine.counters()
        report = self._meter.report(
            version=self._engine.version,
            sampled_tokens=self._engine.sampled_tokens,
            decode_steps=self._engine.decode_steps,
            running_tokens=self._runner.running_tokens,
            sums=counters.sums,
            gauges=counters.gauges,
        )
        return Progress(seen=seen, finished_sequences=self._desk.finished_sequences, reports=(report, self._rewards.report()))

    def _sampling(self, temperature: float) -> Any:
        from asyncrl_cli.engines.registry import sampling_of

        return sampling_of(self._profile.rollout, temperature)
