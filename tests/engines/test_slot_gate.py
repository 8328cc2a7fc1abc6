from __future__ import annotations

import asyncio

from asyncrl_cli.engines.slotted_engine import SlotGate


async def test_slots_are_given_first_come_first_served() -> None:
    running: list[int] = []
    gate = SlotGate(2, running.append)
    turns = [asyncio.create_task(gate.entered(name)) for name in "abcde"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [turn.done() for turn in turns] == [True, True, False, False, False]
    turns[2].cancel()
    await asyncio.sleep(0)
    gate.leave()
    assert await turns[3]
    assert not turns[4].done()
    assert gate.running == 2
    assert max(running) == 2
    gate.give_up("e")
    assert not await turns[4]


async def test_who_is_cancelled_just_when_let_in_gives_the_slot_back() -> None:
    gate = SlotGate(1, lambda running: None)
    assert await gate.entered("first")
    second = asyncio.create_task(gate.entered("second"))
    await asyncio.sleep(0)
    gate.leave()
    second.cancel()
    await asyncio.wait([second])
    assert second.cancelled()
    assert gate.running == 0


async def test_a_closed_gate_lets_nobody_in_until_it_opens() -> None:
    gate = SlotGate(2, lambda running: None)
    assert await gate.entered("early")
    gate.close()
    late = asyncio.create_task(gate.entered("late"))
    idle = asyncio.create_task(gate.idle())
    await asyncio.sleep(0)
    assert not idle.done()
    gate.leave()
    await idle
    assert not late.done()
    gate.open()
    assert await late


async def test_who_gives_up_gets_no_slot_and_all_who_wait_for_idle_are_told() -> None:
    gate = SlotGate(1, lambda running: None)
    assert await gate.entered("first")
    second, third = (asyncio.create_task(gate.entered(name)) for name in ("second", "third"))
    await asyncio.sleep(0)
    gate.give_up("second")
    gate.give_up("unknown")
    assert not await second
    gate.close()
    waiters = [asyncio.create_task(gate.idle()) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    gate.leave()
    await asyncio.gather(*waiters[1:])
    gate.give_up("third")
    assert not await third
