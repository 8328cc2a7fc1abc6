"""Groups to a rollout actor, and what has become of them back: many of them in one call.

    driver   generate(request) ─> outgoing ──┐                             ┌──> results, by key; `progress` returns
    calls                                    ├─ exchange(requests, seen) ──┤
    actor    GroupDesk: a task per group <───┘          ended, reports ────┘    (a change; 100 ms after the last answer)

A call to an actor costs driver and actor a millisecond or two of CPU each. A call per group, and others for the progress of all,
are most of what the driver has to do where groups are short or workers many. So the loop's long poll for progress takes new
groups along, and brings ended ones: several at once while others run, and the last one of a worker without delay. Requests
that come up while it is under way are sent by themselves.

Who waits for whom: `progress` for a change on the worker, a second at most; `generate` for a `progress` that brings its group,
however long that takes.
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
"""Groups that one answer brings at most: each has an object of its own for its arrays, which never pass the driver. Where more
have ended, the next answer comes at once."""
SETTLE_S = 0.002
"""How long an exchange waits for the requests that the last one's answer has made room for."""

logger = logging.getLogger(__name__)

Run = Callable[[GroupRequest, Callable[[int], None]], Awaitable[tuple[GroupResult, GroupPayload]]]
Ended = tuple[GroupResult, GroupPayload]
Head = tuple[Progress, tuple[GroupResult, ...]]
"""An answer's first object; the others are the payloads of its groups, in their order, and None for the rest."""
Answer = Callable[[Any, str], Awaitable[Any]]


class GroupDesk:
    """The actor's side. Call it from the event loop.

    `run(request, on_sequence)` runs a group; `changes` notes whatever is new to tell, as urgent once no group runs.
    """

    def __init__(self, run: Run, changes: LongPoll) -> None:
        self._run = run
        self._changes = changes
        self.finished_sequences: dict[AttemptKey, int] = {}
        """Of each running group."""
        self._ended: deque[Ended] = deque()
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            task = asyncio.create_task(self._follow(request), name=f"group {request.key}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def take(self) -> list[Ended]:
        """The groups that ended first. Then raises what any group has raised: no group fails alone, it is the engine that did.

        Where it leaves something to take, it notes that as a change.
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
        except (Exception, asyncio.CancelledError) as error:  # told by an answer
            logger.exception("group %s failed", request.key)
            if not isinstance(error, Exception):
                error = ExecutorFailed(f"group {request.key} was cancelled")
            self._failure = self._failure or error
        finally:
            del self.finished_sequences[request.key]
            self._changes.note(is_urgent=not self.finished_sequences)


class GroupExchange:
    """The driver's side, for one life of a worker's process.

    `answer(pending, call)` awaits what the actor returns, bounded, and raises as `job.calls.answer` does. Every `generate` needs a
    `progress` under way, now and later. Groups that a cancelled `progress` would have brought are lost: cancel it with all of them.
    """

    def __init__(self, actor: Any, answer: Answer) -> None:
        self._actor = actor
        self._answer = answer
        self._outgoing: list[GroupRequest] = []
        self._waiting: dict[AttemptKey, asyncio.Future[GroupResult]] = {}
        self._is_under_way = False
        self._ran_s: dict[int, float] = {}
        """When sequences were last seen to run, by the version that the worker held."""

    def ran_before_s(self, version: int) -> float:
        """When sequences were last seen to run on older weights."""
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
        """Send by themselves the requests that no exchange takes along. Should it fail, the exchange under way does, too."""
        if self._outgoing:
            self._actor.submit.remote(self._taken())

    async def progress(self, seen: int) -> Progress:
        """What it raises, every `generate` raises then."""
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
