"""Buckets: roundtrip, sizes, aliases, fingerprints; probes."""

from __future__ import annotations

import ctypes
import math
import mmap
import pickle

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.weights.buckets import (
    Bucket,
    BufferPool,
    DamagedWeights,
    Packing,
    Spec,
    Unpacked,
    plan_layout,
)
from asyncrl_cli.weights.receivers import verified
from asyncrl_cli.weights.versions import Manifest, make_probes, mean_abs_diff, median_abs_diff
from tests.packed import pack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12)


def make_tensors(specs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{i}": torch.randint(-1000, 1000, shape, generator=generator).to(dtype)
        for i, (shape, dtype) in enumerate(specs)
    }


def manifest_of(buckets):
    return Manifest(
        version=3,
        num_bytes=sum(len(b.data) for b in buckets),
        fingerprints=tuple(b.fingerprint for b in buckets),
        temperature=1.0,
    )


def read_only(bucket: Bucket) -> Bucket:
    """As it comes out of an object store."""
    data = bucket.data.copy()
    data.flags.writeable = False
    return Bucket(data=data, entries=bucket.entries)


@settings(max_examples=60)
@given(specs, st.integers(1, 3000))
def test_tensors_come_out_as_they_went_in_through_any_bucket_size(specs, bucket_bytes):
    tensors = make_tensors(specs)
    buckets = [read_only(b) for b in pack(tensors, bucket_bytes)]
    list(verified(buckets, manifest_of(buckets)))
    received = Unpacked(buckets)
    assert list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)
    for bucket in buckets:
        assert len(bucket.data) <= bucket_bytes or len(bucket.entries) == 1


def test_a_packed_bucket_shares_no_memory_with_its_tensors():
    weight = torch.ones(4)
    (bucket,) = pack({"w": weight}, 1000)
    weight.zero_()
    assert Unpacked([bucket])["w"].tolist() == [1.0] * 4


def test_the_same_tensor_under_two_names_travels_once():
    weight = torch.arange(6.0).reshape(2, 3)
    (bucket,) = pack({"embed": weight, "head": weight}, 1000)
    assert len(bucket.data) == 24
    viewed = Unpacked([bucket])
    assert viewed["embed"].data_ptr() == viewed["head"].data_ptr() == bucket.data.ctypes.data
    assert torch.equal(viewed["head"], weight)


def test_a_bucket_survives_pickling_as_raw_bytes():
    (bucket,) = pack({"w": torch.randn(100)}, 10_000)
    outside: list[pickle.PickleBuffer] = []
    again = pickle.loads(pickle.dumps(bucket, protocol=5, buffer_callback=outside.append), buffers=outside)
    assert outside[0].raw().nbytes == 400
    assert torch.equal(Unpacked([again])["w"], Unpacked([bucket])["w"])


def test_fingerprints_are_xxh3_of_the_bytes_and_of_what_they_are():
    (bucket,), (other,) = (pack({name: torch.arange(8.0)}, 1000) for name in ("w", "v"))
    expected = xxhash.xxh3_64(np.arange(8, dtype=np.float32).tobytes() + repr(bucket.entries).encode())
    assert bucket.fingerprint == expected.intdigest() != other.fingerprint


def test_probes_are_the_same_for_the_same_seed_and_stay_in_the_vocabulary():
    probes = make_probes(4, 64, seed=1)
    assert probes == make_probes(4, 64, seed=1)
    assert probes != make_probes(4, 64, seed=2)
    assert [len(p) for p in probes] == [32] * 4
    assert all(0 <= token < 64 for p in probes for token in p)
    text = list(range(10, 60))
    assert make_probes(3, 64, seed=1, text=text) == tuple(
        map(tuple, (text[:32], text[32:] + text[:14], text[14:46]))
    )


def test_a_median_of_differences_is_not_drawn_up_by_a_few_tokens_and_a_nan_is_never_small():
    ours, theirs = [[-1.0, -2.0, -30.0]], [[-1.01, -2.02, -34.0]]
    assert median_abs_diff(ours, theirs) == pytest.approx(0.02)
    assert mean_abs_diff(ours, theirs) == pytest.approx(4.03 / 3)
    assert median_abs_diff(ours, [[-1.01, math.nan, -34.0]]) == math.inf


