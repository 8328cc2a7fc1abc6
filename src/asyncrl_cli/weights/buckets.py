"""Buckets: flat host buffers that carry full parameters, their layout, and the fingerprints that verify them.

    trainer   plan_layout(specs) -> Packing.put(name, tensor)... -> Packing.seal_bucket(i) -> Bucket   (gather, publish)
    worker    verified(buckets, manifest) -> unpack(bucket)...                                       (prefetch, load)

A packed bucket owns its bytes: it never shares memory with a live parameter. Tied parameters travel once,
under their first name; the other names are recorded as `aliases`.
"""

from __future__ import annotations

import math
import mmap
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.weights.versions import Manifest

BYTES_PER_MB = 2**20
ALIGNMENT_BYTES = 64
"""Every tensor starts at a multiple of this, so that it can be viewed in place with any dtype."""


class DamagedWeights(AsyncrlError):
    """Received buckets are not the ones that were published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A tensor to send: its full shape, its dtype on the wire (torch's name for it), and its other names."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(torch_dtype(self.dtype).itemsize)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def name_among(self, required: Collection[str]) -> str | None:
        """The tensor's first name that is in `required`; None if none is."""
        return next((name for name in self.names if name in required), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketEntry:
    """Where a tensor lies in its bucket."""

    spec: Spec
    offset_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.spec.num_bytes


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One flat buffer of uint8 and the layout of the tensors in it."""

    data: NDArray[np.uint8]
    entries: tuple[BucketEntry, ...]

    @cached_property
    def fingerprint(self) -> int:
        """xxh3_64 of `data`, computed at first use and cached."""
        return fingerprint(self.data)

    def read(self) -> Bucket:
        """Return the bucket itself: a bucket in this process is its own ref."""
        return self


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan_layout(specs: Iterable[Spec], bucket_size_bytes: int) -> list[tuple[BucketEntry, ...]]:
    """Lay out tensors in buckets in the given order. A tensor that is larger than a bucket gets its own
    bucket."""
    if bucket_size_bytes < 1:
        raise ValueError(f"bucket size is {bucket_size_bytes} bytes: it must be positive")
    layout: list[list[BucketEntry]] = []
    end_bytes = 0
    for spec in specs:
        start_bytes = -(-end_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if not layout or start_bytes + spec.num_bytes > bucket_size_bytes:
            layout.append([])
            start_bytes = 0
        layout[-1].append(BucketEntry(spec=spec, offset_bytes=start_bytes))
        end_bytes = start_bytes + spec.num_bytes
    return [tuple(entries) for entries in layout]


def zeros(num_bytes: int) -> NDArray[np.uint8]:
    return np.zeros(num_bytes, dtype=np.uint8)


class BufferPool:
    """Host memory for one version or snapshot after another: what its last user lets go is filled again.

    New memory would be paged in anew for each version. `pins`: page-locked, into which a GPU copies without a
    detour; making such memory takes longer than filling it.
    """

    def __init__(self, *, pins: bool) -> None:
        self._pins = pins
        self._unused: dict[int, deque[torch.Tensor]] = {}
        self._locked: list[int] = []
        # Before the memory goes: CUDA would take other memory at the same address for it.
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory of that size, zeros where nobody ever wrote. It is used again once nothing refers to the
        array or its views."""
        unused = self._unused.setdefault(num_bytes, deque())
        try:
            memory = unused.pop()
        except IndexError:
            # Pages of its own: CUDA refuses copies into memory that shares a page with something page-locked.
            # Not torch's own pinned memory, which is rounded up to a power of two.
            memory = torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]
            if self._pins:
                torch.cuda.check_error(
                    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), max(num_bytes, 1), 0)
                )
                self._locked.append(memory.data_ptr())
        data: NDArray[np.uint8] = memory.numpy()
        weakref.finalize(data, unused.append, memory).atexit = False  # in any thread; a deque needs no lock
        return data


def _unlock(addresses: Iterable[int]) -> None:
    for address in addresses:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


