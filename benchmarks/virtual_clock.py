"""How many timer events the virtual clock fires per second of CPU time: 1,000 tasks that only sleep.

python benchmarks/virtual_clock.py
"""

from __future__ import annotations

import asyncio
import statistics
import time

from asyncrl_cli.simulate.clock import VirtualTimeLoop, run_virtual

TASKS, SLEEPS, RUNS = 1000, 200, 5


async def _sleeper(period_s: float) -> None:
    for _ in range(SLEEPS):
        await asyncio.sleep(period_s)


async def _ping_pong() -> int:
    async with asyncio.TaskGroup() as tasks:
        for number in range(TASKS):
            tasks.create_task(_sleeper(1.0 + number / TASKS))
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop.timer_events


def _events_per_s(shuffle_seed: int | None) -> float:
    began_s = time.process_time()
    timer_events = run_virtual(_ping_pong(), shuffle_seed=shuffle_seed)
    return timer_events / (time.process_time() - began_s)


def main() -> None:
    for name, shuffle_seed in (("in order", None), ("shuffled", 1)):
        rates = [_events_per_s(shuffle_seed) for _ in range(RUNS)]
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(f"{name}: {statistics.median(rates):,.0f} timer events per CPU second (median of {RUNS}; {spread})")


if __name__ == "__main__":
    main()
