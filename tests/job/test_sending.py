"""Rank 0's sending, with and without overlap: what is sent when, and that the same arrives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import numpy as np
import pytest
import ray
import torch

from asyncrl_cli.job.rank_sending import ObjectStoreSender, Sending
from asyncrl_cli.weights.buckets import Bucket, BufferPool, Packing, Unpacked, fingerprint, plan_layout
from asyncrl_cli.weights.receivers import verified
from asyncrl_cli.weights.senders import DeltaSender
from asyncrl_cli.weights.versions import Manifest, Sender
from tests.job.crew import make_model
from tests.packed import specs_of

WAIT_S = 30.0
"""A bound on what takes milliseconds."""
TENSORS = {name: torch.full((16,), float(number)) for number, name in enumerate("abcde")}


class Transport:
    """Keeps copies, as an object store does; `held` stops its puts until it is set."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.threads: list[str] = []
        self.put_one = threading.Semaphore(0)
        self.held = threading.Event()
        self.held.set()
        self.versions: list[str] = []
        self.wanted: list[list[int]] = []
        self.finished_in: list[str] = []

    def begin(self, version: int, num_buckets: int) -> None:
        self.versions.append(f"begin {version}")

    def keep(self, wanted: Collection[int]) -> None:
        self.wanted.append(list(wanted))

    def finish(self, manifest: Manifest) -> None:
        self.versions.append(f"finish {manifest.version}")
        self.finished_in.append(threading.current_thread().name)

    def put(self, bucket: Bucket) -> int:
        assert self.held.wait(WAIT_S)
        self.buckets.append(Bucket(data=bucket.data.copy(), entries=bucket.entries))
        self.threads.append(threading.current_thread().name)
        self.put_one.release()
        return len(self.buckets) - 1


def published(version: int, gathered: Packing) -> tuple[Manifest, list[Bucket]]:
    buckets = gathered.seal()
    fingerprints = tuple(bucket.fingerprint for bucket in buckets)
    return Manifest(
        version=version, num_bytes=gathered.num_bytes, fingerprints=fingerprints, temperature=1.0
    ), buckets


def packing() -> Packing:
    """One tensor per bucket."""
    return Packing(plan_layout(specs_of(TENSORS), 64))


def gather(gathered: Packing, on_full: Callable[[Packing, int], object] = lambda *of: None) -> None:
    for name, tensor in TENSORS.items():
        index = gathered.put(name, tensor)
        assert index is not None
        on_full(gathered, index)


def test_overlapped_a_bucket_is_sent_before_the_next_one_is_gathered():
    transport, gathered = Transport(), packing()
    sending = Sending(transport, overlap=True)
    on_full = sending.of(1)
    for number, (name, tensor) in enumerate(TENSORS.items()):
        index = gathered.put(name, tensor)
        assert index == number
        on_full(gathered, index)
        assert transport.put_one.acquire(timeout=WAIT_S)  # and the next tensor was not even read yet
        assert len(transport.buckets) == number + 1
    assert sending.sent(*published(1, gathered)) == [0, 1, 2, 3, 4]
    assert {*transport.threads, *transport.finished_in} == {"send_0"}
    assert transport.versions == ["begin 1", "finish 1"]


def test_a_slow_transport_does_not_hold_up_the_gather():
    transport, gathered = Transport(), packing()
    transport.held.clear()
    sending = Sending(transport, overlap=True)
    gather(gathered, sending.of(1))
    assert transport.buckets == []
    transport.held.set()
    assert sending.sent(*published(1, gathered)) == [0, 1, 2, 3, 4]


def test_without_overlap_nothing_is_sent_before_the_publish():
    transport, gathered = Transport(), packing()
    sending = Sending(transport, overlap=False)
    gather(gathered, sending.of(1))
    assert transport.buckets == []
    assert sending.sent(*published(1, gathered)) == [0, 1, 2, 3, 4]


def test_a_version_that_no_gather_brought_is_sent_by_its_publish():
    transport, gathered = Transport(), packing()
    gather(gathered)
    assert Sending(transport, overlap=True).sent(*published(5, gathered)) == [0, 1, 2, 3, 4]
    assert {*transport.threads, *transport.finished_in} == {"send_0"}


def test_a_failed_send_is_the_error_of_its_publish():
    class Full(Transport):
        def put(self, bucket: Bucket) -> int:
            raise OSError("the object store is full")

    gathered = packing()
    sending = Sending(Full(), overlap=True)
    gather(gathered, sending.of(1))
    with pytest.raises(OSError, match="the object store is full"):
        sending.sent(*published(1, gathered))


def test_what_was_sent_of_a_version_that_is_never_published_is_let_go_of():
    transport, gathered = Transport(), packing()
    sending = Sending(transport, overlap=True)
    on_full = sending.of(1)
    index = gathered.put("a", TENSORS["a"])
    assert index is not None
    on_full(gathered, index)
    sending.of(2)
    assert list(sending.begun) == [2]


@pytest.mark.parametrize(("deltas", "overlap"), [(True, False), (True, True), (False, True)])
def test_versions_that_workers_have_loaded_lend_their_memory_to_the_next(deltas, overlap, monkeypatch):
    monkeypatch.setattr(ray, "put", lambda value: "ref")
    pool, taken = BufferPool(pins=False), set[int]()

    def take(num_bytes: int) -> np.ndarray:
        data = pool.take(num_bytes)
        taken.add(data.ctypes.data)
        return data

    sender: Sender = DeltaSender(ObjectStoreSender()) if deltas else ObjectStoreSender()
    sending = Sending(sender, overlap=overlap, in_memory=True)
    current: Packing  # as a trainer holds its newest version
    for version in range(6):
        on_full = sending.of(version, [version - 1])
        gathered = Packing(plan_layout(specs_of(TENSORS), 64), take)
        gather(gathered, on_full)
        current = gathered
        del gathered, on_full
        sending.sent(*published(version, current))
    assert len(taken) == 2 * len(TENSORS)


@pytest.mark.parametrize("gather_mb", [0.1, 16], ids=["many buckets", "one bucket"])
@pytest.mark.parametrize("overlap", [True, False])
def test_what_arrives_is_bit_for_bit_the_trainers_weights(overlap, gather_mb, tmp_path):
    from transformers import AutoModelForCausalLM

    from tests.trainers import trainer_parts

    model_dir = make_model(tmp_path / "model")
    settings = trainer_parts(model_dir, gather_bucket_size_mb=gather_mb, overlap=overlap)
    trainer = settings.made(f"file://{tmp_path}/meet")
    transport = Transport()
    try:
        sending = Sending(transport, overlap=overlap)
        trainer.gather(3, sending.of(3))
        for shard in trainer.model.locals().values():
            shard.zero_()  # training goes on
        manifest, buckets = trainer.published(3)
        refs = sending.sent(manifest, buckets)
    finally:
        trainer.close()
    arrived = [transport.buckets[ref] for ref in refs]
    list(verified(arrived, manifest))
    assert manifest.fingerprints == tuple(fingerprint(bucket) for bucket in arrived)
    assert (len(arrived) > 1) == (gather_mb < 1)
    received = dict(Unpacked(arrived))
    expected = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict()
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
