"""Measures how many timer events the virtual clock fires per second of CPU time, with 1,000 tasks that only
sleep.

python benchmarks/virtual_clock.py
"""

from __future__ import annotations

import asyncio
import statistics
import time

from asyncrl_cli.simulate.world import run_virtual

TASKS, SLEEPS, RUNS = 1000, 200, 5


async def _sleeper(period_s: float) -> None:
    for _ in range(SLEEPS):
        await asyncio.sleep(period_s)


async def _ping_pong() -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(TASKS):
            tasks.create_task(_sleeper(1.0 + number / TASKS))


def _events_per_s() -> float:
    began_s = time.process_time()
    run_virtual(_ping_pong())
    return TASKS * SLEEPS / (time.process_time() - began_s)


def main() -> None:
    rates = [_events_per_s() for _ in range(RUNS)]
    spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
    print(f"{statistics.median(rates):,.0f} timer events per CPU second (median of {RUNS}; {spread})")


if __name__ == "__main__":
    main()
