"""Weights in memory that processes of one machine share: filled by a rollout worker, mapped by its engine's processes.

    worker   SharedWeights.of(...) -> anonymous file (memfd), one flat buffer ──> describe(): path, size, tensors
    engine   attached(path, num_bytes) -> the same pages, copied on write ──> views(...) -> the model's own loaders

The file has no name: it is opened through /proc by whoever may read the worker's descriptors (the same user), it does not
count against the size of /dev/shm, and it goes when the last process that maps it ends, however that ends.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch

from asyncrl_cli.errors import AsyncrlError
from asyncrl_cli.weights.buckets import Bucket, Entry, Spec, plan_layout, specs_of, view_of

ONE_BUCKET_BYTES = 2**62


class SharedWeights(Mapping[str, torch.Tensor]):
    """All tensors of one version by name; aliases map to the same tensor. The tensors are views of the shared buffer."""

    def __init__(self, specs: Iterable[Spec]) -> None:
        layout = plan_layout(specs, ONE_BUCKET_BYTES)
        self._entries: tuple[Entry, ...] = layout[0] if layout else ()
        self.num_bytes = max(self._entries[-1].end_bytes, 1) if self._entries else 1
        self._descriptor = _reserve(self.num_bytes)
        weakref.finalize(self, os.close, self._descriptor)
        self._data = np.frombuffer(mmap.mmap(self._descriptor, self.num_bytes), dtype=np.uint8)
        self._tensors = {
            name: tensor
            for entry in self._entries
            for tensor in [view_of(self._data, entry)]
            for name in (entry.spec.name, *entry.spec.aliases)
        }

    @classmethod
    def of_buckets(cls, buckets: Sequence[Bucket]) -> SharedWeights:
        """Copied from received buckets, once."""
        shared = cls(entry.spec for bucket in buckets for entry in bucket.entries)
        arrived = ((bucket, entry) for bucket in buckets for entry in bucket.entries)
        for (bucket, entry), own in zip(arrived, shared._entries, strict=True):
            shared._data[own.offset_bytes : own.end_bytes] = bucket.data[entry.offset_bytes : entry.end_bytes]
        return shared

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> SharedWeights:
        """Copied from named tensors, each in its own dtype."""
        shared = cls(specs_of(tensors))
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
            name = next((name for name in (entry.spec.name, *entry.spec.aliases) if name in names), None)
            if name is not None:
                tensors.append((name, entry.spec.dtype, list(entry.spec.shape), entry.offset_bytes))
        return {"path": f"/proc/{os.getpid()}/fd/{self._descriptor}", "num_bytes": self.num_bytes, "tensors": tensors}


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


def _reserve(num_bytes: int) -> int:
    """A nameless file with its pages allocated. Too little memory is told before: asking the kernel for more than there is
    does not fail, it ends processes."""
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise AsyncrlError(
            f"received weights take {num_bytes / 2**20:.0f} MiB of memory, {available / 2**20:.0f} MiB are free",
            hint="a rollout worker holds the next version's weights in memory beside the engine: give the machine more",
        )
    descriptor = os.memfd_create("asyncrl-weights")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
