"""The rollout actor: an engine, its group runner and its rewards in one asyncio process.

    exchange ─> GroupRunner ─> Engine (slots) ─> Environment, RewardPool ─> (GroupResult, GroupPayload) ─> exchange
    prefetch ─> second buffer ─> load ─> Engine.load at an interrupt ─> probes scored by the engine itself

Without a second buffer (`weights.dual_buffer = false`) `prefetch` only notes where the buckets are, and `load` fetches them within
the interrupt. Versions only rise: what is not newer than the version that is held, or waits for its load, is refused.

Who waits for whom: a group for slots, the engine and rewards; `prefetch` for the transport, in a thread; `load`
for the engine's interrupt (with `drain`: for running sequences); `exchange` for a change, one second at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from asyncrl_cli.job.exchange import GROUPS_PER_ANSWER, Exchanged, GroupDesk
from asyncrl_cli.job.meters import Changes, MeteredRewards, RolloutMeter
from asyncrl_cli.job.process import set_up_process
from asyncrl_cli.job.settings import RolloutSettings
from asyncrl_cli.loop.ports import (
    AttemptKey,
    EvalRequest,
    EvalResult,
    GroupRequest,
    Interrupt,
    LoadReport,
    LoadVerdict,
    Progress,
)
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS
from asyncrl_cli.samples.trajectory import GroupPayload

if TYPE_CHECKING:
    import torch

    from asyncrl_cli.engines.port import PauseReport
    from asyncrl_cli.envs.group_runner import GroupRunner
    from asyncrl_cli.weights.buckets import Bucket, Manifest

GETS_AHEAD = 2
"""Buckets that are fetched, or wait in memory, while an earlier one is verified and copied."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One version that waits for its load: `weights` are the second buffer, checked; without one, `bucket_refs` say where the
    buckets are."""

    manifest: Manifest
    weights: Mapping[str, torch.Tensor]
    bucket_refs: Sequence[Any] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """`pause_s`: how long generation stood still for it. See `LoadReport` for the others, None where they were not measured."""

    pause_s: float = 0.0
    logprob_abs_diff: float | None = None
    verdict: LoadVerdict | None = None
    loaded_share: float | None = None


class RolloutActor:
    """Methods mirror `loop.ports.RolloutWorker`; `RayRolloutWorker` calls them."""

    def __init__(self, name: str, settings: RolloutSettings, log_path: Path | None = None) -> None:
        set_up_process(threads=settings.threads, log_path=log_path)
        self._name = name
        self._settings = settings
        self._held = settings.version - 1  # a first load may bring the very version of the first weights: it verifies them
        self._received: Received | None = None

    def __repr__(self) -> str:
        return self._name

    async def start(self) -> None:
        """Load the model and start the reward processes, side by side. May take minutes."""
        from asyncrl_cli.engines.registry import make_engine
        from asyncrl_cli.tasks.rewards import RewardPool, default_workers

        self._changes = Changes()
        self._meter = RolloutMeter(self._name, self._settings.slots, time.monotonic, self._changes.note)
        self._engine = make_engine(self._settings, self._meter.running)
        workers = self._settings.reward_workers or default_workers()
        self._pool = RewardPool(self._settings.reward, timeout_s=self._settings.reward_timeout_s, workers=workers)
        self._rewards = MeteredRewards(self._name.replace("rollout", "reward"), self._pool, time.monotonic)
        await asyncio.gather(self._engine.start(), self._pool.start())
        self._runner = self._make_runner()
        self._desk = GroupDesk(self._runner.run, self._changes.note)
        logger.info("%s started: %s", self._name, self._settings)

    async def connect(self, rank_zero: Any) -> None:
        """`nccl`, `ipc`: the engine's processes and the trainer's first actor agree on how weights come. Both have started."""
        from asyncrl_cli.job.direct import RayRankZero

        settings = self._settings
        link = RayRankZero(rank_zero, self._name, settings.weights_timeout_s, settings.workers)
        await self._engine.connect(link, settings.load_bucket_size_bytes, settings.weights_timeout_s)

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
        """Fetch, check and unpack the buckets off the event loop; generation goes on. Without a second buffer, and where rank 0
        sends the bytes within the load (`nccl`, `ipc`): only note them.

        ValueError for a version that is not newer than what this worker holds or has received; also if a newer one came meanwhile.
        """
        began_s = time.monotonic()
        self._check_newer(manifest.version)
        if self._settings.transport in DIRECT_TRANSPORTS:
            from asyncrl_cli.weights.direct import AnnouncedWeights

            self._received = Received(manifest=manifest, weights=AnnouncedWeights(bucket_refs))
        elif self._settings.dual_buffer:
            weights = await asyncio.to_thread(self._receive, manifest, bucket_refs)
            self._check_newer(manifest.version)
            await self._engine.prepare(weights, manifest.version)
            self._check_newer(manifest.version)
            self._received = Received(manifest=manifest, weights=weights)
        else:
            self._received = Received(manifest=manifest, weights={}, bucket_refs=bucket_refs)
        return time.monotonic() - began_s

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        """Swap the received weights in. Raises, with the old version still loaded, if there are none of `version`."""
        received = self._received
        if received is None or received.manifest.version != version:
            raise ValueError(f"asked to load version {version}, which was not received")
        self._meter.load_begins(interrupt)
        try:
            try:
                pause = await self._load(received, interrupt)
            finally:
                if self._received is received:
                    self._received = None  # also if it failed: the version may come again
            self._held = version
            if self._engine.stops_to_score:
                self._meter.load_begins("keep-kv")  # the probe freezes also what a drain has just let in
            else:
                self._meter.load_ended()
            probed = await self._probe(received.manifest)
        finally:
            self._meter.load_ended()
        return LoadReport(
            version=version,
            send_s=pause.fetch_s,
            load_s=pause.load_s,
            pause_s=pause.pause_s + probed.pause_s,
            logprob_abs_diff=probed.logprob_abs_diff,
            verdict=probed.verdict,
            loaded_share=probed.loaded_share,
        )

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        self._meter.evals(+1)
        try:
            result: EvalResult = await self._runner.evaluate(request, self._eval_sampling())
            return result
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
        report = self._meter.report(
            version=self._engine.version,
            sampled_tokens=self._engine.sampled_tokens,
            decode_steps=self._engine.decode_steps,
            running_tokens=self._runner.running_tokens,
            counters=self._engine.counters(),
        )
        return Progress(seen=seen, finished_sequences=self._desk.finished_sequences, reports=(report, self._rewards.report()))

    async def _probe(self, manifest: Manifest) -> Probed:
        """The probes, scored by the engine itself, beside the trainer's logprobs of this version and of the one before."""
        from asyncrl_cli.weights.probes import judge, mean_abs_diff

        if not manifest.probe_tokens:
            return Probed()
        probes = [list(tokens) for tokens in manifest.probe_tokens]
        scores = await self._engine.score(probes, manifest.temperature)
        judged = judge(scores.logprobs, manifest.probe_logprobs, manifest.previous_logprobs) if manifest.previous_logprobs else None
        return Probed(
            pause_s=scores.pause_s,
            logprob_abs_diff=mean_abs_diff(scores.logprobs, manifest.probe_logprobs),
            verdict=judged and judged.verdict,
            loaded_share=judged and judged.share,
        )

    def _check_newer(self, version: int) -> None:
        newest = self._held if self._received is None else max(self._held, self._received.manifest.version)
        if version <= newest:
            raise ValueError(f"version {version} of the weights came late or again: after version {newest}; versions only rise")

    async def _load(self, received: Received, interrupt: Interrupt) -> PauseReport:
        version, size_bytes = received.manifest.version, self._settings.load_bucket_size_bytes
        if self._settings.dual_buffer:
            return await self._engine.load(received.weights, version, interrupt)
        from asyncrl_cli.engines.port import OneBufferEngine

        assert isinstance(self._engine, OneBufferEngine), "profile/check.py refuses other engines"
        fetch = partial(self._fetch, received.manifest, received.bucket_refs)
        return await self._engine.load_in_place(fetch, version, interrupt, size_bytes)

    def _fetch(self, manifest: Manifest, bucket_refs: Sequence[Any]) -> list[Bucket]:
        """In a thread."""
        return list(self._arriving(manifest, bucket_refs))

    def _receive(self, manifest: Manifest, bucket_refs: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        """In a thread. Overlapped, a bucket is copied while the next ones come; nothing counts before all are verified."""
        buckets = self._arriving(manifest, bucket_refs) if self._settings.overlap else self._fetch(manifest, bucket_refs)
        return self._engine.receive(buckets, self._settings.load_bucket_size_bytes)

    def _arriving(self, manifest: Manifest, bucket_refs: Sequence[Any]) -> Iterator[Bucket]:
        """In a thread: the buckets in the order in which they were sent, each verified. From the object store they are mapped."""
        from asyncrl_cli.weights.buckets import verified

        with ThreadPoolExecutor(GETS_AHEAD, thread_name_prefix="get") as gets:
            yield from verified(self._in_order(gets, manifest, bucket_refs), manifest)

    def _in_order(self, gets: ThreadPoolExecutor, manifest: Manifest, bucket_refs: Sequence[Any]) -> Iterator[Bucket]:
        """The next get begins when a bucket is taken, so that a slow taker has no more than GETS_AHEAD of them waiting."""
        submits = (gets.submit(self._get, manifest, ref) for ref in bucket_refs)
        ahead = deque(islice(submits, GETS_AHEAD))
        while ahead:
            ahead[0].result()
            ahead.extend(islice(submits, 1))
            yield ahead.popleft().result()

    def _get(self, manifest: Manifest, bucket_ref: Any) -> Bucket:
        from asyncrl_cli.job.transports import receiver_for

        return receiver_for(self._settings.transport).get(manifest, bucket_ref)

    def _make_runner(self) -> GroupRunner:
        from transformers import AutoTokenizer

        from asyncrl_cli.engines.registry import sampling_of
        from asyncrl_cli.envs import find_environment
        from asyncrl_cli.envs.group_runner import GroupRunner

        settings = self._settings
        return GroupRunner(
            self._engine,
            AutoTokenizer.from_pretrained(settings.model_dir, trust_remote_code=settings.trust_remote_code),
            partial(find_environment(settings.environment), self._rewards),
            sampling_of(settings, settings.temperature),
            max_prompt_tokens=settings.max_prompt_tokens,
        )

    def _eval_sampling(self) -> Any:
        from asyncrl_cli.engines.registry import sampling_of

        return sampling_of(self._settings, self._settings.eval_temperature)
