"""Syncs that send differences: rank 0's sender and workers, with a dictionary for an object store."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl_cli.contracts.weight_version import LoadReport
from asyncrl_cli.engines.port import Engine, PauseReport, Scores
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.job.rank_sending import ObjectStoreSender
from asyncrl_cli.job.rollout_weights import Loader
from asyncrl_cli.measure.meters import RolloutMeter
from asyncrl_cli.profile.schema import Interrupt, WeightsSection
from asyncrl_cli.weights.buckets import Bucket, DamagedWeights
from asyncrl_cli.weights.directory import Directory
from asyncrl_cli.weights.directory_buckets import DirectorySender
from asyncrl_cli.weights.receivers import SharedWeights
from asyncrl_cli.weights.senders import DeltaSender, DeltaTransport
from asyncrl_cli.weights.versions import Manifest, send
from tests.packed import copied, pack


@dataclass
class Stored:
    """An object in the store; `read` is what a worker calls."""

    value: Any

    def read(self) -> Any:
        return self.value


@pytest.fixture(autouse=True)
def object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(value: Any) -> Stored:
        if isinstance(value, Bucket):  # what comes back is read-only and nobody's own
            value = replace(value, data=np.frombuffer(value.data.tobytes(), dtype=np.uint8))
        return Stored(value)

    monkeypatch.setattr("ray.put", put)
    monkeypatch.setattr("ray.get", Stored.read)


class Keeping(Engine):
    """Keeps what it is given."""

    async def load(self, weights: Any, version: int, interrupt: Interrupt) -> PauseReport:
        self.held = dict(weights)
        return PauseReport(load_s=0.0, pause_s=0.0)

    async def load_in_place(self, fetch: Any, version: int, interrupt: Interrupt) -> PauseReport:
        self.held = copied(fetch())
        return PauseReport(load_s=0.0, pause_s=0.0)

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        raise AssertionError("there are no probes")


class Worker(Loader):
    def __init__(
        self,
        *,
        deltas: bool = True,
        dual_buffer: bool = True,
        version: int = -1,
        node_file: Path | None = None,
    ) -> None:
        meter = RolloutMeter("rollout-0", 8, lambda: 0.0, lambda: None)
        section = WeightsSection(dual_buffer=dual_buffer)
        engine, slots = Keeping(), Slots(8, hold=True)  # type: ignore[abstract]
        super().__init__(engine, section, meter, version, slots, deltas=deltas, node_file=node_file)

    def gets(self, manifest: Manifest, refs: Any) -> int:
        """Sync; the fetched bytes."""

        async def sync() -> LoadReport:
            await self.prefetch(manifest, refs)
            return await self.load(manifest.version, "keep-kv")

        return asyncio.run(sync()).fetched_bytes or 0


class Trainer:
    """Trains a little in each version."""

    def __init__(self, sender: DeltaTransport | None = None) -> None:
        self.sender, self.version = DeltaSender(sender or ObjectStoreSender()), -1
        generator = torch.Generator().manual_seed(0)
        self.weights = {
            name: (torch.randn(300, 40, generator=generator) * 0.1).bfloat16() for name in ("a", "b", "c")
        }

    def publishes(self, wanted: Collection[int] | None = None) -> tuple[Manifest, list[Any]]:
        """`wanted`: versions that workers may want; by default the last one."""
        self.sender.keep([self.version] if wanted is None else wanted)
        self.version += 1
        for one in self.weights.values():
            one[self.version % 7 :: 31] *= 1.01
        buckets = pack(self.weights, 2 * 300 * 40)
        prints = tuple(bucket.fingerprint for bucket in buckets)
        size = sum(len(bucket.data) for bucket in buckets)
        manifest = Manifest(version=self.version, num_bytes=size, fingerprints=prints, temperature=1.0)
        return manifest, send(self.sender, manifest, buckets)


def holds(worker: Worker, weights: Mapping[str, torch.Tensor]) -> bool:
    held = worker.engine.held  # type: ignore[attr-defined]
    return all(torch.equal(held[name].view(torch.int16), weights[name].view(torch.int16)) for name in weights)


@pytest.mark.parametrize("dual_buffer", [True, False])
def test_a_worker_fetches_differences_and_everything_when_it_has_missed_a_version(dual_buffer):
    trainer, steady, missing = Trainer(), Worker(dual_buffer=dual_buffer), Worker(dual_buffer=dual_buffer)
    fetched: list[tuple[int, int | None]] = []
    for version in range(6):
        manifest, refs = trainer.publishes()
        both = [steady.gets(manifest, refs), None]
        assert holds(steady, trainer.weights)
        if version != 2:
            both[1] = missing.gets(manifest, refs)
            assert holds(missing, trainer.weights)
        fetched.append((both[0], both[1]))  # type: ignore[arg-type]
    whole = fetched[0][0]
    assert whole == manifest.num_bytes
    assert all(0 < steady_bytes < 0.1 * whole for steady_bytes, _ in fetched[1:])
    assert [size == whole for _, size in fetched] == [True, False, False, True, False, False]


def test_after_a_restart_of_either_end_everything_is_sent_and_a_worker_without_deltas_gets_all():
    trainer, worker, plain = Trainer(), Worker(), Worker(deltas=False)
    for _ in range(2):
        manifest, refs = trainer.publishes()
        worker.gets(manifest, refs)
        assert plain.gets(manifest, refs) == manifest.num_bytes
    trainer.sender = DeltaSender(ObjectStoreSender())  # a resumed run publishes its version to new workers
    manifest, refs = trainer.publishes()
    assert worker.gets(manifest, refs) == manifest.num_bytes
    again = Worker(version=1)
    assert again.gets(manifest, refs) == manifest.num_bytes
    manifest, refs = trainer.publishes()
    assert max([one.gets(manifest, refs) for one in (worker, again)]) < 0.1 * manifest.num_bytes
    assert holds(worker, trainer.weights)
    assert holds(again, trainer.weights)


def test_a_version_that_was_withdrawn_before_anybody_began_it_is_no_base():
    """The worker is slow to load version 0; 1 and 2 are withdrawn meanwhile."""
    trainer, worker = Trainer(), Worker()
    worker.gets(*trainer.publishes())
    trainer.publishes(wanted=[0])
    trainer.publishes(wanted=[0])
    manifest, refs = trainer.publishes(wanted=[0])
    assert 0 < worker.gets(manifest, refs) < 0.3 * manifest.num_bytes
    assert holds(worker, trainer.weights)


def test_by_a_directory_a_worker_reads_only_differences_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    """Each delta's file is damaged in turn. After a refusal all bytes come, as after a missed version."""
    here = Directory(f"file://{tmp_path}/run")
    trainer, worker = Trainer(DirectorySender(here)), Worker()
    assert worker.gets(*trainer.publishes()) == sum(2 * one.numel() for one in trainer.weights.values())
    for damage in (
        None,
        lambda data: data[:-1],
        lambda data: data[:20] + b"\0" + data[21:],
        lambda data: b"",
    ):
        manifest, refs = trainer.publishes()
        deltas = sorted((tmp_path / "run" / f"version-{trainer.version:06d}").glob("*.delta"))
        assert [path.name for path in deltas] == [f"model-0000{i}-of-00003.delta" for i in (1, 2, 3)]
        if damage is None:
            assert worker.gets(manifest, refs) == sum(path.stat().st_size for path in deltas)
            assert holds(worker, trainer.weights)
        else:
            deltas[1].write_bytes(damage(deltas[1].read_bytes()))
            before = {name: one.clone() for name, one in worker.engine.held.items()}  # type: ignore[attr-defined]
            with pytest.raises(DamagedWeights):
                worker.gets(manifest, refs)
            assert holds(worker, before)
            manifest, refs = trainer.publishes()
            assert worker.gets(manifest, refs) == manifest.num_bytes
            assert holds(worker, trainer.weights)


