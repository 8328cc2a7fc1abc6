from __future__ import annotations

import asyncio

from asyncrl_cli.engines.transformers.slot_gate import SlotGate


def test_slots_are_given_first_come_first_served() -> None:
    async def body() -> None:
        running: list[int] = []
        gate = SlotGate(2, running.append)
        turns = [gate.enter() for _ in range(5)]
        assert [turn.done() for turn in turns] == [True, True, False, False, False]
        turns[2].cancel()
        gate.leave()
        assert [turn.done() for turn in turns] == [True, True, True, True, False]
        assert gate.running == 2
        assert max(running) == 2

    asyncio.run(body())


def test_a_closed_gate_lets_nobody_in_until_it_opens() -> None:
    async def body() -> None:
        gate = SlotGate(2, lambda running: None)
        gate.enter()
        gate.close()
        late = gate.enter()
        idle = asyncio.create_task(gate.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        gate.leave()
        await idle
        assert not late.done()
        gate.open()
        assert late.done()

    asyncio.run(body())


def test_who_gives_up_gets_no_slot_and_all_who_wait_for_idle_are_told() -> None:
    async def body() -> None:
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
        gate.give_up_all()
        assert not await third

    asyncio.run(body())
