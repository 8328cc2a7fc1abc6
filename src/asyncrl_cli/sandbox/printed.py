"""What child processes print: copied to a log at a bounded rate, so that no foreign code can fill a disk."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

CHUNK_BYTES, CHUNK_PAUSE_S = 2**16, 0.002
LOGGED_BYTES, LOGGED_BYTES_PER_S = 2**18, 2**14

logger = logging.getLogger(__name__)


def to_stderr(text: bytes) -> int:
    """Write to our standard error. Returns how many bytes it took: none if it is gone, so that no child waits
    for it."""
    try:
        return os.write(2, text)
    except OSError:
        return 0


def to_file(path: Path) -> Callable[[bytes], int]:
    """The same for a file, which is made when something is printed."""

    def write(text: bytes) -> int:
        try:
            with path.open("ab", buffering=0) as file:
                return file.write(text)
        except OSError:
            return 0

    return write


async def copy_output(printed: asyncio.StreamReader, write: Callable[[bytes], int], who: str) -> None:
    """Copy with `write`: LOGGED_BYTES at first, then LOGGED_BYTES_PER_S. The rest is dropped and counted.

    A process that prints faster than this reads has to wait, within the limits of its work.
    """
    clock = asyncio.get_running_loop().time
    budget, num_dropped, since_s = float(LOGGED_BYTES), 0, clock()
    while chunk := await printed.read(CHUNK_BYTES):
        budget, since_s = min(LOGGED_BYTES, budget + (clock() - since_s) * LOGGED_BYTES_PER_S), clock()
        num_shown = write(chunk[: max(0, int(budget))])
        budget -= num_shown
        if num_shown and num_dropped:
            logger.warning("left out %s bytes that %s have printed", f"{num_dropped:,}", who)
            num_dropped = 0
        num_dropped += len(chunk) - num_shown
        if len(chunk) == CHUNK_BYTES:
            await asyncio.sleep(CHUNK_PAUSE_S)
    if num_dropped:
        logger.warning("left out %s bytes that %s have printed", f"{num_dropped:,}", who)
