"""Holds the bytes of published versions in memory: on a rollout worker until its engine loads them, or on
rank 0.

`object-store` and `disk`: the worker holds the bytes, in memory that its engine's processes map.

    worker   SharedWeights(buckets) -> anonymous file (memfd), one flat buffer ──> describe(): path, size, tensors
    engine   attached(path, num_bytes) -> the same pages, copied on write ──> views(...) -> the model's own loaders

The file has no name; processes of the same user open it through /proc. It does not count against the size of
/dev/shm, and it disappears when the last process that maps it ends, even by SIGKILL.

`nccl` and `ipc`: rank 0 holds the bytes, which go from its GPU straight into vLLM's processes.

    rank 0   keeps the gathered buckets (HeldVersions); a bucket's ref is only its layout
    driver   carries (manifest, layouts); at each gather, tells rank 0 which versions are still needed
    worker   prefetch: keeps the layouts (AnnouncedWeights). load: pauses its engine, then asks rank 0 for the bytes (RankZero)
    rank 0   sends that version to that worker, in a thread beside training: engines/vllm/{nccl,ipc}.py

The worker asks, because only it knows when its engine has paused. So rank 0 prepares nothing on its GPU in
advance, and no transfer waits for a worker that drains.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.weights.buckets import ALIGNMENT_BYTES, Bucket, BucketEntry, Spec, torch_dtype, view_of
from asyncrl_cli.weights.sending import Sender
from asyncrl_cli.weights.versions import Manifest

Layout = tuple[BucketEntry, ...]


class SharedWeights(dict[str, torch.Tensor]):
    """All tensors of one version by name; aliases map to the same tensor. The tensors are views of the shared
    buffer."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        """Copy each bucket as it arrives, so that the whole version is never held twice."""
        self.num_bytes = 0
        self._entries: list[BucketEntry] = []
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
        """Plain values that tell another process on this machine where the buffer is, and where each tensor
        lies in it.

        Valid as long as this object lives. A tensor is described under its first name that is in `required`,
        or left out.
        """
        tensors = [
            (name, entry.spec.dtype, list(entry.spec.shape), entry.offset_bytes)
            for entry in self._entries
            if (name := entry.spec.name_among(required)) is not None
        ]
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._descriptor}",
            "num_bytes": self.num_bytes,
            "tensors": tensors,
        }

    def _append(self, bucket: Bucket) -> None:
        """Append the bucket's bytes, aligned."""
        begin_bytes = -(-self.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        data = memoryview(bucket.data)
        self._grow(begin_bytes + len(data))
        written = 0
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], begin_bytes + written)
        self._entries += [
            replace(entry, offset_bytes=begin_bytes + entry.offset_bytes) for entry in bucket.entries
        ]

    def _grow(self, num_bytes: int) -> None:
        """Grow the file to at least that size and allocate its pages. Raises AsyncrlError if memory is short:
        the kernel would kill processes rather than refuse."""
        missing = num_bytes - self.num_bytes
        if missing <= 0:
            return
        available = psutil.virtual_memory().available
        if missing > available:
            held = f" beside the {self.num_bytes / 2**20:.0f} MiB that have arrived" if self.num_bytes else ""
            raise AsyncrlError(
                f"received weights take {missing / 2**20:.0f} MiB of memory{held}, but only "
                f"{available / 2**20:.0f} MiB are free",
                hint="a rollout worker holds the next version's weights in memory beside the engine: give "
                "the machine more",
            )
        os.posix_fallocate(self._descriptor, self.num_bytes, missing)
        self.num_bytes = num_bytes


def attached(path: str, num_bytes: int) -> NDArray[np.uint8]:
    """Map another process's buffer. Writes copy the page and stay private. Raises ValueError if the file has
    another size."""
    data = np.memmap(path, dtype=np.uint8, mode="c")
    if len(data) != num_bytes:
        raise ValueError(f"shared weights at {path} have {len(data)} bytes, but {num_bytes} were announced")
    return data


def views(
    data: NDArray[np.uint8], tensors: Iterable[tuple[str, str, Sequence[int], int]]
) -> list[tuple[str, torch.Tensor]]:
    """Views of the tensors from `SharedWeights.describe`. Raises ValueError if one lies outside the
    buffer."""
    found = []
    for name, dtype, shape, offset_bytes in tensors:
        entry = BucketEntry(spec=Spec(name=name, dtype=dtype, shape=tuple(shape)), offset_bytes=offset_bytes)
        if entry.end_bytes > len(data):
            raise ValueError(f"{name} ends at byte {entry.end_bytes} of {len(data)} shared ones")
        found.append((name, view_of(data, entry)))
    return found


class HeldVersions(Sender):
    """Rank 0's `Sender` for direct transports: keeps the host buckets of published versions until `keep`
    drops them."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[Bucket]] = {}
        self._begun = -1
        self._lock = threading.Lock()

    def begin(self, version: int, num_buckets: int) -> None:
        with self._lock:
            self._begun = version
            self._buckets[version] = []

    def put(self, bucket: Bucket) -> Layout:
        with self._lock:
            self._buckets[self._begun].append(bucket)
        return bucket.entries

    def finish(self, manifest: Manifest) -> None:
        assert manifest.version == self._begun, (
            f"version {self._begun} was begun, {manifest.version} is finished"
        )

    def keep(self, wanted: Collection[int]) -> None:
        """Drop all other versions. The memory of one that is being sent is freed when the transfer ends."""
        with self._lock:
            self._buckets = {
                version: buckets for version, buckets in self._buckets.items() if version in wanted
            }

    def tensors(self, version: int, names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name for vLLM, tensor in host memory) for each of `names` (first name -> name for vLLM), in the
        layouts' order.

        Raises:
            ValueError: before the first tensor is read, if the version is not held or lacks one of the names.
        """
        with self._lock:
            buckets = list(self._buckets.get(version, ()))
            held = sorted(self._buckets)
        found = [
            (bucket, entry) for bucket in buckets for entry in bucket.entries if entry.spec.name in names
        ]
        if not buckets or len(found) != len(names):
            raise ValueError(
                f"rank 0 holds only {len(found)} of {len(names)} requested tensors of version {version} "
                f"(versions held: {held})"
            )
        return ((names[entry.spec.name], view_of(bucket.data, entry)) for bucket, entry in found)


class AnnouncedWeights(dict[str, torch.Tensor]):
    """A version of which only the layouts are known: maps all names, with aliases, to meta tensors of the
    right shape and dtype."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self.specs: tuple[Spec, ...] = tuple(entry.spec for layout in layouts for entry in layout)
        for spec in self.specs:
            self |= dict.fromkeys(
                spec.names, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
            )

    def chosen(self, required: Collection[str]) -> list[tuple[str, Spec]]:
        """The tensors that an engine will load, each once, under its first name that is in `required`. Others
        are left out."""
        return [(name, spec) for spec in self.specs if (name := spec.name_among(required)) is not None]
