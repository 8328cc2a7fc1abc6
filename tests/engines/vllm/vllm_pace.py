"""Keeps a vLLM engine's processes from running ahead of the event loop that asks them.

While the loop turns, it beats: it counts up in a file. The processes go on for a few passes without a beat,
then they wait for one. So a response cannot end because the loop was late to ask for something else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

BEAT_S = 0.002
PASSES_AHEAD = 4
NO_LOOP_S = 60.0
"""After that long without a beat the processes go on, so that the test fails and does not hang."""


class Paced:
    """vLLM mixes it into its worker class (`worker_extension_cls`)."""

    def keep_pace(self, path: str) -> None:
        worker: Any = self
        beats, execute, last, passes = np.memmap(path, dtype=np.int64, mode="r"), worker.execute_model, -1, 0

        def execute_model(*args: Any, **options: Any) -> Any:
            nonlocal last, passes
            ends_s = time.monotonic() + NO_LOOP_S
            while passes >= PASSES_AHEAD and beats[0] == last and time.monotonic() < ends_s:
                time.sleep(BEAT_S / 4)
            last, passes = (last, passes + 1) if beats[0] == last else (int(beats[0]), 0)
            return execute(*args, **options)

        worker.execute_model = execute_model


@asynccontextmanager
async def beating(path: Path) -> AsyncIterator[None]:
    """The event loop beats while the block runs."""
    beats = np.memmap(path, dtype=np.int64, mode="r+")

    async def beat() -> None:
        while True:
            beats[0] += 1
            await asyncio.sleep(BEAT_S)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
