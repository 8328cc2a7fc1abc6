"""Weights that two ranks of a real trainer send by rows, through Ray's object store, to a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl_cli.contracts.ports import LoopSnapshot
from asyncrl_cli.contracts.prompt_group import TrainBatch
from asyncrl_cli.contracts.weight_version import LoadReport
from asyncrl_cli.job.driver_crew import CrewOrder, started_crew
from asyncrl_cli.job.host_process import arriving
from asyncrl_cli.profile.schema import ModelSection, Profile
from asyncrl_cli.weights.buckets import Bucket
from asyncrl_cli.weights.deltas import DeltaRef
from asyncrl_cli.weights.receivers import SharedWeights
from tests.packed import copied

from .crew import REWARD, made_up_group, make_model, nodes, small_profile

pytestmark = pytest.mark.slow


def test_a_worker_gets_bit_for_bit_what_two_ranks_have_trained(tmp_path: Path) -> None:
    """The first version whole, the next one as a difference. The expected weights come from the ranks'
    checkpoint. (Whole versions of two ranks that train: tests/run/test_train.py.)"""
    from asyncrl_cli.job.ray.session import ray_session

    weights = {"encoding": "delta", "gather_bucket_size_mb": 1}
    profile = small_profile(placement={"trainer_workers": 2}, weights=weights, trainer={"lr": 1e-5})
    profile = profile.model_copy(update={"model": ModelSection(dtype="bfloat16")})
    model_dir = make_model(tmp_path / "model")
    with ray_session(profile, cluster=nodes((2, 0), elastic_cpus=True)) as plan:
        loads, sizes = asyncio.run(_syncs(plan, profile, model_dir, tmp_path))
    first, second = loads
    assert first.fetched_bytes == sizes[0]
    assert 0 < second.fetched_bytes < 0.8 * sizes[1]
    assert all(load.logprob_abs_diff_median < 0.1 for load in loads)


async def _syncs(
    plan: Any, profile: Profile, model_dir: Path, tmp_path: Path
) -> tuple[list[LoadReport], list[int]]:
    where = {"model_dir": model_dir, "run_dir": tmp_path / "run", "log_dir": tmp_path / "logs"}
    loads, sizes = list[LoadReport](), list[int]()
    order = CrewOrder(plan=plan, profile=profile, further={}, reward=REWARD, **where)
    async with started_crew(order) as crew:
        trainer, (worker,) = crew.trainer, crew.workers
        base: SharedWeights | None = None
        for version in (0, 1):
            if version:
                groups = tuple(made_up_group(number, 4, crew.store) for number in range(2))
                await trainer.train(TrainBatch(step=1, window=0, step_in_window=0, groups=groups))
            await trainer.gather(version)
            published = await trainer.publish(version)
            await worker.prefetch(published)
            loads.append(await worker.load(version, "drain"))
            manifest, refs = published.handle
            sizes.append(manifest.num_bytes)
            are_deltas = any(isinstance(ref, DeltaRef) for ref in refs)
            assert are_deltas == (version == 1)
            buckets = list(arriving(manifest, refs, base))  # this process is another worker
            base = SharedWeights(buckets, version)
            await trainer.snapshot(version)
            snapshot = LoopSnapshot(
                step=version, version=version, at_window_boundary=True, loop_state={}, payloads=()
            )
            await trainer.write(tmp_path / f"step-{version}", snapshot)
            _compare(buckets, tmp_path / f"step-{version}")
    return loads, sizes


def _compare(buckets: Sequence[Bucket], checkpoint: Path) -> None:
    from asyncrl_cli.train.trainer_state import SavedState

    halves = [sum(len(bucket.data) for bucket in buckets[rank::2]) for rank in range(2)]
    assert max(halves) < 1.1 * min(halves)
    saved, found = SavedState(checkpoint), copied(buckets)
    names = [key.removeprefix("weight/") for key in saved.shapes if key.startswith("weight/")]
    assert set(names) <= found.keys()
    for name in names:
        expected = torch.empty(saved.shapes[f"weight/{name}"])
        saved.read(f"weight/{name}", expected)
        assert torch.equal(found[name].view(torch.int16), expected.bfloat16().view(torch.int16)), name
