"""Loading without a second buffer: every bit arrives, and no more than a load bucket lies beside the model."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.weights.buckets import DamagedWeights, pack, verified
from asyncrl_cli.weights.in_place import announced, copy_into
from tests.weights.test_buckets import make_tensors, manifest_of, read_only, specs


def model_of(tensors):
    """Tensors of the same names and shapes, with other values."""
    return {name: torch.full_like(tensor, 77) for name, tensor in tensors.items()}


@settings(max_examples=60)
@given(specs, st.integers(1, 3000), st.integers(1, 1500))
def test_every_bit_arrives_through_any_bucket_sizes(specs, gather_bytes, load_bytes):
    tensors = make_tensors(specs)
    own = model_of(tensors)
    for bucket in pack(tensors, gather_bytes):
        copy_into(own, read_only(bucket), load_bytes)
    for name, tensor in tensors.items():
        assert torch.equal(own[name], tensor)


def test_a_gather_bucket_larger_than_the_load_bucket_is_loaded_in_slices_of_at_most_its_size():
    tensors = {"large": torch.randn(1000, 256), "small": torch.randn(300)}  # 1000 KiB in one tensor
    (bucket,) = [read_only(bucket) for bucket in pack(tensors, 2**24)]
    own = model_of(tensors)
    copy_into(own, bucket, 2**16)  # whatever is made once is made now
    tracemalloc.start()
    copy_into(own, bucket, 2**16)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 2**15 < peak_bytes < 2**16 + 2**13
    assert torch.equal(own["large"], tensors["large"])


def test_a_row_larger_than_the_load_bucket_goes_alone():
    tensors = {"wide": torch.randn(3, 1000)}
    own = model_of(tensors)
    for bucket in pack(tensors, 10**6):
        copy_into(own, bucket, 10)
    assert torch.equal(own["wide"], tensors["wide"])


@pytest.mark.parametrize("tied", [True, False])
def test_a_tensor_of_two_names_reaches_both(tied):
    weight = torch.arange(6.0).reshape(2, 3)
    (bucket,) = pack({"embed": weight, "head": weight}, 1000)
    embed = torch.zeros(2, 3)
    own = {"embed": embed, "head": embed if tied else torch.zeros(2, 3)}
    copy_into(own, bucket, 1000)
    assert torch.equal(own["embed"], weight)
    assert torch.equal(own["head"], weight)


def test_another_dtype_is_cast_and_a_transposed_tensor_is_filled_right():
    weight = torch.arange(6.0).reshape(2, 3)
    (bucket,) = pack({"w": weight}, 1000)
    own = {"w": torch.zeros(3, 2, dtype=torch.bfloat16).t()}
    copy_into(own, bucket, 12)
    assert own["w"].tolist() == weight.tolist()


def test_what_is_announced_has_names_and_shapes_and_no_memory():
    weight = torch.zeros(2, 3, dtype=torch.bfloat16)
    told = announced(pack({"embed": weight, "head": weight, "scale": torch.tensor(1.0)}, 10))
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in told.items()}
    assert shapes == {"embed": ((2, 3), torch.bfloat16), "head": ((2, 3), torch.bfloat16), "scale": ((), torch.float32)}
    assert {tensor.device.type for tensor in told.values()} == {"meta"}


def test_buckets_are_handed_on_one_by_one_each_verified_and_the_last_says_whether_all_came():
    buckets = pack({name: torch.randn(50) for name in "abc"}, 250)
    manifest = manifest_of(buckets)
    buckets[2].data[3] ^= 1
    handed = verified(iter(buckets), manifest)
    assert [next(handed), next(handed)] == buckets[:2]
    with pytest.raises(DamagedWeights, match="bucket 2 of 3"):
        next(handed)
    with pytest.raises(DamagedWeights, match="2 buckets arrived, 3 were sent"):
        list(verified(iter(buckets[:2]), manifest))
    buckets[2].data[3] ^= 1
    with pytest.raises(DamagedWeights, match="4 buckets arrived, 3 were sent"):
        list(verified(iter([*buckets, buckets[0]]), manifest))
