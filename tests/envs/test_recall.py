"""A rollout worker on a device of the trainer's gives it back: what runs there goes on in another worker,
with the tokens that it has."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.local_store import LocalStore

from asyncrl_cli.contracts.prompt_group import PartKey, PartRequest, PartResult
from asyncrl_cli.envs.group_runner import GroupRunner, PartDesk
from asyncrl_cli.job.rollout_host import RolloutHost
from asyncrl_cli.measure.meters import LongPoll, RolloutMeter
from asyncrl_cli.measure.states import State
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from tests.engines.brake import Brake
from tests.envs.test_group_runner import ITEM, KEY, LONG, Rewards, runner_of
from tests.waiting import until

REQUEST = PartRequest(key=PartKey(KEY, 0), item=ITEM, indices=(0, 2), seed=7)


class Host(RolloutHost):
    """The real one, with a runner that is given."""

    def __init__(self, runner: GroupRunner) -> None:
        self.forgot = 0
        self._profile, self._place = Profile(), ProcessPlace(model_dir="", is_lent=True)
        self._runner, self._engine, self._store = runner, runner.means.engine, LocalStore()
        self._partial, self._waiting, self._recalled, self._num_given = {}, {}, set(), 0
        self._changes = LongPoll()
        self._meter = RolloutMeter("rollout-1", 8, time.monotonic, self._changes.note)
        self._desk = PartDesk(self._metered, self._changes)
        self._loader: Any = SimpleNamespace(forget=self._forget)

    def _forget(self) -> None:
        self.forgot += 1

    async def ended(self) -> tuple[PartResult, Any]:
        """The next part that ends, and its trajectories."""
        taken: list[Any] = []
        await until(lambda: bool(taken.extend(self._desk.take(8)) or taken))
        ((result, stored),) = taken
        return result, self._store.get([stored])[0]


@pytest.mark.slow
async def test_a_recalled_part_is_elsewhere_what_it_would_have_been(model_dir: Path) -> None:
    async with runner_of(model_dir, Rewards(), sampling=LONG) as runner:
        undisturbed = Host(runner)
        await undisturbed.submit([REQUEST], {})
        _, expected = await undisturbed.ended()
    async with runner_of(model_dir, Rewards(), sampling=LONG) as runner:
        host, brake = Host(runner), Brake(runner.means.engine, {0: 40})
        await host.submit([REQUEST], {})
        async with brake.stopped():
            (found, (stored,)), payload = await host.pause(0, 1)
        assert host.forgot == 1
        assert host._meter._clock.state is State.PAUSED
        assert (runner.part_keys, host._desk.take(8), host._desk.freed_slots) == (set(), [], {})
    assert found.stopped == (REQUEST.key,)
    kept = found.responses[REQUEST.key]
    assert sum(one.tokens for one in kept.values()) >= 40
    key = PartKey(KEY, 1)
    keys = dict.fromkeys(kept, stored.key)
    again = PartRequest(key=key, item=ITEM, indices=(0, 2), seed=7, partial=kept, partial_tokens=keys)
    held = stored._replace(pieces=tuple(piece._replace(content=payload) for piece in stored.pieces))
    async with runner_of(model_dir, Rewards(), sampling=LONG) as runner:
        other = Host(runner)
        await other.submit([again], {stored.key: held})
        result, made = await other.ended()
        fresh = runner.means.engine.sampled_tokens
    assert result.key == key
    assert fresh == result.response_tokens - sum(one.tokens for one in kept.values())
    for ours, theirs in zip(made, expected, strict=True):
        ((mine,), (whole,)) = ours.segments(), theirs.segments()
        assert mine["tokens"].tolist() == whole["tokens"].tolist()


@pytest.mark.slow
async def test_a_part_that_has_not_begun_keeps_what_it_was_given(model_dir: Path) -> None:
    async with runner_of(model_dir, Rewards(), sampling=LONG) as runner:
        host, brake = Host(runner), Brake(runner.means.engine, {0: 40})
        await host.submit([REQUEST], {})
        async with brake.stopped():
            (found, (stored,)), payload = await host.pause(0, 1)
        held = stored._replace(pieces=tuple(piece._replace(content=payload) for piece in stored.pieces))
        kept, fetching = found.responses[REQUEST.key], asyncio.Event()
        asked = asyncio.get_running_loop()

        def get(stored: Any) -> Any:
            asked.call_soon_threadsafe(fetching.set)
            time.sleep(0.2)
            return LocalStore().get(stored)

        host._store = SimpleNamespace(get=get, put=host._store.put)  # type: ignore[assignment]
        again = PartRequest(
            key=PartKey(KEY, 1),
            item=ITEM,
            indices=(0, 2),
            seed=7,
            partial=kept,
            partial_tokens=dict.fromkeys(kept, stored.key),
        )
        await host.submit([again], {stored.key: held})
        await fetching.wait()
        (found, _), _ = await host.pause(0, 1)
        assert (found.stopped, found.responses, found.keys) == ((again.key,), {again.key: kept}, ())
        assert runner.means.engine.running == 0


@pytest.mark.slow
async def test_a_pause_stops_parts_whose_call_comes_after_it(model_dir: Path) -> None:
    async with runner_of(model_dir, Rewards(), sampling=LONG) as runner:
        host = Host(runner)
        pausing = asyncio.create_task(host.pause(1, 1))
        await asyncio.sleep(0)  # the pause begins
        await host.submit([REQUEST], {})
        (found, _), *_ = await pausing
        assert found.stopped == (REQUEST.key,)
        assert runner.part_keys == set()
