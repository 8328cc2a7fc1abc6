"""RewardPool: awaits rewards that child processes compute, so that no verifier can hold up the event loop.

    score() -> queue -> the process with the least to do -> its result -> the future of score()

A process has one ordinary reward at a time, or up to 128 async ones. A reward that runs longer than the timeout is killed with its
process. So every `score` ends: with a reward, or with RewardFailed.

Why not pebble, loky or concurrent.futures: none runs async rewards together, ends what a reward has forked, or tells which of
several rewards killed their process.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from itertools import count

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.tasks.item import Item
from asyncrl_cli.tasks.reward_process import CannotScore, Request, RewardFailed, RewardProcess
from asyncrl_cli.tasks.scoring import RewardSpec

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
        self._processes = [RewardProcess(spec, timeout_s, self._again, self._dispatch) for _ in range(workers)]
        self._ids = count(1)
        self._task: asyncio.Task[None] | None = None
        self._broken = ""

    @property
    def child_pids(self) -> list[int]:
        """Of the processes that score right now."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def num_restarts(self) -> int:
        return sum(process.num_deaths for process in self._processes)

    async def start(self) -> None:
        """Start the processes ahead of the first `score`, and learn whether they can score: ExecutorFailed if not."""
        task = self._begin()
        ready = [asyncio.ensure_future(process.ready.wait()) for process in self._processes]
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
        request = Request(next(self._ids), item, response_text, asyncio.get_running_loop().create_future())
        self._queue.append(request)
        self._dispatch()
        return await request.future

    async def close(self) -> None:
        """End the processes; rewards still waited for fail."""
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
                for process in self._processes:
                    tasks.create_task(process.run(), name="reward process")
        except* CannotScore as failures:
            self._broken = self._broken or str(failures.exceptions[0])
        finally:
            self._broken = self._broken or "the reward pool is closed"
            for request in (*self._queue, *(request for process in self._processes for request in process.sent.values())):
                request.settle(self._broken)

    def _again(self, requests: list[Request]) -> None:
        """They were with a process that died, and came before whatever is in the queue."""
        self._queue.extendleft(reversed(requests))
        self._dispatch()

    def _dispatch(self) -> None:
        while self._queue and (free := [process for process in self._processes if process.has_room]):
            request = self._queue.popleft()
            if not request.future.done():  # cancelled
                min(free, key=lambda process: len(process.sent)).send(request)
