from __future__ import annotations

import asyncio

from asyncrl_cli.rollout.slot_gate import SlotGate


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
