"""Buckets: flat host buffers that carry tensors, or rows of tensors, their layout and fingerprints. Both
sides use them.

    trainer   plan_layout(specs) -> Packing.put(name, tensor)... -> Packing.seal_bucket(i) -> Bucket
    worker    receivers.verified(buckets, manifest) -> receivers.SharedWeights(buckets), or Unpacked(buckets)

FSDP2 shards tensors by rows, so the bytes of a tensor are those of its ranks' rows, end to end. Each trainer
rank has a layout and buckets of its own rows; a version is all ranks' buckets. With one rank, and for tensors
that rank 0 sends for all (`PolicyModel.specs`), the rows are the whole tensor.

A packed bucket owns its bytes: it never shares memory with a live parameter. Tied parameters travel once,
under their first name; the other names are recorded as `aliases`.
"""

from __future__ import annotations

import math
import mmap
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter, itemgetter

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from asyncrl_cli.base.errors import AsyncrlError

BYTES_PER_MB = 2**20
ALIGNMENT_BYTES = 64
"""Every tensor starts at a multiple of this, so that it can be viewed in place with any dtype."""


class DamagedWeights(AsyncrlError):
    """Received buckets are not the ones that were published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A tensor to send, or some rows of one: its dtype on the wire (torch's name for it), and its other
    names.

    `shape`: of what is sent. `first_row`: its place in the whole tensor. `num_rows`: of the whole tensor;
    None if all of it is sent.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    first_row: int = 0
    num_rows: int | None = None

    def rows(self, first_row: int, count: int) -> Spec:
        """Some rows of this whole tensor."""
        if count == self.shape[0]:
            return self
        shape = (count, *self.shape[1:])
        return replace(self, shape=shape, first_row=first_row, num_rows=self.shape[0])

    @property
    def whole(self) -> Spec:
        """The tensor of which this is the whole, or some rows."""
        if self.num_rows is None:
            return self
        return replace(self, shape=(self.num_rows, *self.shape[1:]), first_row=0, num_rows=None)

    @property
    def begin_bytes(self) -> int:
        """Where these rows begin in the whole tensor."""
        return self.first_row * math.prod(self.shape[1:]) * int(torch_dtype(self.dtype).itemsize)

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


def are_whole(parts: Iterable[Spec]) -> bool:
    """Whether these rows are one whole tensor, each once."""
    in_order = sorted(parts, key=attrgetter("first_row"))
    ends = accumulate((spec.num_bytes for spec in in_order), initial=0)
    begins = (*(spec.begin_bytes for spec in in_order), in_order[0].whole.num_bytes)
    return [*ends] == [*begins] and len({spec.whole for spec in in_order}) == 1


Layout = tuple[BucketEntry, ...]
"""Of one bucket."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One flat buffer of uint8 and the layout of the tensors in it."""

    data: NDArray[np.uint8]
    entries: Layout

    @cached_property
    def fingerprint(self) -> int:
        """Of data and layout, computed at first use and cached."""
        return fingerprint(self)

    def clear_gaps(self) -> None:
        """What lay between tensors would be part of the fingerprint."""
        for before, entry in pairwise(self.entries):
            self.data[before.end_bytes : entry.offset_bytes] = 0

    def read(self) -> Bucket:
        """Return the bucket itself: a bucket in this process is its own ref."""
        return self


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan_layout(specs: Iterable[Spec], bucket_size_bytes: int) -> list[Layout]:
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
    """Memory of its own pages, which go back to the kernel at once when nothing refers to it. The heap would
    keep up to a gigabyte for each thread that fetches (`host_process.keep_freed_memory`)."""
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype=np.uint8)[:num_bytes]


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
            memory = torch.from_numpy(zeros(num_bytes))
            if self._pins:
                address = memory.data_ptr()
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, max(num_bytes, 1), 0))
                self._locked.append(address)
        data: NDArray[np.uint8] = memory.numpy()
        weakref.finalize(data, unused.append, memory).atexit = False  # in any thread; a deque needs no lock
        return data


