"""The port of stores: where the arrays of groups are between the process that makes them and those that need
them. The loop has keys and metadata only.

    rollout worker   put(key, trajectories) ─> Stored ──┐
    scorer           get(stored, fields), add(stored, column) ─> Stored
    driver           hold(Stored) ... stored(keys) ─> calls of scorers and trainer ... clear(keys)
    trainer rank     get(stored, fields)

A key is the name of a part, "<uid>@<epoch>.<attempt>/<number>" (`contracts.prompt_group.PartKey`), or of an
eval's call. A `Stored` is what another process needs in order to get a key's data; it is small, and pickles.
The driver's store is the directory of all keys that it knows.

Every call ends within `limit_s`, or raises ExecutorFailed that names the call, the number of keys and the
store. What is gone (its node has died) raises ExecutorLost.

Backends: `ray` (ray_store.py) and `transferqueue` (transferqueue_store.py). Both pass one suite of tests.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.data.sample_fields import BUILT_IN, Schema
from asyncrl_cli.data.trajectories import HEADS, Trajectory, packed, unpacked

Column = Sequence[NDArray[Any]]
"""An array for each trajectory of a key, with one number per sampled token."""


class Piece(NamedTuple):
    """Some columns of a key (`trajectories.packed`): their names, and the object that has them or its handle;
    None if the store finds them by the key."""

    names: tuple[str, ...]
    num_bytes: int
    content: Any = None


class Stored(NamedTuple):
    """What it takes to get a key's data."""

    key: str
    num_trajectories: int
    pieces: tuple[Piece, ...]

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The contents that this process holds itself, and has to send along."""
        return [piece.content for piece in self.pieces if isinstance(piece.content, dict)]

    def joined(self) -> Stored:
        """With all objects in one."""
        if len(self.objects) < 2:
            return self
        names = tuple(name for piece in self.pieces for name in piece.names)
        everything = {name: value for content in self.objects for name, value in content.items()}
        num_bytes = sum(piece.num_bytes for piece in self.pieces)
        return self._replace(pieces=(Piece(names, num_bytes, everything),))

    def with_pieces(self, others: Sequence[Piece]) -> Stored:
        """Also these, instead of earlier ones with the same names."""
        names = {piece.names for piece in others}
        return self._replace(pieces=(*(one for one in self.pieces if one.names not in names), *others))


class Traffic:
    """What a process has moved so far, for its reports. `bytes_copied`: of the fetched ones, those that do
    not lie in the store's own memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sums = dict[str, float]()

    def add(self, **sums: float) -> None:
        with self._lock:
            for name, amount in sums.items():
                self.sums[f"data_{name}"] = self.sums.get(f"data_{name}", 0) + amount