def test_mean_abs_diff_is_over_all_tokens_and_never_hides_a_nan():
    assert mean_abs_diff([[1.0, 2.0], [3.0]], [[1.5, 2.0], [2.0]]) == pytest.approx(0.5)
    assert mean_abs_diff([[1.0, math.nan]], [[1.0, 1.0]]) == math.inf
    with pytest.raises(ValueError, match="differ in shape"):
        mean_abs_diff([[1.0]], [[1.0, 2.0]])


def test_buckets_are_handed_on_one_by_one_each_verified_and_the_last_says_whether_all_came():
    buckets = pack({name: torch.randn(50) for name in "abc"}, 250)
    manifest = manifest_of(buckets)
    buckets[2].data[3] ^= 1
    handed = verified(iter(buckets), manifest)
    assert [next(handed), next(handed)] == buckets[:2]
    with pytest.raises(DamagedWeights, match=r"bucket 2 of 3 .* arrived damaged"):
        next(handed)
    with pytest.raises(DamagedWeights, match="version 3: 2 buckets arrived, 3 were sent"):
        list(verified(iter(buckets[:2]), manifest))
    buckets[2].data[3] ^= 1
    with pytest.raises(DamagedWeights, match="4 buckets arrived, 3 were sent"):
        list(verified(iter([*buckets, buckets[0]]), manifest))


def test_a_versions_memory_is_used_again_once_nobody_has_a_view_of_it_and_never_before():
    spec = Spec(name="a", dtype="float32", shape=(1000,))
    pool, layout = BufferPool(pins=False), plan_layout([spec], 10_000)

    def version(number):
        packing = Packing(layout, pool.take)
        packing.put("a", torch.full((1000,), float(number)))
        return packing.seal()

    def address(buckets):
        return buckets[0].data.ctypes.data

    first, second = version(1), version(2)
    view, where = Unpacked(first)["a"], address(first)
    del first  # as rank 0 does when a version is not wanted any more; a transfer still reads it
    third = version(3)
    assert len({where, address(second), address(third)}) == 3
    assert torch.equal(view, torch.full((1000,), 1.0))
    del view
    fourth = version(4)
    assert address(fourth) == where
    assert [Unpacked(buckets)["a"][0].item() for buckets in (second, third, fourth)] == [2.0, 3.0, 4.0]


def test_memory_that_is_used_again_leaves_no_trace_between_tensors():
    """A worker that reads the tensors from files has zeros between them, and compares fingerprints of whole
    buckets."""
    pool = BufferPool(pins=False)
    pool.take(64 + 12)[:] = 255
    layout = plan_layout(
        [Spec(name="a", dtype="float32", shape=(5,)), Spec(name="b", dtype="float32", shape=(3,))], 10_000
    )
    packing = Packing(layout, pool.take)
    packing.put("a", torch.ones(5))
    packing.put("b", torch.ones(3))
    (bucket,) = packing.seal()
    ones = np.ones(8, dtype=np.float32).tobytes()
    assert bucket.data.tobytes() == ones[:20] + bytes(44) + ones[:12]


def test_page_locked_memory_is_unlocked_before_it_goes(monkeypatch):
    """Other memory at the same address could not be used by CUDA otherwise."""
    locked, calls = set(), []

    class Runtime:
        def cudaHostRegister(self, address, num_bytes, flags):
            assert address % mmap.PAGESIZE == 0
            assert address not in locked
            locked.add(address)

        def cudaHostUnregister(self, address):
            ctypes.string_at(address, 1)  # it is still mapped
            locked.remove(address)
            calls.append(address)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    for _ in range(3):
        pool = BufferPool(pins=True)
        kept, passing = pool.take(100), pool.take(200)
        assert len(locked) == 2
        del passing
        assert len(locked) == 2  # it waits in the pool
        del pool
        assert not locked
        kept[:] = 7  # and who still has memory may use it
        del kept
    assert len(calls) == 6


def test_memory_for_a_gpus_copies_shares_no_page_with_anything_else():
    """CUDA locks whole pages, and refuses a copy into memory that is locked in part."""
    pool = BufferPool(pins=False)
    taken = [pool.take(num_bytes) for num_bytes in (1, 100, mmap.PAGESIZE + 1, 100)]
    pages = [
        set(range(a.ctypes.data // mmap.PAGESIZE, (a.ctypes.data + len(a) - 1) // mmap.PAGESIZE + 1))
        for a in taken
    ]
    assert all(a.ctypes.data % mmap.PAGESIZE == 0 for a in taken)
    assert len(set.union(*pages)) == sum(map(len, pages))
    assert [len(a) for a in taken] == [1, 100, mmap.PAGESIZE + 1, 100]
    assert len(pool.take(0)) == 0
