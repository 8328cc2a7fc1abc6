"""Weights in memory that processes of one machine share: filled by a rollout worker, mapped by its engine's processes.

    worker   SharedWeights.of_buckets(...) -> anonymous file (memfd), one flat buffer ──> describe(): path, size, tensors
    engine   attached(path, num_bytes) -> the same pages, copied on write ──> views(...) -> the model's own loaders

The file has no name: it is opened through /proc by whoever may read the worker's descriptors (the same user), it does not
count against the size of /dev/shm, and it goes when the last process that maps it ends, however that ends.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch

from asyncrl_cli.errors import AsyncrlError
from asyncrl_cli.weights.buckets import ALIGNMENT_BYTES, Bucket, Entry, Spec, plan_layout, specs_of, view_of

ONE_BUCKET_BYTES = 2**62


class SharedWeights(Mapping[str, torch.Tensor]):
    """All tensors of one version by name; aliases map to the same tensor. The tensors are views of the shared buffer."""

    def __init__(self, entries: Iterable[Entry], file: _GrowingFile) -> None:
        """The file holds these entries. It stays open for as long as this object lives, and grows no more."""
        self._entries = tuple(entries)
        self._file = file
        file.grow(1)  # an empty one cannot be mapped
        self.num_bytes = file.num_bytes
        self._data = np.frombuffer(mmap.mmap(file.descriptor, self.num_bytes), dtype=np.uint8)
        self._tensors = {
            name: tensor
            for entry in self._entries
            for tensor in [view_of(self._data, entry)]
            for name in (entry.spec.name, *entry.spec.aliases)
        }

    @classmethod
    def of_buckets(cls, buckets: Iterable[Bucket]) -> SharedWeights:
        """Copied from received buckets, once, each as it arrives: the whole is never held twice."""
        entries: list[Entry] = []
        with _new_file() as file:
            for bucket in buckets:
                entries += file.append(bucket)
            return cls(entries, file)

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> SharedWeights:
        """Copied from named tensors, each in its own dtype."""
        layout = plan_layout(specs_of(tensors), ONE_BUCKET_BYTES)
        entries = layout[0] if layout else ()
        with _new_file() as file:
            file.grow(entries[-1].end_bytes if entries else 0)
            shared = cls(entries, file)
        for name in (entry.spec.name for entry in shared._entries):
            shared[name].copy_(tensors[name].detach())
        return shared

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def describe(self, names: Collection[str]) -> dict[str, Any]:
        """For another process of this machine: where the buffer is, and where these tensors lie in it. Plain values.

        It is valid for as long as this object lives. Of a tensor's names the first that is asked for is described.
        """
        tensors = []
        for entry in self._entries:
            name = entry.spec.name_among(names)
            if name is not None:
                tensors.append((name, entry.spec.dtype, list(entry.spec.shape), entry.offset_bytes))
        return {"path": f"/proc/{os.getpid()}/fd/{self._file.descriptor}", "num_bytes": self.num_bytes, "tensors": tensors}


def attached(path: str, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Another process's buffer. Writing to it copies the page and stays private. ValueError if it is not that large."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if (found := os.fstat(descriptor).st_size) != num_bytes:
            raise ValueError(f"shared weights at {path} have {found} bytes, announced were {num_bytes}")
        return np.frombuffer(mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY), dtype=np.uint8)
    finally:
        os.close(descriptor)


def views(
    data: np.ndarray[Any, np.dtype[np.uint8]], tensors: Iterable[tuple[str, str, Sequence[int], int]]
) -> list[tuple[str, torch.Tensor]]:
    """The tensors that `SharedWeights.describe` told of. ValueError if one lies outside of the buffer."""
    found = []
    for name, dtype, shape, offset_bytes in tensors:
        entry = Entry(spec=Spec(name=name, dtype=dtype, shape=tuple(shape)), offset_bytes=offset_bytes)
        if entry.end_bytes > len(data):
            raise ValueError(f"{name} ends at byte {entry.end_bytes} of {len(data)} shared ones")
        found.append((name, view_of(data, entry)))
    return found


class _GrowingFile:
    """A nameless file, closed with its object. All of its pages are allocated."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.descriptor = os.memfd_create("asyncrl-weights")
        self.close = weakref.finalize(self, os.close, self.descriptor)

    def append(self, bucket: Bucket) -> list[Entry]:
        """The bucket's bytes, aligned behind what is there. Returns its entries with their places in the file."""
        if not bucket.entries:
            return []
        begin_bytes = -(-self.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        data = memoryview(bucket.data)
        assert len(data) == bucket.entries[-1].end_bytes, f"a bucket of {len(data)} bytes ends at {bucket.entries[-1].end_bytes}"
        self.grow(begin_bytes + len(data))
        written = 0
        while written < len(data):
            written += os.pwrite(self.descriptor, data[written:], begin_bytes + written)
        return [replace(entry, offset_bytes=begin_bytes + entry.offset_bytes) for entry in bucket.entries]

    def grow(self, num_bytes: int) -> None:
        """To at least that size. Too little memory is told before: asking the kernel for more than there is does not fail, it
        ends processes."""
        missing = num_bytes - self.num_bytes
        if missing <= 0:
            return
        available = psutil.virtual_memory().available
        if missing > available:
            held = f" beside the {self.num_bytes / 2**20:.0f} MiB that have arrived" if self.num_bytes else ""
            raise AsyncrlError(
                f"received weights take {missing / 2**20:.0f} MiB of memory{held}, {available / 2**20:.0f} MiB are free",
                hint="a rollout worker holds the next version's weights in memory beside the engine: give the machine more",
            )
        os.posix_fallocate(self.descriptor, self.num_bytes, missing)
        self.num_bytes = num_bytes


@contextmanager
def _new_file() -> Iterator[_GrowingFile]:
    """It is closed if the block raises; otherwise it goes with who holds it."""
    file = _GrowingFile()
    try:
        yield file
    except BaseException:
        file.close()
        raise
