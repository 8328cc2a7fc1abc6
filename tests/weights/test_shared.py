from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from asyncrl_cli.errors import AsyncrlError
from asyncrl_cli.weights.buckets import Spec, pack
from asyncrl_cli.weights.shared import SharedWeights, attached, views

READER = """
import json, sys
from asyncrl_cli.weights.shared import attached, views
told = json.loads(sys.argv[1])
data = attached(told["path"], told["num_bytes"])
tensors = dict(views(data, told["tensors"]))
tensors["b"].zero_()  # on a page of its own now
print({name: tensor.double().sum().item() for name, tensor in tensors.items()})
"""


def example() -> dict[str, torch.Tensor]:
    tied = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return {"a": tied, "b": torch.full((5,), 2.0, dtype=torch.bfloat16), "head": tied, "none": torch.empty(0)}


@pytest.mark.parametrize("bucket_size_bytes", [1, 2**20])
def test_what_arrived_in_buckets_is_shared_under_all_of_its_names(bucket_size_bytes: int) -> None:
    shared = SharedWeights.of_buckets(pack(example(), bucket_size_bytes))
    assert set(shared) == {"a", "b", "head", "none"}
    for name, tensor in example().items():
        assert torch.equal(shared[name], tensor)
        assert shared[name].dtype == tensor.dtype


def test_another_process_reads_the_same_bytes_and_cannot_change_them() -> None:
    shared = SharedWeights.of_tensors(example())
    told = shared.describe({"b", "head"})
    read = subprocess.run([sys.executable, "-c", READER, json.dumps(told)], capture_output=True, text=True, check=True)
    assert read.stdout.strip() == str({"head": 15.0, "b": 0.0})
    assert shared["b"].sum() == 10


def test_a_buffer_of_another_size_or_a_tensor_outside_of_it_is_refused() -> None:
    shared = SharedWeights.of_tensors(example())
    told = shared.describe({"a"})
    with pytest.raises(ValueError, match="announced were"):
        attached(told["path"], told["num_bytes"] + 1)
    with pytest.raises(ValueError, match="a ends at byte"):
        views(attached(told["path"], told["num_bytes"]), [("a", "float32", [1000], 0)])


def test_too_little_memory_is_an_error_before_anything_is_written() -> None:
    with pytest.raises(AsyncrlError, match="MiB are free"):
        SharedWeights([Spec(name="huge", dtype="float32", shape=(2**58,))])
