"""Calls to a simulated executor: bounded, and failing in its name, as `job.calls` has them on Ray.

A call is a future that the executor's side resolves. Its time limit, if any, is a watcher's timer, which by itself keeps no virtual
clock going, until the executor hangs: then its limits are all that will happen, and they count as scheduled work.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from asyncrl_cli.errors import ExecutorLost
from asyncrl_cli.loop.signal import background


class Limit(NamedTuple):
    """`what` is called, in the words of an error; `until_s` is on the loop's clock, `key` the profile key of the `seconds`."""

    what: str
    seconds: float
    key: str
    until_s: float


class Calls:
    """The pending calls of one executor."""

    def __init__(self, executor: str) -> None:
        self.executor = executor
        self.is_hung = False
        self._death = ""
        self._loop = asyncio.get_running_loop()
        self._pending: dict[asyncio.Future[Any], tuple[Limit | None, asyncio.TimerHandle | None]] = {}

    def limit(self, what: str, seconds: float, key: str) -> Limit:
        return Limit(what, seconds, key, self._loop.time() + seconds)

    async def arrive(self, limit: Limit | None = None) -> None:
        """The call reaches its executor: returns at once, unless that is dead or hangs."""
        self.check()
        if self.is_hung:
            await self.answer(self.open(), limit)

    def check(self) -> None:
        """Raises ExecutorLost if the executor is dead."""
        if self._death:
            raise ExecutorLost(self._death)

    def open(self) -> asyncio.Future[Any]:
        """For the executor to `resolve`, and the caller to await in `answer`."""
        return self._loop.create_future()

    def resolve(self, future: asyncio.Future[Any], result: Any = None) -> None:
        if not (future.done() or self.is_hung):
            future.set_result(result)

    async def answer(self, future: asyncio.Future[Any], limit: Limit | None = None, *, is_quick: bool = False) -> Any:
        """The result, once resolved. Raises ExecutorLost. `is_quick`: known to be resolved in time unless the executor hangs."""
        if future.done():
            return future.result()
        timer = None if is_quick and not self.is_hung else self._guard(future, limit)
        self._pending[future] = limit, timer
        try:
            return await future
        finally:
            _, timer = self._pending.pop(future)
            if timer is not None:
                timer.cancel()

    async def sleep(self, seconds: float, limit: Limit) -> None:
        """The executor works for `seconds`."""
        if seconds <= 0:
            return
        future = self.open()
        timer = self._loop.call_later(seconds, self.resolve, future)
        try:
            await self.answer(future, limit, is_quick=self._loop.time() + seconds < limit.until_s)
        finally:
            timer.cancel()

    def die(self, message: str) -> None:
        """All pending calls fail, and so do all later ones."""
        self._death = message
        for future in list(self._pending):
            if not future.done():
                future.set_exception(ExecutorLost(message))

    def hang(self) -> None:
        """Nothing is resolved any more: the limits of all calls are work for the clock now."""
        self.is_hung = True
        for future, (limit, timer) in self._pending.items():
            if timer is not None:
                timer.cancel()
            self._pending[future] = limit, self._guard(future, limit)

    def _guard(self, future: asyncio.Future[Any], limit: Limit | None) -> asyncio.TimerHandle | None:
        if limit is None:
            return None
        if self.is_hung:
            return self._loop.call_at(limit.until_s, self._too_late, future, limit)
        with background():
            return self._loop.call_at(limit.until_s, self._too_late, future, limit)

    def _too_late(self, future: asyncio.Future[Any], limit: Limit) -> None:
        if not future.done():
            message = f"{self.executor} failed: {limit.what} took longer than {limit.key} = {limit.seconds:g} s"
            future.set_exception(ExecutorLost(message, hint=f"if it only needs longer, --set {limit.key}=..."))
