"""Sends groups to a rollout actor and brings their results back, several per call.

    driver   generate(request) ─> outgoing ──┐                             ┌──> results, by key; `progress` returns
    calls                                    ├─ exchange(requests, seen) ──┤
    actor    GroupDesk: a task per group <───┘          ended, reports ────┘    (a change; 100 ms after the last answer)

A call to an actor costs the driver and the actor a millisecond or two of CPU each. With short groups or many workers, a call per
group besides the calls for progress would be most of the driver's work. So the loop's long poll for progress also carries new
groups to the worker, and ended ones back: several at once while others run, and a worker's last one without delay. Requests
that are made while a poll is under way are sent in a call of their own (`submit`).

Who waits for whom: `progress` for a change on the worker, for a second at most; `generate` for the `progress` that brings its
group, without a limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from asyncrl_cli.errors import AsyncrlError, ExecutorFailed
from asyncrl_cli.loop.attempts import AttemptKey, GroupResult
from asyncrl_cli.loop.meters import LongPoll
from asyncrl_cli.loop.ports import GroupRequest, Progress
from asyncrl_cli.samples import GroupPayload

GROUPS_PER_ANSWER = 4
"""The most groups that one answer brings. Each has a Ray object for its arrays, which do not pass through the driver. If more
groups have ended, the next answer comes at once."""
SETTLE_S = 0.002
"""How long an exchange waits before it is sent, for new requests that the last answer has made room for."""

logger = logging.getLogger(__name__)

Run = Callable[[GroupRequest, Callable[[int], None]], Awaitable[tuple[GroupResult, GroupPayload]]]
Ended = tuple[GroupResult, GroupPayload]
Head = tuple[Progress, tuple[GroupResult, ...]]
"""The first object of an answer. The other objects are the payloads of its results, in their order, and then Nones."""
Answer = Callable[[Any, str], Awaitable[Any]]


class GroupDesk:
    """The actor's side: a task per group. Call it from the event loop.

    `run(request, on_sequence)` runs a group. `changes` is notified of every change, urgently if no group runs any more.
    """

    def __init__(self, run: Run, changes: LongPoll) -> None:
        self._run = run
        self._changes = changes
        self.finished_sequences: dict[AttemptKey, int] = {}
        """How many sequences of each running group have finished."""
        self._ended: deque[Ended] = deque()
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            task = asyncio.create_task(self._follow(request), name=f"group {request.key}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def take(self) -> list[Ended]:
        """Return the groups that ended first, at most `GROUPS_PER_ANSWER`. With none left, raise the first error of any group: such
        an error is the engine's, not the group's.

        If more is left to take, notes an urgent change, so that the next answer comes at once.
        """
        if self._failure is not None and not self._ended:
            raise self._failure
        taken = [self._ended.popleft() for _ in range(min(GROUPS_PER_ANSWER, len(self._ended)))]
        if self._ended or self._failure is not None:
            self._changes.note(is_urgent=True)
        return taken

    async def _follow(self, request: GroupRequest) -> None:
        self.finished_sequences[request.key] = 0

        def on_sequence(finished: int) -> None:
            self.finished_sequences[request.key] = finished
            self._changes.note()

        try:
            self._ended.append(await self._run(request, on_sequence))
        except (Exception, asyncio.CancelledError) as error:  # `take` raises it
            logger.exception("group %s failed", request.key)
            if not isinstance(error, Exception):
                error = ExecutorFailed(f"group {request.key} was cancelled")
            self._failure = self._failure or error
        finally:
            del self.finished_sequences[request.key]
            self._changes.note(is_urgent=not self.finished_sequences)


class GroupExchange:
    """The driver's side, for one life of a worker's process.

    `answer(pending, call)` awaits the actor's answer within a limit, and raises as `job.calls.answer` does. A `generate` ends only
    if `progress` is called again and again. A cancelled `progress` loses the groups that it would have brought: cancel every
    `generate` with it.
    """

    def __init__(self, actor: Any, answer: Answer) -> None:
        self._actor = actor
        self._answer = answer
        self._outgoing: list[GroupRequest] = []
        self._waiting: dict[AttemptKey, asyncio.Future[GroupResult]] = {}
        self._is_under_way = False
        self._ran_s: dict[int, float] = {}
        """When sequences were last seen running, by the version that the worker held. On the event loop's clock."""

    def ran_before_s(self, version: int) -> float:
        """When sequences were last seen running on weights older than `version`; -inf if never."""
        return max((ran_s for held, ran_s in self._ran_s.items() if held < version), default=float("-inf"))

    async def generate(self, request: GroupRequest) -> GroupResult:
        """`GroupResult.payload` is the ObjectRef of the group's arrays."""
        loop = asyncio.get_running_loop()
        future = self._waiting[request.key] = loop.create_future()
        self._outgoing.append(request)
        if self._is_under_way and len(self._outgoing) == 1:
            loop.call_soon(self.post)
        try:
            return await future
        finally:
            self._waiting.pop(request.key, None)

    def post(self) -> None:
        """Send the waiting requests in a call of their own, not awaited: if it fails, the exchange under way fails, too."""
        if self._outgoing:
            self._actor.submit.remote(self._taken())

    async def progress(self, seen: int) -> Progress:
        """Exchange groups and wait for a change since `seen`. An AsyncrlError is also raised by every waiting `generate`."""
        await asyncio.sleep(SETTLE_S)
        head, *payloads = self._actor.exchange.remote(self._taken(), seen)
        self._is_under_way = True
        try:
            progress, results = await self._answer(head, "a progress report")
        except AsyncrlError as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)
            self._waiting.clear()
            raise
        finally:
            self._is_under_way = False
        for result, payload in zip(results, payloads, strict=False):  # the rest are None
            future = self._waiting.pop(result.key, None)
            if future is not None and not future.done():
                future.set_result(replace(result, payload=payload))
        for report in progress.reports:
            if report.gauges.get("running_sequences"):
                self._ran_s[int(report.gauges["version"])] = asyncio.get_running_loop().time()
        return progress

    def _taken(self) -> list[GroupRequest]:
        taken, self._outgoing = self._outgoing, []
        return taken
