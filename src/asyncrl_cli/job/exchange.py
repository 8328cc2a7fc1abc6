"""Sends parts of groups to a rollout actor and brings their results back, several per call.

    driver   submit(request) ─> outgoing ──┐                             ┌──> `progress` returns, with the parts that ended
    calls                                  ├─ exchange(requests, seen) ──┤
    actor    PartDesk: a task per part <───┘          ended, reports ────┘    (a change; 100 ms after the last answer)

A call to an actor costs the driver and the actor a millisecond or two of CPU each. With short responses or
many workers, a separate call per part would be most of the driver's work. So the loop's long poll for
progress also carries new parts to the worker, and ended ones back: several at once while others run, and a
worker's last one without delay. Requests that are made while a poll is under way are sent in a separate call
(`post`).

Who waits for whom: `progress` for a change on the worker, for a second at most. `submit` waits for nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.ports import Progress
from asyncrl_cli.contracts.prompt_group import PartKey, PartRequest, PartResult
from asyncrl_cli.contracts.trajectories import GroupPayload
from asyncrl_cli.measure.meters import LongPoll

PARTS_PER_ANSWER = 4
"""The most parts that one answer brings. Each has a Ray object for its arrays, which do not pass through the
driver. If more parts have ended, the next answer comes at once."""
CLOSE_S = 2.0
"""How long `PartDesk.close` waits for cancelled parts, whose tools may not end at once."""
SETTLE_S = 0.002
"""How long an exchange waits before it is sent, for new requests that the last answer has made room for."""

logger = logging.getLogger(__name__)

Ended = tuple[PartResult, GroupPayload]
Run = Callable[[PartRequest, Callable[[int], None]], Awaitable[Ended]]
Answer = Callable[[Any, str], Awaitable[Any]]


class PartDesk:
    """The actor's side: a task per part. Call it from the event loop.

    `run(request, on_sequence)` runs a part. `changes` is notified of every change, urgently if no part runs
    any more.
    """

    def __init__(self, run: Run, changes: LongPoll) -> None:
        self._run = run
        self._changes = changes
        self.freed_slots: dict[PartKey, int] = {}
        """How many sequences of each running part have finished."""
        self._ended: deque[Ended] = deque()
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

    def take(self) -> list[Ended]:
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


class PartExchange:
    """The driver's side, for one life of a worker's process.

    `answer(pending, call)` awaits the actor's answer within a limit, and raises as `job.calls.answer` does. A
    cancelled `progress` loses the parts that it would have brought.
    """

    def __init__(self, actor: Any, answer: Answer) -> None:
        self._actor = actor
        self._answer = answer
        self._outgoing: list[PartRequest] = []
        self._is_under_way = False
        self._ran_s: dict[int, float] = {}
        """When sequences were last seen running, by the version that the worker held. On the event loop's
        clock."""

    def ran_before_s(self, version: int) -> float:
        """When sequences were last seen running on weights older than `version`; -inf if never."""
        return max((ran_s for held, ran_s in self._ran_s.items() if held < version), default=float("-inf"))

    def submit(self, request: PartRequest) -> None:
        """Send the part with the next exchange; if one is under way, in a separate call with all others of
        this turn."""
        self._outgoing.append(request)
        if self._is_under_way and len(self._outgoing) == 1:
            asyncio.get_running_loop().call_soon(self.post)

    def post(self) -> None:
        """Send the waiting requests in a separate call, not awaited: if it fails, the exchange under way
        fails, too."""
        if self._outgoing:
            self._actor.submit.remote(self._taken())

    async def progress(self, seen: int) -> Progress:
        """Exchange parts and wait for a change since `seen`. `PartResult.payload` is the ObjectRef of the
        part's arrays."""
        await asyncio.sleep(SETTLE_S)
        head, *payloads = self._actor.exchange.remote(self._taken(), seen)
        self._is_under_way = True
        try:
            progress: Progress = await self._answer(head, "a progress report")
        finally:
            self._is_under_way = False
        for report in progress.reports:
            if report.gauges.get("running_sequences"):
                self._ran_s[int(report.gauges["version"])] = asyncio.get_running_loop().time()
        with_arrays = zip(progress.ended, payloads, strict=False)  # the rest are None
        return replace(
            progress, ended=tuple(replace(result, payload=payload) for result, payload in with_arrays)
        )

    def _taken(self) -> list[PartRequest]:
        taken, self._outgoing = self._outgoing, []
        return taken
