"""RewardPool: awaits rewards that child processes compute, so that no verifier can hold up the event loop.

    score() -> queue -> the child with the least to do -> frames of results -> the futures of score()

Requests leave the queue in the order in which they came, many in a frame where rewards are fast, one at a time where they are slow
(reward_child.py), so that a slow one holds up none that another child could compute.

Who waits for whom: `score` waits for its future, which a child's result resolves, or its death. A child whose reward has run longer
than the timeout is killed, and the rewards behind it go back to the head of the queue. So every `score` ends: with a reward, or
with RewardFailed.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.tasks.item import Item
from asyncrl_cli.tasks.reward_child import CannotScore, Request, RewardChildren, RewardFailed
from asyncrl_cli.tasks.reward_spec import RewardSpec

__all__ = ["RewardFailed", "RewardPool", "default_workers"]

MAX_DEFAULT_WORKERS = 4


def default_workers() -> int:
    """Half of the cores that this process may use, from one to four: generation has the others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_DEFAULT_WORKERS, cores // 2))


class RewardPool:
    """Scores responses in `workers` child processes. One event loop; any number of concurrent `score` calls."""

    def __init__(self, spec: RewardSpec, *, timeout_s: float, workers: int = 1) -> None:
        self._queue: deque[Request] = deque()
        self._children = [RewardChildren(spec, timeout_s, self._again, self._plan_dispatch) for _ in range(workers)]
        self._last_id = 0
        self._task: asyncio.Task[None] | None = None
        self._dispatch_planned = False
        self._broken = ""

    @property
    def child_pids(self) -> list[int]:
        """Of the processes that score right now."""
        return [children.pid for children in self._children if children.pid is not None]

    @property
    def num_restarts(self) -> int:
        return sum(children.num_deaths for children in self._children)

    async def start(self) -> None:
        """Start the children ahead of the first `score`, and learn whether they can score: ExecutorFailed if not."""
        task = self._begin()
        ready = [asyncio.ensure_future(children.ready.wait()) for children in self._children]
        try:
            await asyncio.wait([task, asyncio.gather(*ready)], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in ready:
                waiting.cancel()
        if self._broken:
            raise ExecutorFailed(f"rewards cannot start: {self._broken}")

    async def score(self, item: Item, response_text: str) -> float:
        """Raises RewardFailed when there is no reward."""
        self._begin()
        if self._broken:
            raise RewardFailed(self._broken)
        self._last_id += 1
        request = Request(self._last_id, item, response_text, asyncio.get_running_loop().create_future())
        self._queue.append(request)
        self._plan_dispatch()
        return await request.future

    async def close(self) -> None:
        """End the children; rewards still waited for fail."""
        self._broken = self._broken or "the reward pool is closed"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _begin(self) -> asyncio.Task[None]:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="rewards")
        return self._task

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for children in self._children:
                    tasks.create_task(children.run(), name="reward children")
        except* CannotScore as failures:
            self._broken = self._broken or str(failures.exceptions[0])
        finally:
            self._broken = self._broken or "the reward pool is closed"
            for request in (*self._queue, *(request for children in self._children for request in children.sent.values())):
                request.settle(self._broken)

    def _again(self, requests: list[Request]) -> None:
        """They were with a child that died, and came before whatever is in the queue."""
        self._queue.extendleft(reversed(requests))
        self._plan_dispatch()

    def _plan_dispatch(self) -> None:
        """Everything asked for, and every room made, in one turn of the event loop is dispatched together."""
        if not self._dispatch_planned:
            self._dispatch_planned = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_planned = False
        free = [children for children in self._children if children.room > 0]
        while self._queue and free:
            request = self._queue.popleft()
            if not request.future.done():  # cancelled
                least = min(free, key=lambda children: len(children.sent))
                least.accept(request)
                if least.room == 0:
                    free.remove(least)
        for children in self._children:
            children.flush()
