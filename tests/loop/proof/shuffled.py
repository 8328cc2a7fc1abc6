"""A virtual clock that runs ready callbacks in a random order, which its seed repeats.

asyncio promises little about the order of callbacks: this finds code that relies on more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from asyncrl_cli.simulate.world import VirtualTimeLoop


class ShuffledLoop(VirtualTimeLoop):
    """For every callback that gets ready it asks the stock loop for one turn, and gives that to any of those
    that wait for one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._waiting: list[tuple[asyncio.Handle, Callable[[], object]]] = []

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        run = partial((context or copy_context()).run, callback, *args)
        self._waiting.append((handle, run))
        super().call_soon(self._run_any)
        return handle

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, partial(self.call_soon, callback, *args, context=context))

    def _run_any(self) -> None:
        waiting = self._waiting
        chosen = int(self._random.random() * len(waiting))
        waiting[chosen], waiting[-1] = waiting[-1], waiting[chosen]
        handle, run = waiting.pop()
        if not handle.cancelled():
            run()


def loop_of(seed: int | None) -> Callable[[], VirtualTimeLoop]:
    """For `run_virtual`; None is the order of arrival."""
    return VirtualTimeLoop if seed is None else partial(ShuffledLoop, seed)
