"""A version whose tensors come by rows from several ranks: what a worker loads, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.weights.buckets import Bucket, DamagedWeights, Unpacked
from asyncrl_cli.weights.receivers import AnnouncedWeights, SharedWeights, manifest_of, verified
from asyncrl_cli.weights.versions import Manifest, joined_version
from tests.packed import copied, pack_rows

DTYPES = [torch.float32, torch.bfloat16, torch.int64]
shapes = st.one_of(st.just(()), st.tuples(st.integers(0, 9)), st.tuples(st.integers(1, 9), st.integers(0, 5)))
models = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8)


def tensors_of(found: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{i}": torch.randint(-1000, 1000, shape, generator=generator).to(dtype)
        for i, (shape, dtype) in enumerate(found)
    }
    return tensors | {"tied": tensors["layers.0"]}


def version_of(sent: Sequence[Sequence[Bucket]], version: int = 3) -> tuple[Manifest, list[Bucket]]:
    """As the driver joins it; a bucket is its own ref."""
    return joined_version([(manifest_of(buckets, version), buckets) for buckets in sent])


@pytest.mark.slow
@settings(max_examples=150)
@given(models, st.integers(1, 4), st.integers(1, 300))
def test_what_a_worker_loads_is_bit_equal_to_the_whole_tensors(found, num_ranks, bucket_bytes):
    """Uneven numbers of rows, fewer rows than ranks, tensors without rows, ranks that send nothing."""
    tensors = tensors_of(found)
    sent = pack_rows(tensors, bucket_bytes, num_ranks)
    manifest, buckets = version_of(sent)
    assert manifest.num_bytes == sum(len(bucket.data) for one in sent for bucket in one)
    for loaded in (copied(verified(buckets, manifest)), Unpacked(buckets), SharedWeights(buckets)):
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)
    announced = AnnouncedWeights(bucket.entries for bucket in buckets)
    assert {name: one.shape for name, one in announced.items()} == {n: t.shape for n, t in tensors.items()}
    assert len(announced.specs) == len(tensors) - 1


def test_a_rank_sends_about_its_share_and_one_rank_sends_everything_in_the_same_buckets_as_ever():
    tensors = {f"layers.{i}": torch.randn(40, 10) for i in range(6)}
    sizes = [sum(len(bucket.data) for bucket in one) for one in pack_rows(tensors, 10_000, 4)]
    assert sizes == [6 * 10 * 10 * 4 + 5 * 48] * 4  # tensors begin at multiples of 64 bytes
    (alone,) = pack_rows(tensors, 10_000, 1)
    assert all(entry.spec.num_rows is None for bucket in alone for entry in bucket.entries)


Version = tuple[Manifest, list[Bucket]]


def range_of_another_version(good: Version, older: Version) -> Version:
    return good[0], [older[1][0], *good[1][1:]]


def swapped_ranges(good: Version, older: Version) -> Version:
    """Two ranks' rows of the same tensors, equally many."""
    first, second, *others = good[1]
    return good[0], [second, first, *others]


def swapped_places(good: Version, older: Version) -> Version:
    """The bytes are where they were, but said to be the other rank's rows."""
    first, second, *others = good[1]
    return good[0], [replace(first, entries=second.entries), replace(second, entries=first.entries), *others]


def flipped_bit(good: Version, older: Version) -> Version:
    data = good[1][-1].data.copy()
    data[5] ^= 1
    return good[0], [*good[1][:-1], replace(good[1][-1], data=data)]


def missing_range(good: Version, older: Version) -> Version:
    return good[0], good[1][:-1]


def rank_that_sent_nothing(good: Version, older: Version) -> Version:
    """The manifest does not know of it either."""
    return version_of(pack_rows(weights(3), 400, 2)[:1])


def ranks_that_sent_the_same(good: Version, older: Version) -> Version:
    first, _ = pack_rows(weights(3), 400, 2)
    return version_of([first, first])


def ranks_of_other_models(good: Version, older: Version) -> Version:
    first, _ = pack_rows(weights(3), 400, 2)
    _, second = pack_rows({name: one.double() for name, one in weights(3).items()}, 400, 2)
    return version_of([first, second])


MISTAKES = [
    (range_of_another_version, "bucket 0 of 4 .* arrived damaged"),
    (swapped_ranges, "bucket 0 of 4 .* arrived damaged"),
    (swapped_places, "bucket 0 of 4 .* arrived damaged"),
    (flipped_bit, "bucket 3 of 4 .* arrived damaged"),
    (missing_range, "3 buckets arrived, 4 were sent"),
    (rank_that_sent_nothing, "rows are missing or came twice: a, b"),
    (ranks_that_sent_the_same, "rows are missing or came twice: a, b"),
    (ranks_of_other_models, "rows are missing or came twice: a, b"),
]


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {"a": torch.randn(8, 10, generator=generator), "b": torch.randn(6, 30, generator=generator)}


@pytest.mark.parametrize(("mistake", "error"), MISTAKES, ids=[one.__name__ for one, _ in MISTAKES])
def test_a_mistake_is_refused_before_a_second_buffer_exists(mistake: Callable, error: str) -> None:
    good, older = (version_of(pack_rows(weights(version), 400, 2)) for version in (3, 2))
    assert SharedWeights(verified(good[1], good[0]))["a"].shape == (8, 10)
    manifest, buckets = mistake(good, older)
    for receive in (copied, SharedWeights, list):
        with pytest.raises(DamagedWeights, match=error):
            receive(verified(buckets, manifest))


def test_ranges_that_overlap_leave_a_hole_or_end_early_are_never_taken_for_the_whole():
    """Against a count of how often each row came."""
    draw = random.Random(1)
    outcomes = set()
    for _ in range(2000):
        whole = torch.arange(6.0).reshape(6, 1)
        cuts = [(begin, draw.randint(1, 6 - begin)) for begin in draw.choices(range(6), k=draw.randint(1, 3))]
        came = [sum(begin <= row < begin + count for begin, count in cuts) for row in range(6)]
        sent = [pack_rows({"w": whole}, 100, 1)[0]]
        (bucket,) = sent[0]
        (entry,) = bucket.entries
        buckets = []
        for begin, count in cuts:
            rows = replace(entry, spec=entry.spec.rows(begin, count))
            data = bucket.data[4 * begin : 4 * (begin + count)].copy()
            buckets.append(Bucket(data=data, entries=(rows,)))
        manifest = manifest_of(buckets, 1)
        if came == [1] * 6:
            assert torch.equal(copied(verified(buckets, manifest))["w"], whole)
        else:
            with pytest.raises(DamagedWeights, match="rows are missing or came twice: w"):
                list(verified(buckets, manifest))
        outcomes.add(came == [1] * 6)
    assert outcomes == {True, False}
