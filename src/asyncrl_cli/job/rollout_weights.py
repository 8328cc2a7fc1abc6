"""A rollout worker's side of a weight sync: a version is received, swapped in and verified. Runs in the
worker's process (rollout_host.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle

from asyncrl_cli.contracts.weight_version import LoadReport
from asyncrl_cli.engines.port import Engine
from asyncrl_cli.envs.slots import Slots, VersionGate
from asyncrl_cli.job.host_process import Refs, arriving
from asyncrl_cli.job.ray.calls import Limit, answer
from asyncrl_cli.measure.meters import RolloutMeter
from asyncrl_cli.profile.rollout_sections import WeightsSection
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Interrupt
from asyncrl_cli.weights.versions import (
    AT_ONCE_S,
    CALL_MARGIN_S,
    TIMEOUT_KEY,
    Manifest,
    RankZero,
    judge,
    mean_abs_diff,
    median_abs_diff,
    turn_s,
)

if TYPE_CHECKING:
    import torch

    from asyncrl_cli.job.host_process import Whole
    from asyncrl_cli.weights.buckets import Bucket
    from asyncrl_cli.weights.receivers import SharedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A version that waits to be loaded. `weights` is None if the load itself is to fetch them by `refs`."""

    manifest: Manifest
    refs: Refs
    weights: Mapping[str, torch.Tensor] | None


class Loader:
    """A rollout worker's side of a weight sync. Versions only rise: it refuses a version that is not newer
    than the loaded one and any that waits to be loaded.

    `held`: version of the engine's weights; one less if the first load may bring that same version, to verify
    it. `fingerprint`: of the last version that was loaded; "" before. `places`: a drain waits for the
    trajectories that have begun there, even if they are waiting for a tool. `whole`: converts the buckets
    that arrive to the engine's. `deltas`: keeps the newest version that has arrived, to which the next one's
    deltas are applied. `node_file`: a file of this node's workers, who share what arrives (node_buffer.py).
    """

    def __init__(
        self,
        engine: Engine,
        weights: WeightsSection,
        meter: RolloutMeter,
        held: int,
        places: Slots,
        whole: Whole = iter,
        *,
        deltas: bool = False,
        gate: VersionGate | None = None,
        node_file: Path | None = None,
    ) -> None:
        from asyncrl_cli.weights.node_buffer import NodeBuffer  # torch: the driver imports this module

        self.engine = engine
        self._deltas = deltas
        wait_s, merged = weights.timeout_s / 2, node_file and node_file.with_suffix(".merged.json")
        self._arrived = NodeBuffer(node_file, keeps=deltas, wait_s=wait_s)
        self._merged = NodeBuffer(merged, keeps=False, wait_s=wait_s)
        self._fetched: list[int] | None = None
        self._whole = whole
        self._weights = weights
        self._meter = meter
        self._places = places
        self._gate = gate or VersionGate(lambda: engine.version)
        self.held = held
        self.fingerprint = ""
        self.last_load: LoadReport | None = None
        self.received: Received | None = None

    def forget(self) -> None:
        """The engine is about to lose its weights: whatever comes next is new."""
        self.held, self.received = -1, None

    async def prefetch(self, manifest: Manifest, refs: Refs) -> float:
        """Fetch, check and copy the buckets in a thread, unless the load is to fetch them. Returns the
        seconds.

        Raises ValueError for a version not newer than what this worker holds or has received, also if a newer
        one came meanwhile.
        """
        began_s = time.monotonic()
        self._check_newer(manifest.version)
        with self._meter.receiving():
            weights = await asyncio.to_thread(self._receive, manifest, refs)
            self._check_newer(manifest.version)
        self.received = Received(manifest=manifest, refs=refs, weights=weights)
        return time.monotonic() - began_s

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        """Swap the received weights in, then verify them by the probes. Raises ValueError, with the old
        version still loaded, if `version` was not received."""
        engine, meter = self.engine, self._meter
        await self._gate.quiet(version)
        async with self._places.drained() if interrupt == "drain" else nullcontext():
            received = self.received
            if received is None or received.manifest.version != version:
                raise ValueError(f"asked to load version {version}, which was not received")
            manifest = received.manifest
            meter.load_begins(interrupt)
            try:
                try:
                    if received.weights is not None:
                        # They wait in the second buffer, or on rank 0: generation stops for the copy alone.
                        pause = await engine.load(received.weights, version, interrupt)
                    else:
                        # Without a second buffer, generation also stops while the buckets come.
                        fetch = partial(self._buckets, manifest, received.refs)
                        pause = await engine.load_in_place(fetch, version, interrupt)
                finally:
                    # The buffers flip here: the second one is free for the next version. Also after a
                    # failure, for this version may come again; but not if a newer one has come meanwhile.
                    if self.received is received:
                        self.received = None
                self.held, self.fingerprint = version, manifest.fingerprint
                report = self.last_load = LoadReport(
                    version=version,
                    send_s=pause.fetch_s,
                    load_s=pause.load_s,
                    pause_s=pause.pause_s,
                    logprob_abs_diff=None,
                    fetched_bytes=None if self._fetched is None else sum(self._fetched),
                    fingerprint=manifest.fingerprint,
                )
                if not manifest.probe_tokens:
                    return report
                if engine.stops_to_score:
                    # the probe also freezes the responses that began after a drain
                    meter.load_begins("keep-kv")
                else:
                    meter.load_ended()
                # After the load, although all bytes were verified before it: only logprobs show that the
                # engine computes with them. It may hold prepacked or tied copies that a load does not reach.
                probes = [list(tokens) for tokens in manifest.probe_tokens]
                scores = await engine.score(probes, manifest.temperature)
                judged = None  # the first version of a process has none before it
                if manifest.previous_logprobs:
                    judged = judge(scores.logprobs, manifest.probe_logprobs, manifest.previous_logprobs)
                return replace(
                    report,
                    pause_s=report.pause_s + scores.pause_s,
                    logprob_abs_diff=mean_abs_diff(scores.logprobs, manifest.probe_logprobs),
                    logprob_abs_diff_median=median_abs_diff(scores.logprobs, manifest.probe_logprobs),
                    verdict=judged.verdict if judged else None,
                    loaded_share=judged.share if judged else None,
                )
            finally:
                meter.load_ended()
                self._gate.changed()

    def _receive(self, manifest: Manifest, refs: Refs) -> Mapping[str, torch.Tensor] | None:
        """Runs in a thread. With `weights.overlap` a bucket is copied while the next ones arrive. Returns
        once all are verified."""
        if self._weights.transport in DIRECT_TRANSPORTS:
            from asyncrl_cli.weights.receivers import AnnouncedWeights

            return AnnouncedWeights(refs)
        if self.engine.fetches_versions:
            return self.engine.fetch(refs[0].version_at)
        if not self._weights.dual_buffer:
            return None
        arrived = self._shared(manifest, refs)
        if self._whole is iter:
            return arrived
        return self._merged.weights(manifest, lambda base: self._whole(iter([arrived.whole()])))

    def _buckets(self, manifest: Manifest, refs: Refs) -> list[Bucket]:
        """Without a second buffer, unless deltas need one for their base."""
        if self._deltas:
            return list(self._whole(iter([self._shared(manifest, refs).whole()])))
        fetched = self._fetched = list[int]()
        return list(self._whole(arriving(manifest, refs, count=fetched.append)))

    def _shared(self, manifest: Manifest, refs: Refs) -> SharedWeights:
        """In this node's memory, where the first of its workers fetches it."""
        fetched = self._fetched = list[int]()

        def fetch(base: SharedWeights | None) -> Iterable[Bucket]:
            buckets = arriving(manifest, refs, base, fetched.append)
            return buckets if self._weights.overlap else list(buckets)

        return self._arrived.weights(manifest, fetch)

    def _check_newer(self, version: int) -> None:
        newest = self.held if self.received is None else max(self.held, self.received.manifest.version)
        if version <= newest:
            what = f"version {version} of the weights is not newer than version {newest}"
            raise ValueError(f"{what}, which this worker has already received")


