"""Slots of trajectories of several turns, on a virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl_cli.envs.slots import Slots, TrajectorySlot
from asyncrl_cli.simulate.world import run_virtual


async def play(places, name, log, *, turn_s=1.0, tool_s=5.0, turns=2):
    """Begins, ends and pauses as an episode does; logs when each turn begins."""
    place, loop = TrajectorySlot(places), asyncio.get_running_loop()
    try:
        for turn in range(turns):
            await place.take()
            log.append((loop.time(), f"{name}{turn}"))
            await asyncio.sleep(turn_s)
            if turn + 1 < turns:
                place.pause()
                await asyncio.sleep(tool_s)
    finally:
        place.leave()


def begun(hold, *names, after=None):
    log = []

    async def main():
        places = Slots(1, hold=hold)
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(play(places, name, log))
            if after is not None:
                tasks.create_task(after(places, log))

    run_virtual(main())
    return log


def test_a_held_place_is_nobody_elses_during_a_tool():
    assert begun(True, "a", "b") == [(0, "a0"), (6, "a1"), (7, "b0"), (13, "b1")]


def test_a_place_that_is_not_held_is_used_meanwhile_and_those_who_go_on_come_before_those_who_begin():
    assert begun(False, *"abcdefg") == [
        *[(0, "a0"), (1, "b0"), (2, "c0"), (3, "d0"), (4, "e0"), (5, "f0")],
        *[(6, "a1"), (7, "b1"), (8, "c1"), (9, "d1"), (10, "e1"), (11, "f1"), (12, "g0"), (18, "g1")],
    ]


@pytest.mark.parametrize("hold", [True, False])
def test_a_drain_lets_those_who_have_begun_go_on_and_nobody_else_begin(hold):
    async def drain(places, log):
        await asyncio.sleep(0.5)
        async with places.drained():
            log.append((asyncio.get_running_loop().time(), "drained"))
            await asyncio.sleep(2)

    assert begun(hold, "a", "b", after=drain) == [(0, "a0"), (6, "a1"), (7, "drained"), (9, "b0"), (15, "b1")]


def test_a_place_that_came_too_late_goes_to_the_next():
    async def main():
        places = Slots(1, hold=True)
        first, second, third = TrajectorySlot(places), TrajectorySlot(places), TrajectorySlot(places)
        await first.take()
        late = asyncio.create_task(second.take())
        await asyncio.sleep(0)
        first.leave()  # hands the place to the second, whose task has not noticed yet
        late.cancel()
        await asyncio.wait([late])
        async with asyncio.timeout(1):
            await third.take()
            third.leave()
            async with places.drained():
                return late.cancelled()

    assert run_virtual(main())
