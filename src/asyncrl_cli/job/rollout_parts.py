"""The parts of groups that run in a rollout worker, a task for each. Runs in the rollout actor, and needs no
Ray."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.prompt_group import PartKey, PartRequest, PartResult
from asyncrl_cli.contracts.trajectories import GroupPayload
from asyncrl_cli.measure.meters import LongPoll

logger = logging.getLogger(__name__)

PARTS_PER_ANSWER = 4
"""The most parts that one answer brings. Each has a Ray object for its arrays, which do not pass through the
driver. If more parts have ended, the next answer comes at once."""
CLOSE_S = 2.0
"""How long `PartDesk.close` waits for cancelled parts, whose tools may not end at once."""

EndedPart = tuple[PartResult, GroupPayload]
RunPart = Callable[[PartRequest, Callable[[int], None]], Awaitable[EndedPart]]


class PartDesk:
    """The parts that run here, a task for each. Call it from the event loop.

    `run(request, on_sequence)` runs a part. `changes` is notified of every change, urgently if no part runs
    any more.
    """

    def __init__(self, run: RunPart, changes: LongPoll) -> None:
        self._run = run
        self._changes = changes
        self.freed_slots: dict[PartKey, int] = {}
        """How many sequences of each running part have finished."""
        self._ended: deque[EndedPart] = deque()
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def close(self) -> None:
        """Cancel all parts: nobody asks for them any more, so their end is no failure."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    def begin(self, requests: Sequence[PartRequest]) -> None:
        for request in requests:
            task = asyncio.create_task(self._follow(request), name=f"part {request.key}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def take(self) -> list[EndedPart]:
        """Return the parts that ended first, at most `PARTS_PER_ANSWER`. With none left, raise the first
        error of any part: such an error is the engine's, not the part's.

        If more is left to take, notes an urgent change, so that the next answer comes at once.
        """
        if self._failure is not None and not self._ended:
            raise self._failure
        taken = [self._ended.popleft() for _ in range(min(PARTS_PER_ANSWER, len(self._ended)))]
        if self._ended or self._failure is not None:
            self._changes.note(is_urgent=True)
        return taken

    async def _follow(self, request: PartRequest) -> None:
        self.freed_slots[request.key] = 0

        def on_sequence(finished: int) -> None:
            self.freed_slots[request.key] = finished
            self._changes.note()

        try:
            self._ended.append(await self._run(request, on_sequence))
        except (Exception, asyncio.CancelledError) as error:  # `take` raises it
            if self._is_closed:
                return
            logger.exception("part %s failed", request.key)
            if not isinstance(error, Exception):
                error = ExecutorFailed(f"part {request.key} was cancelled")
            self._failure = self._failure or error
        finally:
            del self.freed_slots[request.key]
            self._changes.note(is_urgent=not self.freed_slots)
