"""Which data the run holds in its store, and that every key has an owner.

A key belongs to a live attempt of the ledger, or is lent to a checkpoint or an eval until that ends. Whoever
ends this clears it. The sweep, at every window and at the end, compares the store with the owners: a key
without one is an orphan. It was left by a call that this run forgot to make, by a worker that died before it
could report what it had put, or by an eval that timed out. Orphans are cleared and counted (`data/orphans`).

A worker puts a part before it reports it, so a key may have no owner for a moment, if its group was given up
meanwhile. It is an orphan only if two sweeps in a row see it that are not too close together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from asyncrl_cli.contracts.ports import DataStore
from asyncrl_cli.contracts.prompt_group import AttemptKey, DataKey, attempt_of
from asyncrl_cli.contracts.status import DataStatus
from asyncrl_cli.loop.ledger import Attempt, Ledger

MOST_REMEMBERED = 4096
"""Ended attempts whose last event an orphan's warning can name."""
APART_S = 0.4
"""How far apart two sweeps are at least that see an orphan: the window's last and the run's may be close."""
SETTLE_S = 0.5
"""How long a worker's report may take that is under way as the run ends."""


class DataKeys:
    def __init__(self, store: DataStore | None, ledger: Ledger, event: Callable[..., None]) -> None:
        """Without a store there is nothing to clear. `event(name, **fields)` notifies the observers."""
        self.orphans = 0
        self._store = store
        self._ledger = ledger
        self._event = event
        self._lent: set[DataKey] = set()
        self._unowned: dict[DataKey, float] = {}
        """What the last sweep saw: since when."""
        self._ends: dict[AttemptKey, tuple[str, list[DataKey]]] = {}
        """How attempts have ended, and the keys that should have been cleared then."""

    def clear(self, keys: Iterable[DataKey | None]) -> None:
        if self._store is not None:
            self._store.clear([key for key in keys if key is not None])

    def release(self, attempt: Attempt, end: str) -> None:
        """The attempt has ended, with this event."""
        keys = attempt.data_keys()
        self._ends[attempt.key] = end, keys
        if len(self._ends) > MOST_REMEMBERED:
            del self._ends[next(iter(self._ends))]
        self.clear(keys)

    @contextmanager
    def lent(self, keys: Iterable[DataKey]) -> Iterator[None]:
        """These keys, which no attempt owns, are needed until the end of the block, and are cleared then."""
        keys = {*keys}
        self._lent |= keys
        try:
            yield
        finally:
            self._lent -= keys
            self.clear(keys)

    @contextmanager
    def pinned(self, keys: Iterable[DataKey]) -> Iterator[None]:
        """The data of these keys outlives a `clear` until the end of the block."""
        if self._store is None:
            yield
            return
        with self._store.pinned([*keys]):
            yield

    def status(self) -> DataStatus | None:
        return DataStatus(**self._store.stats(), orphans=self.orphans) if self._store is not None else None

    async def unowned(self) -> set[DataKey]:
        """The keys of the store that have no owner now."""
        found = await self._store.keys() if self._store is not None else ()
        return {key for key in found if not self._is_owned(key)}

    async def sweep(self) -> None:
        now_s = asyncio.get_running_loop().time()
        since_s = {key: self._unowned.get(key, now_s) for key in await self.unowned()}
        orphans = sorted(key for key, seen_s in since_s.items() if now_s - seen_s >= APART_S)
        self._unowned = {key: seen_s for key, seen_s in since_s.items() if key not in orphans}
        if orphans:
            self.orphans += len(orphans)
            self.clear(orphans)
            key, num_keys = orphans[0], len(orphans)
            end, known = self._ends.get(attempt_of(key), ("", [])) if "@" in key else ("an eval", [key])
            left = end if key in known else "a worker that did not report it"
            self._event("orphans", keys=num_keys, first=key, left_by=left)
            what = f"{num_keys} keys of the data store" if num_keys > 1 else f"{key} of the data store"
            message = f"{what} had no owner and was cleared; the first was left by: {left}"
            self._event("warning", message=message)

    async def last_sweep(self) -> None:
        """As the run ends. Sweeps again if a report may be under way."""
        await self.sweep()
        if self._unowned:
            await asyncio.sleep(SETTLE_S)
            await self.sweep()

    def _is_owned(self, key: DataKey) -> bool:
        if key in self._lent:
            return True
        if "@" not in key:
            return False
        attempt, ledger = attempt_of(key), self._ledger
        owner = next(
            (one[attempt] for one in (ledger.running, ledger.finished, ledger.training) if attempt in one),
            None,
        )
        if owner is None:
            return False
        # Every checkpoint puts what a running part has under the same name: two sweeps may both see that name
        # before the worker has reported it.
        running = key.removesuffix("-partial")
        return key in owner.data_keys() or any(str(part.key) == running for part in owner.running_parts())
