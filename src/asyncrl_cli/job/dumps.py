"""Dumps of samples beside training. A dump that fails loses its samples, not the step: people are warned of the first, and all are
counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl_cli.errors import AsyncrlError

logger = logging.getLogger(__name__)


class SampleDumps:
    """One dump at a time: the next waits for the last, so that every failure is seen. `warn` tells people; by default it logs."""

    def __init__(self) -> None:
        self.warn: Callable[[str], None] = logger.warning
        self.num_failed = 0
        self._step = 0
        self._dumping: asyncio.Task[None] | None = None

    async def begin(self, step: int, dump: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`dump()` writes one, and has a time limit of its own."""
        await self.finish()
        self._step, self._dumping = step, asyncio.create_task(dump(), name=f"samples of step {step}")

    async def finish(self) -> None:
        """Waits for the last dump."""
        dumping, self._dumping = self._dumping, None
        if dumping is None:
            return
        try:
            await dumping
        except AsyncrlError as error:
            self.num_failed += 1
            logger.warning("the samples of step %d are lost: %s", self._step, error)
            if self.num_failed == 1:
                self.warn(f"the samples of step {self._step} are lost, training goes on: {error} (later ones are only counted)")
