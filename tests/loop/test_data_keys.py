"""Owners of the keys of a run's data, and what a sweep does with those that have none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from benchmarks.local_store import LocalStore

from asyncrl_cli.contracts.ports import DataStore
from asyncrl_cli.contracts.prompt_group import PartKey, PartResult, Prompt
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.trajectories import segment_of, trajectory_of
from asyncrl_cli.job.driver_loop import DriverData
from asyncrl_cli.loop.data_keys import APART_S, DataKeys
from asyncrl_cli.loop.ledger import Attempt, Ledger, Part
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import World
from asyncrl_cli.simulate.simulated_trainer import SimulatedTrainer, TrainerTimes
from asyncrl_cli.simulate.simulated_worker import SimulatedStore, SimulatedWorker
from asyncrl_cli.simulate.world import NumberedFeed, run_virtual
from tests.loop.worlds import Recorder, settings, worker_times

Events = list[tuple[str, dict[str, Any]]]
Case = Callable[[SimulatedStore, DataKeys, Ledger, Events], Awaitable[None]]


def on_keys(case: Case) -> None:
    async def main() -> None:
        store, ledger, events = SimulatedStore(), Ledger(), Events()
        keys = DataKeys(store, ledger, lambda name, **fields: events.append((name, fields)))
        await case(store, keys, ledger, events)

    run_virtual(main())


def running(ledger: Ledger, uid: str = "p0") -> tuple[Attempt, Part]:
    """An attempt with one part that runs."""
    attempt = Attempt(prompt=Prompt(uid=uid, epoch=0, item={}))
    attempt.parts[0] = part = Part(key=PartKey(attempt.key, 0), indices=(0,), worker="rollout-0", version=0)
    ledger.admit(attempt)
    return attempt, part


def ended(part: Part) -> None:
    part.result = PartResult(
        key=part.key, payload=str(part.key), trajectories=(), failures=(), failed_tokens=0
    )


def test_a_key_without_an_owner_is_an_orphan_for_the_second_sweep_and_not_for_one_right_after_the_first():
    async def case(store: SimulatedStore, keys: DataKeys, ledger: Ledger, events: Events) -> None:
        store.put("p0@0.0/0")
        await keys.sweep()
        await keys.sweep()
        assert [*store.held] == ["p0@0.0/0"]
        await asyncio.sleep(APART_S)
        store.put("p1@0.0/0")
        await keys.sweep()
        assert [*store.held] == ["p1@0.0/0"]
        assert keys.orphans == 1
        assert [name for name, _ in events] == ["orphans", "warning"]
        await keys.last_sweep()
        assert not store.held
        assert keys.orphans == 2

    on_keys(case)


def test_a_key_that_is_cleared_or_owned_before_the_second_sweep_is_no_orphan():
    async def case(store: SimulatedStore, keys: DataKeys, ledger: Ledger, events: Events) -> None:
        store.put("p0@0.0/0")
        store.put("p1@0.0/0")
        await keys.sweep()
        keys.clear(["p1@0.0/0", None])
        running(ledger)
        await asyncio.sleep(1.0)
        await keys.last_sweep()
        assert (keys.orphans, events, [*store.held]) == (0, [], ["p0@0.0/0"])

    on_keys(case)


def test_what_a_live_attempt_has_is_owned_also_before_it_is_reported():
    async def case(store: SimulatedStore, keys: DataKeys, ledger: Ledger, events: Events) -> None:
        attempt, part = running(ledger)
        attempt.partial_tokens = {1: "p0@0.0/restored-1"}
        for key in (str(part.key), f"{part.key}-partial", "p0@0.0/restored-1", "p0@0.0/1"):
            store.put(key)
        assert await keys.unowned() == {"p0@0.0/1"}
        ended(part)
        assert await keys.unowned() == {"p0@0.0/0-partial", "p0@0.0/1"}
        attempt.lose(0)
        assert await keys.unowned() == {"p0@0.0/0", "p0@0.0/0-partial", "p0@0.0/1"}

    on_keys(case)


def test_lent_keys_are_owned_until_the_end_of_the_block_and_cleared_then():
    async def case(store: SimulatedStore, keys: DataKeys, ledger: Ledger, events: Events) -> None:
        lent = ["p0@0.0/0-partial", "eval-3/rollout-0-1"]
        for key in lent:
            store.put(key)
        with keys.lent(lent):
            await keys.sweep()
            await asyncio.sleep(1.0)
            await keys.sweep()
            assert [*store.held] == lent
        assert not store.held
        assert not events

    on_keys(case)


@pytest.mark.parametrize(
    ("key", "left_by"),
    [
        ("p0@0.0/0", "dropped: stale"),
        ("p0@0.0/1", "a worker that did not report it"),
        ("p1@0.0/0", "a worker that did not report it"),
        ("eval-3/rollout-0-1", "an eval"),
    ],
)
def test_the_event_says_what_left_an_orphan(key: str, left_by: str):
    async def case(store: SimulatedStore, keys: DataKeys, ledger: Ledger, events: Events) -> None:
        attempt, part = running(ledger)
        ended(part)
        keys.release(attempt, "dropped: stale")
        ledger.running.clear()
        store.put(key)
        await keys.last_sweep()
        (_, fields), (_, warning) = events
        assert fields == {"keys": 1, "first": key, "left_by": left_by}
        assert key in warning["message"]
        assert left_by in warning["message"]

    on_keys(case)


class WorkersStore(SimulatedStore):
    """What simulated workers put, as real data in a store."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__()
        self._store = store

    def put(self, key: str) -> None:
        segment = segment_of(np.arange(3), -np.ones(3), np.zeros(3, np.int64))
        self._store.hold(self._store.put(key, [trajectory_of([segment], BUILT_IN, reward=1.0)]))