class RayRankZero(RankZero):
    """Rank 0 as one rollout worker sees it, by calls to the trainer's first actor.

    Rank 0 limits its own work to `timeout_s`, and a turn to `timeout_s` for each of `workers`. The worker
    waits longer than that, so that rank 0's own error comes first.
    """

    def __init__(self, actor: ActorHandle, worker: str, timeout_s: float, workers: int) -> None:
        self._actor = actor
        self._worker = worker
        self._timeout_s = timeout_s
        self._workers = workers

    async def meeting_point(self) -> tuple[str, int]:
        ref = self._actor.free_address.remote()
        host, port = await answer(ref, executor="trainer-0", call="an address", limit=Limit(AT_ONCE_S))
        return host, port

    async def leave(self) -> None:
        ref = self._actor.leave.remote(self._worker)
        await answer(ref, executor="trainer-0", call=f"the leave of {self._worker}", limit=Limit(AT_ONCE_S))

    async def ask(self, call: str, *args: object) -> Any:
        rank_zeros_s = turn_s(self._timeout_s, self._workers) if call == "turn" else self._timeout_s
        limit = Limit(rank_zeros_s + CALL_MARGIN_S, TIMEOUT_KEY, self._timeout_s)
        ref = self._actor.direct.remote(call, self._worker, *args)
        return await answer(ref, executor="trainer-0", call=f"{call} for {self._worker}", limit=limit)
