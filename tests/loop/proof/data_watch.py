"""The store of a run's data, and what must hold of its keys.

Every key of a live attempt is held. Nobody reads a key that is neither held nor pinned. A sweep clears only
what the loop has never heard of, because the process that put it was gone before it could report that, or the
eval had timed out. After the last sweep every key that is held has an owner.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from asyncrl_cli.contracts.events import Event
from asyncrl_cli.contracts.prompt_group import DataKey
from asyncrl_cli.loop.groups import Groups
from asyncrl_cli.simulate.simulated_worker import SimulatedStore

if TYPE_CHECKING:
    from tests.loop.proof.invariants import Invariants


class Putting(Protocol):
    """A worker: `process` is another one after each death."""

    process: object
    is_alive: bool


@dataclass(slots=True)
class Entry:
    """`worker` and its `process`: who has put it; None of what a resumed run begins with."""

    put_s: float
    worker: Putting | None = None
    process: object = None
    is_reported: bool = False

    @property
    def is_left(self) -> bool:
        """Whether it died with a worker between its put and its report."""
        is_gone = self.worker is not None and (
            self.worker.process is not self.process or not self.worker.is_alive
        )
        return is_gone and not self.is_reported


class DataWatch:
    """Implements `contracts.ports.DataStore`, strictly."""

    def __init__(self, invariants: Invariants) -> None:
        self._held = dict[DataKey, Entry]()
        self._pins = Counter[DataKey]()
        self._cleared_while_pinned = set[DataKey]()
        self._last_cleared: list[tuple[DataKey, Entry]] = []
        self._judged = Counter[DataKey]()
        self._invariants = invariants
        self._now = asyncio.get_running_loop().time
        self._groups: Groups | None = None
        self.timed_out = set[int]()
        """Versions whose evals timed out: nobody waits for their last reports."""

    def watch(self, groups: Groups) -> None:
        """From now on live attempts are compared, and what is left after the last sweep."""
        self._groups, last_sweep = groups, groups.data.last_sweep

        async def watched() -> None:
            began_s = self._now()
            await last_sweep()
            self._check_last(began_s)

        groups.data.last_sweep = watched

    # --- the port

    def put(self, key: DataKey, worker: Putting | None = None) -> None:
        process = worker.process if worker is not None else None
        self._held[key] = Entry(self._now(), worker, process, is_reported=worker is None)

    def clear(self, keys: Iterable[DataKey]) -> None:
        found = [(key, self._held.pop(key)) for key in keys if key in self._held]
        self._cleared_while_pinned.update(key for key, _ in found if self._pins[key])
        self._last_cleared = found

    @contextmanager
    def pinned(self, keys: Collection[DataKey]) -> Iterator[None]:
        self.read(keys, "a pin")
        self._pins.update(keys)
        try:
            yield
        finally:
            self._pins.subtract(keys)
            self._cleared_while_pinned.difference_update(key for key in keys if not self._pins[key])

    async def keys(self) -> Collection[DataKey]:
        await asyncio.sleep(0)
        return [*self._held]

    def stats(self) -> Mapping[str, int]:
        return {"keys": len(self._held), "bytes": 0}

    # --- what is told to it

    def reported(self, keys: Iterable[DataKey | None]) -> None:
        """The loop hears of these keys now."""
        for key in keys:
            if key in self._held:
                self._held[key].is_reported = True

    def read(self, keys: Iterable[DataKey], what: str) -> None:
        gone = [key for key in keys if key not in self._held and key not in self._cleared_while_pinned]
        self._invariants.check(not gone, "data", f"{what} reads {gone}, which was cleared")

    @contextmanager
    def reading(self, keys: Collection[DataKey], what: str) -> Iterator[None]:
        """Somebody needs these keys until the end of the block."""
        self.read(keys, what)
        yield
        self.read(keys, f"{what}, at its end,")

    @contextmanager
    def judging(self, key: DataKey) -> Iterator[None]:
        self._judged[key] += 1
        try:
            with self.reading([key], "a reward model"):
                yield
        finally:
            self._judged[key] -= 1

    # --- what must hold

    def check_live(self) -> None:
        if self._groups is None:
            return
        ledger, held = self._groups.ledger, self._held
        for attempts in (ledger.running, ledger.finished, ledger.training):
            for attempt in attempts.values():
                gone = [key for key in attempt.data_keys() if key not in held]
                self._invariants.check(not gone, "data", f"{attempt.key} is {attempt.stage} without {gone}")

    def swept(self, event: Event) -> None:
        """A sweep has cleared orphans just now."""
        found, num_keys = self._last_cleared, event.fields["keys"]
        self._invariants.check_same("data", "orphans that were cleared", len(found), num_keys)
        timed_out = tuple(f"eval-{version}/" for version in self.timed_out)
        wrong = [
            key
            for key, entry in found
            if not entry.is_left and (entry.is_reported or not key.startswith(timed_out))
        ]
        self._invariants.check(not wrong, "data", f"a sweep finds {wrong}, left by {event.fields['left_by']}")
        self._invariants.counts["keys that died with a worker"] += num_keys

    def _check_last(self, began_s: float) -> None:
        assert self._groups is not None
        self.check_live()
        ledger = self._groups.ledger
        live = [*ledger.running.values(), *ledger.finished.values(), *ledger.training.values()]
        owned = {*chain.from_iterable(attempt.data_keys() for attempt in live), *+self._judged}
        running = [str(part.key) for attempt in live for part in attempt.running_parts()]
        owned.update(running, (f"{key}-partial" for key in running))
        left = [
            key
            for key, entry in self._held.items()
            if key not in owned and (entry.is_reported or entry.put_s < began_s)
        ]
        self._invariants.check(not left, "data", f"after the last sweep {left} are held, and have no owner")


class WorkersEnd(SimulatedStore):
    """What a worker puts into a run's store. A dead process puts nothing."""

    def __init__(self, data: DataWatch) -> None:
        super().__init__()
        self.worker: Putting | None = None
        self._data = data

    def put(self, key: DataKey) -> None:
        assert self.worker is not None
        if self.worker.is_alive:
            self._data.put(key, self.worker)
