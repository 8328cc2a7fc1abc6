"""TransferQueue as a `Store`: rows in storage processes, and a controller that knows where each key is.

    driver         start(...) ─> its store ─> store.address ──┐
    other process  TransferQueueStore(address, schema)     <──┘  connects at its first call

A key is a row of the run's partition, and each column of `trajectories.packed` is a field of that row, with
its own dtype and shape. What one call writes (a put, an added column) has the key as one more field, `STAMP`:
TransferQueue gives the index of a cleared row to the next new one, so a get that races with a clear could
otherwise return another key's data.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import wait
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, ExecutorLost, first_line
from asyncrl_cli.data import transferqueue_client
from asyncrl_cli.data.sample_fields import BUILT_IN, Schema
from asyncrl_cli.data.store import Piece, Store, Stored, bytes_of, is_wanted
from asyncrl_cli.data.trajectories import HEADS
from asyncrl_cli.data.transferqueue_client import Address, Connection, check_alive
from asyncrl_cli.profile.rollout_sections import DataPlaneSection

T = TypeVar("T")
LOOK_EVERY_S = 2.0
"""How often a call that waits looks whether the processes live."""
STAMP = "key of "
"""Before the name of a call's first column: the field with the key."""


def start(run: str, plane: DataPlaneSection, schema: Schema = BUILT_IN) -> TransferQueueStore:
    """In the driver: start the processes, which `close` ends. Raises PreflightError if that fails."""
    address = transferqueue_client.started(run, plane)
    store = TransferQueueStore(address, schema, plane.timeout_s, is_drivers=True)
    try:
        store.keys()
    except BaseException:
        store.close()
        raise
    return store


