"""Stops the generation thread of a transformers engine, so that what a test asks of the engine finds
unfinished responses, however slow the event loop is."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine

DEADLINE_S = 200.0


@dataclass
class Stop:
    """The generation thread waits here until it is released, or until a load with the interrupt `until` waits
    for the thread."""

    released: threading.Event = field(default_factory=threading.Event)
    until: str = ""


class Brake:
    """`limits`: by version, how many tokens the engine has sampled when its thread stops, before it samples
    the next one."""

    def __init__(self, engine: TransformersEngine, limits: dict[int, int]) -> None:
        self._engine = engine
        self._limits = limits
        self._stops: queue.Queue[Stop] = queue.Queue()
        self._choose = engine.sampler.choose
        engine.sampler.choose = self._choose_when_released  # type: ignore[method-assign]

    @asynccontextmanager
    async def stopped(self, until: str = "") -> AsyncIterator[None]:
        """The thread has stopped when the block begins, and goes on at its end at the latest."""
        stop = await asyncio.to_thread(self._stops.get, timeout=DEADLINE_S)
        stop.until = until
        try:
            yield
        finally:
            stop.released.set()

    def _choose_when_released(self, *given: Any) -> torch.Tensor:
        sampler = self._engine.sampler
        if sampler.sampled_tokens >= self._limits.get(sampler.version, sys.maxsize):
            del self._limits[sampler.version]
            self._stops.put(stop := Stop())
            # a test that fails before it releases the thread leaves none behind
            ends_s = time.monotonic() + DEADLINE_S
            while (
                not (stop.released.is_set() or self._is_waited_for(stop.until)) and time.monotonic() < ends_s
            ):
                time.sleep(0.001)
        return self._choose(*given)

    def _is_waited_for(self, interrupt: str) -> bool:
        if interrupt == "drain":
            return not self._engine.gate.is_open
        return bool(interrupt) and self._engine.manager.background_thread_status.is_pause_requested()
