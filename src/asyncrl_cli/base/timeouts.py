"""`timeout`: `asyncio.timeout` for cleanup.

Until Python 3.11.2 (the version in Debian 12), `asyncio.timeout` raises CancelledError instead of
TimeoutError in a task that is being cancelled (python/cpython#102780). Cleanup would then stop at its first
late answer, and waits for the rest would never end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def timeout(delay_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Raises TimeoutError if the block takes longer than `delay_s`, even in a task that is being
    cancelled."""
    task = asyncio.current_task()
    assert task is not None
    limit, num_cancels = asyncio.timeout(delay_s), task.cancelling()
    try:
        async with limit:
            yield limit
    except asyncio.CancelledError as cancelled:
        if limit.expired() and task.cancelling() <= num_cancels:
            raise TimeoutError from cancelled
        raise
