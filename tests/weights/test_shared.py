from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.weights import receivers
from asyncrl_cli.weights.buckets import Bucket, mapped_tensors
from asyncrl_cli.weights.receivers import SharedWeights
from tests.packed import pack

READER = """
import json, sys
from asyncrl_cli.weights.buckets import mapped_tensors
tensors = dict(mapped_tensors(**json.loads(sys.argv[1])))
tensors["b"].zero_()  # on a page of its own now
print({name: tensor.double().sum().item() for name, tensor in tensors.items()})
"""


def example() -> dict[str, torch.Tensor]:
    tied = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return {"a": tied, "b": torch.full((5,), 2.0, dtype=torch.bfloat16), "head": tied, "none": torch.empty(0)}


@pytest.mark.parametrize("bucket_size_bytes", [1, 2**20])
def test_what_arrived_in_buckets_is_shared_under_all_of_its_names(bucket_size_bytes: int) -> None:
    shared = SharedWeights(pack(example(), bucket_size_bytes))
    assert set(shared) == {"a", "b", "head", "none"}
    for name, tensor in example().items():
        assert torch.equal(shared[name], tensor)
        assert shared[name].dtype == tensor.dtype


@pytest.mark.slow
def test_another_process_reads_the_same_bytes_and_cannot_change_them() -> None:
    shared = SharedWeights(pack(example(), 2**20))
    told: Any = shared.describe({"b", "head"})
    read = subprocess.run(
        [sys.executable, "-c", READER, json.dumps(told)], capture_output=True, text=True, check=True
    )
    assert read.stdout.strip() == str({"head": 15.0, "b": 0.0})
    assert shared["b"].sum() == 10


def test_a_buffer_of_another_size_or_a_tensor_outside_of_it_is_refused() -> None:
    shared = SharedWeights(pack(example(), 2**20))
    described: Any = shared.describe({"a"})
    with pytest.raises(ValueError, match="129 were announced"):
        mapped_tensors(**{**described, "num_bytes": described["num_bytes"] + 1})
    with pytest.raises(ValueError, match="a ends at byte"):
        mapped_tensors(**{**described, "tensors": [("a", "float32", [1000], 0)]})


def open_files() -> dict[int, int]:
    """Sizes of this process's shared weights by inode, with those of other tests, which the garbage collector
    closes some day."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if "asyncrl-weights" in os.readlink(path):
                found[path.stat().st_ino] = path.stat().st_size
    return found


def opened_since(before: dict[int, int]) -> list[int]:
    return [size for inode, size in open_files().items() if inode not in before]


@pytest.mark.slow
def test_buckets_are_written_as_they_arrive_and_another_process_reads_them() -> None:
    before = open_files()
    buckets = pack(example(), 1)
    for bucket in buckets:
        bucket.data.flags.writeable = False
    sizes: list[int] = []

    def arriving() -> Iterator[Bucket]:
        for bucket in buckets:
            sizes.append(sum(opened_since(before)))
            yield bucket

    shared = SharedWeights(arriving())
    assert sizes == [0, 24, 64 + 10]  # 6 floats; then, from a multiple of 64, 5 bfloat16
    told: Any = shared.describe({"a", "b", "none"})
    assert [offset for _, _, _, offset in told["tensors"]] == [0, 64, 128]
    read = subprocess.run(
        [sys.executable, "-c", READER, json.dumps(told)], capture_output=True, text=True, check=True
    )
    assert read.stdout.strip() == str({"a": 15.0, "b": 0.0, "none": 0.0})
    assert len(opened_since(before)) == 1
    del shared
    assert opened_since(before) == []


def test_a_bucket_that_does_not_arrive_leaves_nothing_open() -> None:
    before = open_files()

    def arriving() -> Iterator[Bucket]:
        yield from pack(example(), 2**20)
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged") as told:
        SharedWeights(arriving())
    assert opened_since(before) == []
    assert told.traceback  # and with it the frames: the file was closed, not forgotten


def test_each_bucket_is_held_against_the_free_memory_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = iter([2**20, 9])
    asked: list[tuple[int, int]] = []
    fallocate = os.posix_fallocate

    def allocate(descriptor: int, offset: int, length: int) -> None:
        asked.append((offset, length))
        fallocate(descriptor, offset, length)

    monkeypatch.setattr(receivers.psutil, "virtual_memory", lambda: SimpleNamespace(available=next(free)))
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    before = open_files()
    with pytest.raises(AsyncrlError, match=r"beside the 0 MiB that have arrived, but only 0 MiB are free"):
        SharedWeights(pack(example(), 1))
    assert asked == [(0, 24)]
    assert opened_since(before) == []


def test_a_write_that_the_kernel_cuts_short_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:7], offset))
    shared = SharedWeights(pack(example(), 2**20))
    assert torch.equal(shared["a"], example()["a"])
    assert torch.equal(shared["b"], example()["b"])
