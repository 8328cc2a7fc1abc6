"""What changed in a bucket since the version before, bit for bit (`weights.encoding`).

    trainer   difference(bucket, previous bucket, version) -> Delta, or None where it would not be smaller
    worker    applied(delta, its node's weights of that version) -> the new bucket, which `verified` checks

In bfloat16 at usual learning rates an optimizer step changes few elements, most of them by a last bit. An
element is as many bytes as the bucket's smallest value. A delta has the places of the changed elements, each
as the distance from the one before, and by how much their bytes, read as an integer, grew (zigzag, so that
small steps in both directions are small numbers), in ranges of `RANGE_ELEMENTS` that are made and applied one
by one.

Every number is a byte if it fits: 255 stands for "255 and what the next byte says" in distances, and for a
number of its own, kept apart, in changes. Both are then compressed. docs/weights.md has what that saves.

A delta proves nothing by itself. The fingerprint of the whole new bucket does, which the manifest has:
applied to another version, with two ranges swapped or one bit flipped, the result is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from asyncrl_cli.weights.buckets import Bucket, DamagedWeights, Layout, torch_dtype

if TYPE_CHECKING:
    from asyncrl_cli.weights.receivers import SharedWeights

RANGE_ELEMENTS = 2**22
"""Bounds the memory that a comparison needs beside the buckets."""
MOST_CHANGED = 1 / 3
"""With more changed elements a delta would hardly be smaller."""
ESCAPE = 255
CODEC = "zstd"
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeChanges:
    """The changed elements of one range: how many; distances, changes, and changes too large for a byte."""

    count: int
    distances: bytes
    changes: bytes
    large: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """From the bucket of the same layout in version `base`, in elements of `element_bytes`."""

    base: int
    entries: Layout
    element_bytes: int
    ranges: tuple[RangeChanges, ...]

    @property
    def sent_bytes(self) -> int:
        return sum(len(one.distances) + len(one.changes) + len(one.large) for one in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRef:
    """Refs of a bucket and of its delta from version `base`. A worker fetches the one that it can use."""

    full: Any
    delta: Any
    base: int


def difference(bucket: Bucket, before: Bucket, base: int) -> Delta | None:
    """None if the delta would not be smaller than the bucket, or the layouts differ."""
    if bucket.entries != before.entries:
        return None
    size = min(int(torch_dtype(entry.spec.dtype).itemsize) for entry in bucket.entries)
    new, old = (one.data.view(f"u{size}") for one in (bucket, before))
    ranges, num_changed = [], 0
    for start in range(0, len(new), RANGE_ELEMENTS):
        ours, theirs = (one[start : start + RANGE_ELEMENTS] for one in (new, old))
        places = np.flatnonzero(ours != theirs)
        num_changed += len(places)
        if num_changed > MOST_CHANGED * len(new):
            return None
        ranges.append(_encoded(places, ours[places] - theirs[places]))
    delta = Delta(base=base, entries=bucket.entries, element_bytes=size, ranges=tuple(ranges))
    return delta if delta.sent_bytes < len(bucket.data) else None


def applied(delta: Delta, before: SharedWeights) -> Bucket:
    """A new bucket; `before` stays as it is. Raises DamagedWeights for a delta that does not fit it."""
    try:
        bucket = before.bucket(delta.entries)
        values = bucket.data.view(f"u{delta.element_bytes}")
        if len(delta.ranges) != -(-len(values) // RANGE_ELEMENTS):
            raise ValueError(f"it has {len(delta.ranges)} ranges")
        for number, one in enumerate(delta.ranges):
            part = values[number * RANGE_ELEMENTS : (number + 1) * RANGE_ELEMENTS]
            places, changes = _decoded(one, part.dtype, len(part))
            part[places] += changes
    except (ValueError, LookupError, pa.ArrowException, OSError) as error:
        why = f"a delta from version {delta.base} cannot be applied: {error}"
        hint = "the transport changed or mixed bytes; the worker keeps its old weights"
        raise DamagedWeights(why, hint=hint) from error
    return bucket


def _encoded(places: NDArray[Any], changes: NDArray[Any]) -> RangeChanges:
    distances = np.diff(places, prepend=0)
    whole, rest = np.divmod(distances, ESCAPE)
    stream = np.full(int(whole.sum()) + len(places), ESCAPE, dtype=np.uint8)
    stream[np.cumsum(whole + 1) - 1] = rest
    sign = np.zeros_like(changes) - (changes >> (8 * changes.itemsize - 1))  # all ones below zero
    zigzag = (changes << 1) ^ sign
    small = np.minimum(zigzag, ESCAPE).astype(np.uint8)
    return RangeChanges(
        count=len(places),
        distances=_compressed(stream),
        changes=_compressed(small),
        large=_compressed(zigzag[zigzag >= ESCAPE].view(np.uint8)),
    )


def _decoded(one: RangeChanges, dtype: np.dtype[Any], length: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Places and changes. Raises ValueError for what `_encoded` does not write."""
    most = one.count + length // ESCAPE
    stream = _expanded(one.distances, most)
    places = np.cumsum(stream, dtype=np.int64)[stream != ESCAPE]
    zigzag = _expanded(one.changes, one.count).astype(dtype)
    is_large = zigzag == ESCAPE
    zigzag[is_large] = _expanded(one.large, int(is_large.sum()) * dtype.itemsize).view(dtype)
    if len(places) != one.count or len(zigzag) != one.count or (len(places) and places[-1] >= length):
        raise ValueError("places and changes do not fit each other")
    return places, (zigzag >> 1) ^ (np.zeros_like(zigzag) - (zigzag & 1))


def _compressed(data: Bytes) -> bytes:
    """Its length, then the bytes, compressed."""
    packed: bytes = pa.compress(data.tobytes(), codec=CODEC, asbytes=True)
    return len(data).to_bytes(8, "little") + packed


def _expanded(data: bytes, most: int) -> Bytes:
    if (length := int.from_bytes(data[:8], "little")) > most:
        raise ValueError(f"{length} bytes where {most} are possible")
    return np.frombuffer(pa.decompress(data[8:], length, codec=CODEC, asbytes=True), dtype=np.uint8)
