"""From received buckets into a model's own tensors, with no second copy of the weights in between.

    buckets, all verified ──> announced(buckets): names and shapes, to be looked at first
                          └─> copy_into(own, bucket, load bucket size): slice by slice, each no larger than a load bucket

The buckets are only mapped (an object store's memory, a file), so a slice is all that is held beside the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl_cli.weights.buckets import Bucket, Entry, torch_dtype


def announced(buckets: Iterable[Bucket]) -> dict[str, torch.Tensor]:
    """The tensors that `buckets` hold, by all their names: shapes and dtypes without memory."""
    return {
        name: torch.empty(entry.spec.shape, dtype=torch_dtype(entry.spec.dtype), device="meta")
        for bucket in buckets
        for entry in bucket.entries
        for name in (entry.spec.name, *entry.spec.aliases)
    }


def copy_into(own: Mapping[str, torch.Tensor], bucket: Bucket, load_bucket_size_bytes: int) -> None:
    """Copy a bucket's tensors over those of the same names; tied ones, that share their memory, once."""
    slices = [_rows_per_slice(entry, load_bucket_size_bytes) for entry in bucket.entries]
    scratch = np.empty(max((row_bytes * rows for row_bytes, rows in slices), default=0), dtype=np.uint8)
    for entry, (row_bytes, rows) in zip(bucket.entries, slices, strict=True):
        targets = {own[name].data_ptr(): own[name] for name in (entry.spec.name, *entry.spec.aliases)}
        for first, arrived in _slices(bucket, entry, row_bytes * rows, scratch):
            for target in targets.values():
                _rows_of(target)[first : first + len(arrived)].copy_(arrived)


def _rows_per_slice(entry: Entry, load_bucket_size_bytes: int) -> tuple[int, int]:
    """Bytes of a row, and how many rows a load bucket holds: all that there are at most, one at least."""
    num_rows = max(entry.spec.shape[0] if entry.spec.shape else 1, 1)
    row_bytes = entry.spec.num_bytes // num_rows
    return row_bytes, min(num_rows, max(1, load_bucket_size_bytes // max(row_bytes, 1)))


def _slices(bucket: Bucket, entry: Entry, slice_bytes: int, scratch: NDArray[np.uint8]) -> Iterator[tuple[int, torch.Tensor]]:
    """A tensor's rows, some at a time, and the number of the first. They lie in `scratch`: the next ones overwrite them.

    (They are copied there because the bucket's memory may be read-only, which torch cannot express.)
    """
    first = 0
    for start_bytes in range(entry.offset_bytes, entry.end_bytes, max(slice_bytes, 1)):
        stop_bytes = min(start_bytes + slice_bytes, entry.end_bytes)
        held = scratch[: stop_bytes - start_bytes]
        held[:] = bucket.data[start_bytes:stop_bytes]
        rows = torch.from_numpy(held).view(torch_dtype(entry.spec.dtype)).reshape(-1, *entry.spec.shape[1:])
        yield first, rows
        first += len(rows)


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar has one row."""
    return tensor if tensor.dim() else tensor.reshape(1)