class Packing:
    """Buffers of one layout, to be filled tensor by tensor. `take`: returns memory of a size in bytes; by
    default it is new."""

    def __init__(
        self,
        layout: Iterable[tuple[BucketEntry, ...]],
        take: Callable[[int], NDArray[np.uint8]] = zeros,
    ) -> None:
        self.buckets = [Bucket(data=take(entries[-1].end_bytes), entries=entries) for entries in layout]
        for bucket in self.buckets:
            # what lay between tensors would be part of the fingerprint
            for before, entry in pairwise(bucket.entries):
                bucket.data[before.end_bytes : entry.offset_bytes] = 0
        self._places = {
            e.spec.name: (index, e) for index, bucket in enumerate(self.buckets) for e in bucket.entries
        }
        self._missing = [{entry.spec.name for entry in bucket.entries} for bucket in self.buckets]

    @property
    def num_bytes(self) -> int:
        return sum(len(bucket.data) for bucket in self.buckets)

    def put(self, name: str, tensor: torch.Tensor) -> int | None:
        """Copy a full tensor from any device, with any dtype, to its place, cast to the dtype on the wire.

        Returns the index of its bucket if that bucket is now full (nothing writes to it any more), else None.
        """
        index, entry = self._places[name]
        assert tuple(tensor.shape) == entry.spec.shape, f"{name}: {tuple(tensor.shape)} != {entry.spec.shape}"
        view_of(self.buckets[index].data, entry).copy_(tensor, non_blocking=True)
        self._missing[index].discard(name)
        if self._missing[index]:
            return None
        if tensor.is_cuda:
            # the copies into pinned memory have arrived
            torch.cuda.current_stream(tensor.device).synchronize()
        return index

    def seal(self) -> list[Bucket]:
        """The filled buckets with their fingerprints. Reads all bytes once: call it beside training."""
        return [self.seal_bucket(index) for index in range(len(self.buckets))]

    def seal_bucket(self, index: int) -> Bucket:
        """A filled bucket with its fingerprint. May be called in any thread, while other buckets are still
        being filled."""
        assert not self._missing[index], f"never put: {sorted(self._missing[index])}"
        bucket = self.buckets[index]
        _ = bucket.fingerprint  # compute it here, in the thread that sends
        return bucket

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of all packed tensors by their first names."""
        assert not any(self._missing), f"never put: {sorted(set().union(*self._missing))}"
        return {
            name: view_of(self.buckets[index].data, entry) for name, (index, entry) in self._places.items()
        }


def unpack(bucket: Bucket, *, copy: bool = False) -> dict[str, torch.Tensor]:
    """Tensors of a bucket by name; aliases map to the same tensor object.

    Unless `copy`, they are views of the bucket and must not be written to: the memory of an object store is
    read-only, and a write to it kills the process.
    """
    tensors: dict[str, torch.Tensor] = {}
    for entry in bucket.entries:
        tensor = view_of(bucket.data, entry)
        tensors |= dict.fromkeys(entry.spec.names, tensor.clone() if copy else tensor)
    return tensors


def fingerprint(data: NDArray[np.uint8]) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


def verified(buckets: Iterable[Bucket], manifest: Manifest) -> Iterator[Bucket]:
    """Yield the buckets as they arrive, each once its fingerprint has been compared with the manifest's.

    Only after the last bucket is the version known to be complete. Load nothing before that.

    Raises:
        DamagedWeights: if a bucket differs or the number of buckets is wrong; the message names the version
        and the bucket.
    """
    count = len(manifest.fingerprints)
    arrived = 0
    for bucket in buckets:
        if arrived < count:
            _compare(bucket, arrived, manifest)
            yield bucket
        arrived += 1
    if arrived != count:
        raise DamagedWeights(
            f"weights of version {manifest.version}: {arrived} buckets arrived, {count} were sent"
        )


def _compare(bucket: Bucket, index: int, manifest: Manifest) -> None:
    expected = manifest.fingerprints[index]
    if (found := fingerprint(bucket.data)) != expected:
        raise DamagedWeights(
            f"weights of version {manifest.version}: bucket {index} of {len(manifest.fingerprints)} "
            f"({len(bucket.data)} bytes) "
            f"arrived damaged: fingerprint {found:016x}, published as {expected:016x}",
            hint="the transport changed or mixed bytes; the worker keeps its old weights",
        )


def parameter_dtype(specs: Iterable[Spec]) -> str | None:
    """The dtype that all parameters share (they come before buffers); None if nothing is floating point."""
    return next((spec.dtype for spec in specs if torch_dtype(spec.dtype).is_floating_point), None)


def view_of(data: NDArray[np.uint8], entry: BucketEntry) -> torch.Tensor:
    """The tensor of an entry, as a view of its buffer."""
    if entry.spec.num_bytes == 0:
        return torch.empty(entry.spec.shape, dtype=torch_dtype(entry.spec.dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
        raw = torch.from_numpy(data[entry.offset_bytes : entry.end_bytes])
    return raw.view(torch_dtype(entry.spec.dtype)).reshape(entry.spec.shape)
