"""Waiting for something that another thread or process does, in a test that runs on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Return once the condition holds. Raises TimeoutError if it does not within that time."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110  (nothing tells this loop of it)
            await asyncio.sleep(0.005)