class TransferQueueStore(Store):
    name = "transferqueue"
    lends_memory = False

    def __init__(
        self,
        address: Address,
        schema: Schema = BUILT_IN,
        limit_s: float = 60.0,
        *,
        is_drivers: bool = False,
    ) -> None:
        """`is_drivers`: `close` ends the processes."""
        super().__init__(schema, limit_s)
        self.address = address
        self._is_drivers = is_drivers
        self._connecting, self._clearing = threading.Lock(), asyncio.Lock()
        self._doomed = list[str]()
        """To be cleared. Only for the thread of the connection, as is `_clearing`."""
        self._failure: AsyncrlError | None = None
        """Of a clear."""

    # --- in any process

    def _put(self, key: str, columns: Mapping[str, Any]) -> tuple[Piece, ...]:
        self._call("the put", 1, lambda: self._write(key, columns))
        return (Piece((*columns,), bytes_of(columns)),)

    async def _write(self, key: str, columns: Mapping[str, Any]) -> None:
        import torch
        from tensordict import TensorDict

        arrays = {**columns, STAMP + next(iter(columns)): bytes_as_array(key.encode())}
        if HEADS in arrays:
            arrays[HEADS] = bytes_as_array(pickle.dumps(arrays[HEADS]))
        # A batch of one row: a leading dimension, without a copy.
        fields = {name: torch.from_numpy(np.ascontiguousarray(one))[None] for name, one in arrays.items()}
        # What is added to a cleared key would make it again, as an orphan.
        row = await self._client.async_kv_retrieve_meta([key], self.address.run, create=HEADS in columns)
        if not row.size:
            raise self._gone("the add", [key])
        await self._client.async_put(TensorDict(fields, batch_size=1), row)
        # The package only logs it if the controller did not note what was put; nobody would ever find it.
        row = await self._client.async_kv_retrieve_meta([key], self.address.run)
        if not set(fields) <= set(row.field_names):
            raise self._failed(f"its controller did not note the put of {key}")

    def _get(self, stored: Sequence[Stored], fields: frozenset[str] | None) -> list[dict[str, Any]]:
        alike: dict[tuple[str, ...], list[str]] = {}
        for one in stored:  # keys with the same columns need only one call
            names: list[str] = []
            for piece in one.pieces:
                if wanted := [name for name in piece.names if is_wanted(name, fields)]:
                    names += (STAMP + piece.names[0], *wanted)
            alike.setdefault((*names,), []).append(one.key)
        found: dict[str, dict[str, Any]] = {}

        async def read() -> None:
            for names, keys in alike.items():
                found.update(await self._read([*dict.fromkeys(keys)], names))

        self._call("the get", len(stored), read)
        return [found[one.key] for one in stored]

    async def _read(self, keys: list[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
        from transfer_queue.storage.simple_storage import StorageKeyNotFoundError

        rows = await self._client.async_kv_retrieve_meta(keys, self.address.run)
        if rows.size < len(keys) or not set(names) <= set(rows.field_names):
            raise self._gone("the get", keys)
        try:
            data = await self._client.async_get_data(rows.select_fields([*names]))
        except StorageKeyNotFoundError:
            raise self._gone("the get", keys) from None
        columns = {name: [one.numpy() for one in data[name].unbind()] for name in names}
        found = {key: {name: columns[name][i] for name in names} for i, key in enumerate(keys)}
        for key, row in found.items():
            stamps = [row.pop(name) for name in names if name.startswith(STAMP)]
            if any(stamp.tobytes() != key.encode() for stamp in stamps):
                raise self._gone("the get", [key])
            row[HEADS] = pickle.loads(row[HEADS].tobytes())
        return found

    def _gone(self, call: str, keys: Sequence[str]) -> ExecutorLost:
        more = f" or another of {len(keys)} keys" if len(keys) > 1 else ""
        what = f"{call}: {keys[0]}{more} is not there, or was cleared meanwhile"
        return ExecutorLost(what, executor=f"the {self.name} store")

    @cached_property
    def _connection(self) -> Connection:
        return Connection(self.address, self.limit_s)

    @property
    def _client(self) -> Any:
        return self._connection.client

    def _call(self, what: str, num_keys: int, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            with self._connecting:
                connection = self._connection
            answer, until_s = connection.submit(work()), time.monotonic() + self.limit_s
            try:
                while not wait([answer], min(LOOK_EVERY_S, self.limit_s)).done:
                    check_alive(self.address)
                    if time.monotonic() > until_s:
                        raise TimeoutError
                return answer.result()
            finally:
                answer.cancel()
        except TimeoutError:
            check_alive(self.address)
            raise self.late(what, num_keys) from None
        except AsyncrlError:
            raise
        except Exception as error:  # the package raises whatever its parts raise
            raise self._failed(f"{what} of {num_keys} keys: {first_line(error)}") from error

    def _failed(self, what: str) -> ExecutorFailed:
        return ExecutorFailed(what, executor=f"the {self.name} store")

    # --- in the driver

    def keys(self) -> list[str]:
        """The keys that the controller knows, also those of a worker that died before it could tell. Raises
        the failure of an earlier `clear`, and what `check_alive` raises."""
        self._raise_failure()
        check_alive(self.address)
        listed = self._call("the list", len(self._held), self._listed)
        self._raise_failure()
        return [key for key in listed if key not in self._cleared]

    async def _listed(self) -> list[str]:
        await self._clear(())  # after all earlier ones
        partitions = await self._client.async_kv_list(self.address.run)
        return [*partitions.get(self.address.run, ())]

    def clear(self, keys: Iterable[str]) -> None:
        """Does not wait, so it may be called in an event loop. Also clears keys that only the controller
        knows. Before a cleared key is put again `keys` has to be called, which does wait."""
        keys = [*keys]
        unheard = [key for key in keys if key not in self._held and key not in self._cleared]
        super().clear(keys)
        self._drop(unheard)

    def _drop(self, keys: Sequence[str]) -> None:
        if keys:
            self._connection.submit(self._clear(keys))

    async def _clear(self, keys: Sequence[str]) -> None:
        """One after the other: two clears of one row would release its index twice, and the second one would
        take a new row's data with it."""
        self._doomed += keys
        async with self._clearing:
            doomed, self._doomed = [*dict.fromkeys(self._doomed)], []
            if not doomed:
                return
            try:
                async with asyncio.timeout(self.limit_s):
                    rows = await self._client.async_kv_retrieve_meta(doomed, self.address.run)
                    if rows.size:
                        await self._client.async_clear_samples(rows)
            except TimeoutError:
                self._failure = self._failure or self.late("the clear", len(doomed))
            except Exception as error:
                what = f"the clear of {len(doomed)} keys: {first_line(error)}"
                self._failure = self._failure or self._failed(what)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        super().close()
        if "_connection" in vars(self):
            self._connection.close()
            del self._connection
        if self._is_drivers:
            transferqueue_client.end(self.address.actors.values())
        self._raise_failure()


def bytes_as_array(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(bytearray(data), dtype=np.uint8)
