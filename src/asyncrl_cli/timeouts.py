"""`timeout`: `asyncio.timeout` for cleanup.

Until Python 3.11.2, which Debian 12 has, `asyncio.timeout` ends with CancelledError instead of TimeoutError in a task that is being
cancelled (python/cpython#102780). Cleanup would stop at its first late answer, and whoever waits for the rest would wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def timeout(delay_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Raises TimeoutError if the block takes longer than `delay_s`, also in a task that is being cancelled."""
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
