"""A rollout worker's side of a weight sync: a version is received beside generation, and loaded at an interrupt.

    prefetch ─> second buffer ─> load ─> Engine.load at an interrupt ─> probes scored by the engine itself

Without a second buffer (`weights.dual_buffer = false`) `prefetch` only notes where the buckets are, and `load` fetches them within
the interrupt; by `nccl` and `ipc` rank 0 sends them then. Versions only rise: what is not newer than the version that is held, or
waits for its load, is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from asyncrl_cli.job.transports import arriving
from asyncrl_cli.loop.meters import RolloutMeter
from asyncrl_cli.loop.ports import LoadReport
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Interrupt, WeightsSection

if TYPE_CHECKING:
    import torch

    from asyncrl_cli.engines.port import Engine, PauseReport
    from asyncrl_cli.weights.buckets import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One version that waits for its load. `weights` is None where the load fetches them, by `refs`."""

    manifest: Manifest
    refs: Sequence[Any]
    weights: Mapping[str, torch.Tensor] | None


class Loader:
    """`held`: version of the engine's weights; one less where the first load may bring that very version, to verify it."""

    def __init__(self, engine: Engine, weights: WeightsSection, meter: RolloutMeter, held: int) -> None:
        self._engine = engine
        self._weights = weights
        self._meter = meter
        self._held = held
        self._received: Received | None = None

    async def prefetch(self, manifest: Manifest, refs: Sequence[Any]) -> float:
        """Fetch, check and copy the buckets off the event loop, as far as they are not to come within the load. Seconds.

        ValueError for a version that is not newer than what this worker holds or has received; also if a newer one came meanwhile.
        """
        began_s = time.monotonic()
        self._check_newer(manifest.version)
        weights = await asyncio.to_thread(self._receive, manifest, refs)
        self._check_newer(manifest.version)
        self._received = Received(manifest=manifest, refs=refs, weights=weights)
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
            report = LoadReport(
                version=version, send_s=pause.fetch_s, load_s=pause.load_s, pause_s=pause.pause_s, logprob_abs_diff=None
            )
            return await self._probed(report, received.manifest)
        finally:
            self._meter.load_ended()

    async def _load(self, received: Received, interrupt: Interrupt) -> PauseReport:
        manifest, refs = received.manifest, received.refs
        if received.weights is not None:
            return await self._engine.load(received.weights, manifest.version, interrupt)
        return await self._engine.load_in_place(lambda: list(arriving(manifest, refs)), manifest.version, interrupt)

    async def _probed(self, report: LoadReport, manifest: Manifest) -> LoadReport:
        """With the probes, scored by the engine itself, beside the trainer's logprobs of this version and of the one before."""
        from asyncrl_cli.weights.probes import judge, mean_abs_diff

        if not manifest.probe_tokens:
            return report
        probes = [list(tokens) for tokens in manifest.probe_tokens]
        scores = await self._engine.score(probes, manifest.temperature)
        judged = judge(scores.logprobs, manifest.probe_logprobs, manifest.previous_logprobs) if manifest.previous_logprobs else None
        return replace(
            report,
            pause_s=report.pause_s + scores.pause_s,
            logprob_abs_diff=mean_abs_diff(scores.logprobs, manifest.probe_logprobs),
            verdict=judged and judged.verdict,
            loaded_share=judged and judged.share,
        )

    def _receive(self, manifest: Manifest, refs: Sequence[Any]) -> Mapping[str, torch.Tensor] | None:
        """In a thread. Overlapped, a bucket is copied while the next ones come; nothing counts before all are verified."""
        if self._weights.transport in DIRECT_TRANSPORTS:
            from asyncrl_cli.weights.direct import AnnouncedWeights

            return AnnouncedWeights(refs)
        if not self._weights.dual_buffer:
            return None
        buckets = arriving(manifest, refs)
        return self._engine.receive(buckets if self._weights.overlap else list(buckets))

    def _check_newer(self, version: int) -> None:
        newest = self._held if self._received is None else max(self._held, self._received.manifest.version)
        if version <= newest:
            raise ValueError(f"version {version} of the weights came late or again: after version {newest}; versions only rise")