class Store(ABC):
    """One process's end. `put`, `get` and `add` may be called in any thread; the others belong to the
    driver."""

    name: str
    address: Any = None
    """What another process needs to make its end (`backends.store_at`); None: nothing."""
    lends_memory = True
    """Whether fetched arrays are views of the store's memory. If not, all of them are copies."""

    def __init__(self, schema: Schema = BUILT_IN, limit_s: float = 60.0) -> None:
        self.schema = schema
        self.limit_s = limit_s
        self.traffic = Traffic()
        self._held: dict[str, Stored] = {}
        self._pins: Counter[str] = Counter()
        self._cleared = dict[str, Stored]()
        """Cleared while pinned."""

    # --- in any process

    def put(self, key: str, trajectories: Sequence[Trajectory]) -> Stored:
        """Store a key's trajectories. Putting a key again replaces it."""
        return Stored(key, len(trajectories), self._written(key, packed(trajectories, self.schema)))

    def add(self, stored: Stored, name: str, column: Column) -> Stored:
        """Write a field per sampled token beside what is there, or over it."""
        columns = {f"sampled/{name}": np.concatenate([self.schema[name].filled(0), *column])}
        return stored.with_pieces(self._written(stored.key, columns))

    def get(self, stored: Sequence[Stored], fields: Collection[str] | None = None) -> list[list[Trajectory]]:
        """The trajectories of each key, with the values and only these fields' arrays; None: all."""
        began_s = time.monotonic()
        found = self._get(stored, None if fields is None else frozenset(fields))
        self.traffic.add(
            bytes_fetched=sum(map(bytes_of, found)),
            bytes_copied=sum(bytes_of(one, owned=self.lends_memory) for one in found),
            fetch_s=time.monotonic() - began_s,
        )
        return [unpacked(columns) for columns in found]

    def _written(self, key: str, columns: Mapping[str, Any]) -> tuple[Piece, ...]:
        self.traffic.add(bytes_put=bytes_of(columns))
        return self._put(key, columns)

    @abstractmethod
    def _put(self, key: str, columns: Mapping[str, Any]) -> tuple[Piece, ...]: ...

    @abstractmethod
    def _get(self, stored: Sequence[Stored], fields: frozenset[str] | None) -> list[dict[str, Any]]: ...

    # --- in the driver

    def hold(self, stored: Stored) -> None:
        """Keep a key that this or another process has put."""
        earlier = self._held.get(stored.key, stored)
        self._held[stored.key] = earlier.with_pieces(stored.pieces)

    def hold_added(self, stored: Stored) -> None:
        """Keep what another process has added to a key, unless it was cleared meanwhile."""
        if stored.key in self._held:
            self.hold(stored)

    def stored(self, keys: Iterable[str]) -> list[Stored]:
        """What another process needs to get these keys. KeyError for an unknown one."""
        return [self._held[key] if key in self._held else self._cleared[key] for key in keys]

    def keys(self) -> list[str]:
        """All but those that were cleared and are still pinned. May be called in any thread: the copy is made
        in one step."""
        return [*self._held]

    def clear(self, keys: Iterable[str]) -> None:
        """Forget keys; their memory is freed soon, or once nothing pins them. Unknown ones are ignored."""
        for key in keys:
            if (stored := self._held.pop(key, None)) is None:
                continue
            if self._pins[key]:
                self._cleared[key] = stored
            else:
                self._drop([key])

    @contextmanager
    def pinned(self, keys: Collection[str]) -> Iterator[list[Stored]]:
        """What it takes to get these keys, whose data outlives a `clear` until the end of the block."""
        self._pins.update(keys)
        try:
            yield self.stored(keys)
        finally:
            self._pins.subtract(keys)
            freed = [key for key in keys if not self._pins[key] and self._cleared.pop(key, None) is not None]
            self._drop([key for key in freed if key not in self._held])
            self._pins += Counter()  # without zeros

    def stats(self) -> dict[str, int]:
        """How many keys and bytes the driver holds. Never waits."""
        pieces = [piece for stored in self._held.values() for piece in stored.pieces]
        return {"keys": len(self._held), "bytes": sum(piece.num_bytes for piece in pieces)}

    def close(self) -> None:
        """Free everything."""
        self._held.clear()
        self._cleared.clear()

    def _drop(self, keys: Sequence[str]) -> None:  # noqa: B027
        """Free what does not go with its last reference."""

    def late(self, call: str, num_keys: int) -> ExecutorFailed:
        what = f"{call} of {num_keys} keys took longer than data_plane.timeout_s = {self.limit_s:g} s"
        return ExecutorFailed(what, executor=f"the {self.name} store")


def is_wanted(name: str, fields: Collection[str] | None) -> bool:
    return fields is None or name == HEADS or name.partition("/")[2] in fields


def bytes_of(columns: Mapping[str, Any], *, owned: bool = False) -> int:
    """Bytes of the arrays, or of those that do not lie in another object's memory."""
    return sum(
        value.nbytes
        for value in columns.values()
        if isinstance(value, np.ndarray) and (value.flags.owndata or not owned)
    )
