"""Arrays whose rows have different lengths, such as the tokens that a sampler has kept for each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Row i is `values[starts[i] : starts[i + 1]]`. Slices of rows are views."""

    values: NDArray[np.int32]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | NDArray[Any]]) -> Ragged:
        """Raises ValueError or TypeError if the rows are not lists of integers."""
        arrays = [np.asarray(row) for row in rows]
        if any(array.ndim != 1 or (array.size and array.dtype.kind not in "iu") for array in arrays):
            raise ValueError("rows are lists of integers")
        values = np.concatenate([np.zeros(0, np.int32), *arrays], dtype=np.int32, casting="unsafe")
        return cls(values, np.cumsum([0, *map(len, arrays)]))

    @classmethod
    def decoded(cls, array: NDArray[np.int32], num_rows: int) -> Ragged:
        """From one array (see `encoded`). Raises ValueError if it does not have this number of rows."""
        lengths, values = array[:num_rows], array[num_rows:]
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if len(lengths) < num_rows or (lengths < 0).any() or starts[-1] != len(values):
            raise ValueError(f"these are not {num_rows} rows")
        return cls(values, starts)

    def encoded(self) -> NDArray[np.int32]:
        """As one array for stores and files: the rows' lengths, then all values."""
        values = self.values[self.starts[0] : self.starts[-1]]
        return np.concatenate([self.lengths.astype(np.int32), values])

    @property
    def dtype(self) -> np.dtype[np.int32]:
        return self.values.dtype

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, rows: slice) -> Ragged:
        begin, end, _ = rows.indices(len(self))
        return Ragged(self.values, self.starts[begin : max(begin, end) + 1])

    def tolist(self) -> list[list[int]]:
        return [self.values[a:b].tolist() for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]


def end_to_end(parts: Sequence[Any]) -> Any:
    """One array, or one Ragged, of the rows of all parts, at least one."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Ragged):
        values = [part.values[part.starts[0] : part.starts[-1]] for part in parts]
        lengths = np.concatenate([part.lengths for part in parts])
        return Ragged(np.concatenate(values), np.concatenate([[0], np.cumsum(lengths)]))
    return np.concatenate(parts)
