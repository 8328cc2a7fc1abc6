"""Differences between two versions of a bucket: exact, and wrong ones are noticed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl_cli.weights import deltas
from asyncrl_cli.weights.buckets import Bucket, DamagedWeights, Spec, fingerprint, plan_layout
from asyncrl_cli.weights.deltas import Delta, RangeChanges, applied, difference
from asyncrl_cli.weights.receivers import SharedWeights, verified
from asyncrl_cli.weights.versions import Manifest


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "RANGE_ELEMENTS", 512)


def bucket_of(tensors: dict[str, torch.Tensor]) -> Bucket:
    specs = [
        Spec(name=name, dtype=str(one.dtype)[6:], shape=tuple(one.shape)) for name, one in tensors.items()
    ]
    (layout,) = plan_layout(specs, 2**30)
    data = np.zeros(layout[-1].end_bytes, dtype=np.uint8)
    for entry, one in zip(layout, tensors.values(), strict=True):
        raw = one.contiguous().reshape(-1).view(torch.uint8).numpy()
        data[entry.offset_bytes : entry.end_bytes] = raw
    return Bucket(data=data, entries=layout)


def versions(dtype: torch.dtype, lr: float, seed: int = 0) -> Iterator[Bucket]:
    """Two matrices whose master weights walk in steps of `lr`, in any direction."""
    generator = torch.Generator().manual_seed(seed)
    masters = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in SHAPES.items()}
    while True:
        yield bucket_of({name: one.to(dtype) for name, one in masters.items()})
        for one in masters.values():
            one += lr * torch.randn(one.shape, generator=generator).sign()


SHAPES = {"a": (31, 40), "b": (17,), "c": (64, 29)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lr", [0.0, 1e-6, 3e-5])
def test_the_next_version_is_rebuilt_bit_for_bit(dtype, lr):
    walk = versions(dtype, lr)
    before = next(walk)
    for number in range(3):
        after, kept = next(walk), before.data.copy()
        delta = difference(after, before, base=number)
        if dtype is torch.float32 and lr:
            assert delta is None, "every element has changed"
        else:
            assert delta is not None
            assert delta.sent_bytes < len(after.data)
            assert np.array_equal(applied(delta, SharedWeights([before])).data, after.data)
        assert np.array_equal(before.data, kept)
        before = after


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_any_change_of_any_size_and_distance_survives(bits):
    kinds = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
    for seed in range(60):
        rng = np.random.default_rng(seed)
        elements = int(rng.integers(1, 3000))
        old = bucket_of({"x": torch.from_numpy(rng.integers(0, 2**7, elements)).to(kinds[bits])})
        new = replace(old, data=old.data.copy())
        values = new.data.view(f"u{bits // 8}")
        places = rng.choice(elements, int(rng.integers(0, max(elements // 4, 1))), replace=False)
        values[places] = rng.integers(0, 2**bits, len(places), dtype=np.uint64).astype(values.dtype)
        delta = difference(new, old, base=0)
        if delta is not None:
            assert np.array_equal(applied(delta, SharedWeights([old])).data, new.data)


def test_another_layout_has_no_difference():
    one, other = (bucket_of({name: torch.zeros(64, dtype=torch.bfloat16)}) for name in "ab")
    assert difference(one, other, base=0) is None


def mistakes(rng: random.Random, old: Bucket, new: Bucket, older: Bucket, delta: Delta) -> Bucket:
    """The bucket that a worker has after one of five mistakes."""
    kind = rng.randrange(5)
    if kind == 0:  # the base is of another version
        return applied(delta, SharedWeights([older]))
    if kind == 1:  # two ranges are swapped
        ranges = list(delta.ranges)
        i, j = rng.sample(range(len(ranges)), 2)
        ranges[i], ranges[j] = ranges[j], ranges[i]
        return applied(replace(delta, ranges=tuple(ranges)), SharedWeights([old]))
    if kind == 2:  # a bit of the delta is flipped
        number, name = rng.randrange(len(delta.ranges)), rng.choice(("distances", "changes"))
        data = bytearray(getattr(delta.ranges[number], name))
        data[rng.randrange(8, len(data))] ^= 1 << rng.randrange(8)
        ranges = list(delta.ranges)
        ranges[number] = replace(ranges[number], **{name: bytes(data)})
        return applied(replace(delta, ranges=tuple(ranges)), SharedWeights([old]))
    if kind == 3:  # a bit of the base is flipped
        data = old.data.copy()
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return applied(delta, SharedWeights([replace(old, data=data)]))
    ranges = list(delta.ranges)  # a range is lost
    number = rng.randrange(len(ranges))
    if ranges[number].count == 0:
        number = max(range(len(ranges)), key=lambda i: ranges[i].count)
    ranges[number] = RangeChanges(count=0, **{name: EMPTY for name in ("distances", "changes", "large")})
    return applied(replace(delta, ranges=tuple(ranges)), SharedWeights([old]))


EMPTY = deltas._compressed(np.zeros(0, dtype=np.uint8))


@pytest.mark.slow
def test_1000_random_mistakes_are_all_noticed_before_the_version_counts_as_arrived():
    rng, noticed, harmless = random.Random(7), 0, 0
    for seed in range(20):
        walk = versions(torch.bfloat16, 2e-5, seed)
        older, old, new = (next(walk) for _ in range(3))
        delta = difference(new, old, base=1)
        assert delta is not None
        manifest = Manifest(
            version=2, num_bytes=len(new.data), fingerprints=(fingerprint(new),), temperature=1.0
        )
        assert len(list(verified([applied(delta, SharedWeights([old]))], manifest))) == 1
        for _ in range(50):
            try:
                wrong = mistakes(rng, old, new, older, delta)
                is_harmless = np.array_equal(wrong.data, new.data)  # bits that the codec ignores
                list(verified([wrong], manifest))
                assert is_harmless
                harmless += 1
            except DamagedWeights:
                noticed += 1
    assert noticed + harmless == 1000
    assert harmless < 10