class DriverDataHere(DriverData):
    """Without threads: the virtual clock has none."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store)
        self._here = store

    async def keys(self) -> list[str]:
        return self._here.keys()


def ran(store: LocalStore) -> tuple[int, Recorder]:
    """A small run whose data is in a real store; what its sweeps have found."""
    data: DataStore = DriverDataHere(store)

    async def main() -> tuple[int, Recorder]:
        recorder, times = Recorder(), worker_times()
        workers = [SimulatedWorker(f"rollout-{i}", 8, times, 0, store=WorkersStore(store)) for i in range(2)]
        trainer = SimulatedTrainer(TrainerTimes(train_s=lambda batch: 0.7))
        world = World(feed=NumberedFeed(), trainer=trainer, workers=workers, observers=[recorder], data=data)
        pipeline = Pipeline(settings("partial-rollout"), world)
        await pipeline.run()
        return pipeline.state.groups.data.orphans, recorder

    return run_virtual(main())


def test_a_run_leaves_nothing_in_its_store():
    store = LocalStore()
    orphans, recorder = ran(store)
    assert orphans == 0
    assert not store.keys()
    assert not recorder.named("orphans")
    assert store.traffic.sums["data_bytes_put"] > 0


def test_a_clear_that_is_left_out_is_counted_and_warned_of(monkeypatch: pytest.MonkeyPatch):
    release = DataKeys.release

    def release_but_the_first(keys: DataKeys, attempt: Attempt, end: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if attempt.prompt.uid == "p0":
                patch.setattr(keys, "clear", lambda found: None)
            release(keys, attempt, end)

    monkeypatch.setattr(DataKeys, "release", release_but_the_first)
    store = LocalStore()
    orphans, recorder = ran(store)
    assert orphans > 0
    assert sum(recorder.fields("orphans", "keys")) == orphans
    assert recorder.fields("orphans", "left_by") == ["trained"]
    assert recorder.fields("orphans", "first") == ["p0@0.0/0"]
    (warning,) = recorder.fields("warning", "message")
    assert "of the data store had no owner" in warning
    assert not store.keys(), "the sweep clears it"
