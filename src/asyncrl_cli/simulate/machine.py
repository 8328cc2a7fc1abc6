"""A machine that trainer and rollout workers share: each is slower while the other works."""

from __future__ import annotations

import asyncio

from asyncrl_cli.simulate.decoding import SimulatedEngine


class SharedMachine:
    """`generation_ratio`: how much longer decoding takes while the trainer computes (0.2 is 20%); `training_ratio`: how much
    longer the trainer takes while all engines generate, and a share of that while only some do."""

    def __init__(self, *, generation_ratio: float = 0.0, training_ratio: float = 0.0) -> None:
        self._generation_ratio = generation_ratio
        self._training_ratio = training_ratio
        self._engines: list[SimulatedEngine] = []
        self._num_generating = 0
        self._changed = asyncio.Event()
        self._slowdown = 1.0

    def add(self, engine: SimulatedEngine) -> None:
        self._engines.append(engine)
        engine.slow_down(self._slowdown)

    def remove(self, engine: SimulatedEngine) -> None:
        self._engines.remove(engine)

    def generating(self, change: int) -> None:
        """An engine has begun (+1) or stopped (-1) to generate."""
        self._num_generating += change
        if self._training_ratio:
            self._changed.set()

    async def compute(self, seconds: float) -> float:
        """The trainer computes what takes `seconds` on a machine of its own. Returns the seconds it took."""
        began_s = asyncio.get_running_loop().time()
        self._slow_engines(1 + self._generation_ratio)
        try:
            while seconds > 0:
                seconds = await self._compute_until_change(seconds)
        finally:
            self._slow_engines(1.0)
        return asyncio.get_running_loop().time() - began_s

    async def _compute_until_change(self, seconds: float) -> float:
        """Returns what is left to compute."""
        loop = asyncio.get_running_loop()
        share = self._num_generating / len(self._engines) if self._engines else 0.0
        factor, began_s = 1 + self._training_ratio * share, loop.time()
        self._changed.clear()
        timer = loop.call_later(seconds * factor, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()
        is_done = loop.time() >= timer.when()
        return 0.0 if is_done else seconds - (loop.time() - began_s) / factor

    def _slow_engines(self, slowdown: float) -> None:
        self._slowdown = slowdown
        if self._generation_ratio:
            for engine in self._engines:
                engine.slow_down(slowdown)
