"""A rollout worker with a real engine, and a version that is damaged on the disk: refused, the old one serves
on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.job.rollout_weights import Loader
from asyncrl_cli.measure.meters import RolloutMeter
from asyncrl_cli.profile.schema import WeightsSection
from asyncrl_cli.weights.buckets import DamagedWeights
from asyncrl_cli.weights.senders import DiskSender
from asyncrl_cli.weights.versions import Manifest, send
from tests.engines import tiny
from tests.engines.made import made_for
from tests.packed import pack

PROBE = [5, 9, 33, 2, 61, 17, 8, 40]


@pytest.mark.slow
def test_a_version_damaged_on_the_disk_is_refused_and_the_old_one_serves_on(tmp_path: Path) -> None:
    model = tiny.make_model(tied=True)
    model_dir = tiny.save(model, tmp_path / "model")
    weights = {version: tiny.weights_after(model, version) for version in (1, 2)}
    expected = {version: tiny.plain_logprobs(model, weights[version], PROBE) for version in weights}
    sent = {v: _send(tmp_path / "weights", model_dir, v, weights[v], expected[v]) for v in weights}
    path = next((tmp_path / "weights" / "version-000002").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    async def body() -> None:
        engine = TransformersEngine(
            *made_for(model_dir, slots=2, max_prompt_tokens=64, max_response_tokens=16)
        )
        worker = _worker(engine)
        async with asyncio.timeout(60):
            await engine.start()
            try:
                await worker.prefetch(*sent[1])
                report = await worker.load(1, "drain")
                assert report.logprob_abs_diff < 1e-5
                with pytest.raises(DamagedWeights, match=r"version 2: bucket .* arrived damaged"):
                    await worker.prefetch(*sent[2])
                with pytest.raises(ValueError, match="asked to load version 2, which was not received"):
                    await worker.load(2, "drain")
                scores = await engine.score([PROBE], 1.0)
                assert engine.version == 1
                assert scores.logprobs[0] == pytest.approx(expected[1], abs=1e-5)
                assert scores.logprobs[0] != pytest.approx(expected[2], abs=1e-2)
            finally:
                await engine.close()

    asyncio.run(body())


def _worker(engine: TransformersEngine) -> Loader:
    return Loader(
        engine,
        WeightsSection(transport="disk"),
        RolloutMeter("rollout-0", 2, lambda: 0.0, lambda: None),
        -1,
        Slots(2, hold=True),
    )


def _send(
    root: Path, model_dir: Path, version: int, weights: dict[str, torch.Tensor], logprobs: list[float]
) -> tuple[Manifest, list[Any]]:
    buckets = pack(weights, 300_000)
    manifest = Manifest(
        version=version,
        num_bytes=sum(len(bucket.data) for bucket in buckets),
        fingerprints=tuple(bucket.fingerprint for bucket in buckets),
        temperature=1.0,
        probe_tokens=(tuple(PROBE),),
        probe_logprobs=(tuple(logprobs),),
    )
    return manifest, send(DiskSender(root, model_dir), manifest, buckets)
