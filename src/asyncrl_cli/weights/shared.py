"""Weights in memory that processes of one machine share: filled by a rollout worker, mapped by its engine's processes.

    worker   SharedWeights(buckets) -> anonymous file (memfd), one flat buffer ──> describe(): path, size, tensors
    engine   attached(path, num_bytes) -> the same pages, copied on write ──> views(...) -> the model's own loaders

The file has no name: it is opened through /proc by whoever may read the worker's descriptors (the same user), it does not
count against the size of /dev/shm, and it goes when the last process that maps it ends, however that ends.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch

from asyncrl_cli.errors import AsyncrlError
from asyncrl_cli.weights.buckets import ALIGNMENT_BYTES, Bucket, Entry, Spec, view_of


class SharedWeights(dict[str, torch.Tensor]):
    """All tensors of one version by name; aliases map to the same tensor. The tensors are views of the shared buffer."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        """Copied once, each as it arrives: the whole is never held twice."""
        self.num_bytes = 0
        self._entries: list[Entry] = []
        self._descriptor = os.memfd_create("asyncrl-weights")
        close = weakref.finalize(self, os.close, self._descriptor)
        try:
            for bucket in buckets:
                self._append(bucket)
            self._grow(1)  # an empty file cannot be mapped
        except BaseException:
            close()
            raise
        data = np.frombuffer(mmap.mmap(self._descriptor, self.num_bytes), dtype=np.uint8)
        for entry in self._entries:
            self |= dict.fromkeys(entry.spec.names, view_of(data, entry))

    def describe(self, required: Collection[str]) -> dict[str, Any]:
        """For another process of this machine: where the buffer is, and where these tensors lie in it. Plain values.

        It is valid for as long as this object lives. Of a tensor's names the first that is required is described.
        """
        tensors = [
            (name, entry.spec.dtype, list(entry.spec.shape), entry.offset_bytes)
            for entry in self._entries
            if (name := entry.spec.name_among(required)) is not None
        ]
        return {"path": f"/proc/{os.getpid()}/fd/{self._descriptor}", "num_bytes": self.num_bytes, "tensors": tensors}

    def _append(self, bucket: Bucket) -> None:
        """The bucket's bytes, aligned behind what is there."""
        begin_bytes = -(-self.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        data = memoryview(bucket.data)
        self._grow(begin_bytes + len(data))
        written = 0
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], begin_bytes + written)
        self._entries += [replace(entry, offset_bytes=begin_bytes + entry.offset_bytes) for entry in bucket.entries]

    def _grow(self, num_bytes: int) -> None:
        """To at least that size, with all pages allocated. Raises AsyncrlError if memory is short: the kernel would not refuse, it
        would kill processes."""
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
        os.posix_fallocate(self._descriptor, self.num_bytes, missing)
        self.num_bytes = num_bytes


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