def test_what_a_wrong_base_makes_is_refused_and_the_old_weights_stay():
    """A bit of the worker's copy is another between two versions; the next version is fetched whole."""
    trainer, worker = Trainer(), Worker()
    worker.gets(*trainer.publishes())
    before = {name: one.clone() for name, one in trainer.weights.items()}
    other = {name: one.clone() for name, one in before.items()}
    other["b"].view(torch.int16)[17, 34] ^= 4
    worker._arrived._kept = SharedWeights(pack(other, 2**20))
    with pytest.raises(DamagedWeights, match="bucket 1 of 3"):
        worker.gets(*trainer.publishes())
    assert holds(worker, before)
    manifest, refs = trainer.publishes()
    assert worker.gets(manifest, refs) == manifest.num_bytes
    assert holds(worker, trainer.weights)


@pytest.mark.parametrize("dual_buffer", [True, False])
def test_a_nodes_workers_fetch_once_and_a_restarted_one_finds_the_nodes_base(dual_buffer, tmp_path):
    trainer = Trainer()
    workers = [Worker(dual_buffer=dual_buffer, node_file=tmp_path / "node.json") for _ in range(3)]
    for version in range(4):
        manifest, refs = trainer.publishes()
        if version == 2:  # the last one was restarted, and is the first that is told of the version
            again = Worker(dual_buffer=dual_buffer, version=1, node_file=tmp_path / "node.json")
            workers = [again, *workers[:2]]
        first, *others = [one.gets(manifest, refs) for one in workers]
        assert first == manifest.num_bytes if version == 0 else 0 < first < 0.1 * manifest.num_bytes
        assert others == [0, 0]
        assert all(holds(one, trainer.weights) for one in workers)