def _unlock(addresses: Sequence[int]) -> None:
    for address in addresses:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


class Packing:
    """Buffers of one layout, to be filled tensor by tensor. `take`: returns memory of a size in bytes; by
    default it is new."""

    def __init__(self, layout: Iterable[Layout], take: Callable[[int], NDArray[np.uint8]] = zeros) -> None:
        self.buckets = [Bucket(data=take(entries[-1].end_bytes), entries=entries) for entries in layout]
        for bucket in self.buckets:
            bucket.clear_gaps()
        placed = [(index, entry) for index, bucket in enumerate(self.buckets) for entry in bucket.entries]
        self._places = {entry.spec.name: (index, entry) for index, entry in placed}
        self._missing = [{entry.spec.name for entry in bucket.entries} for bucket in self.buckets]

    @property
    def num_bytes(self) -> int:
        return sum(len(bucket.data) for bucket in self.buckets)

    @property
    def specs(self) -> list[Spec]:
        return [entry.spec for _, entry in self._places.values()]

    def put(self, name: str, tensor: torch.Tensor) -> int | None:
        """Copy a tensor, or this rank's rows of it, from any device, with any dtype, to its place, cast to
        the dtype on the wire.

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
        return {name: view_of(self.buckets[i].data, entry) for name, (i, entry) in self._places.items()}


class Unpacked(Mapping[str, torch.Tensor]):
    """All tensors of these buckets by name, and by their aliases.

    They are views of the buckets and must not be written to: the memory of an object store is read-only, and
    a write to it kills the process. A tensor whose rows are in several places is joined in new memory each
    time that it is read.
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._rows: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for bucket in buckets:
            for entry in bucket.entries:
                for name in entry.spec.names:
                    rows = self._rows.setdefault(name, [])
                    rows.append((entry.spec.first_row, view_of(bucket.data, entry)))

    def __getitem__(self, name: str) -> torch.Tensor:
        rows = [tensor for _, tensor in sorted(self._rows[name], key=itemgetter(0))]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def mapped_tensors(
    path: str, num_bytes: int, tensors: Iterable[tuple[str, str, Sequence[int], int]]
) -> list[tuple[str, torch.Tensor]]:
    """Map the buffer that another process describes (`receivers.SharedWeights.describe`); the tensors are
    views of it. Writes copy the page and stay private.

    Raises ValueError if the file has another size, or a tensor lies outside of it.
    """
    data = np.memmap(path, dtype=np.uint8, mode="c")
    if len(data) != num_bytes:
        raise ValueError(f"shared weights at {path} have {len(data)} bytes, but {num_bytes} were announced")
    found = []
    for name, dtype, shape, offset_bytes in tensors:
        entry = BucketEntry(spec=Spec(name=name, dtype=dtype, shape=tuple(shape)), offset_bytes=offset_bytes)
        if entry.end_bytes > len(data):
            raise ValueError(f"{name} ends at byte {entry.end_bytes} of {len(data)} shared ones")
        found.append((name, view_of(data, entry)))
    return found


def fingerprint(bucket: Bucket) -> int:
    """xxh3_64 of the bytes, and then of the layout: the same bytes are others at another place."""
    found = xxhash.xxh3_64(bucket.data.data)
    found.update(repr(bucket.entries).encode())
    return found.intdigest()


def view_of(data: NDArray[np.uint8], entry: BucketEntry) -> torch.Tensor:
    """The tensor of an entry, as a view of its buffer."""
    if entry.spec.num_bytes == 0:
        return torch.empty(entry.spec.shape, dtype=torch_dtype(entry.spec.dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
        raw = torch.from_numpy(data[entry.offset_bytes : entry.end_bytes])
    return raw.view(torch_dtype(entry.spec.dtype)).reshape(entry.spec.shape)
