"""RewardPool: awaits rewards that child processes compute, so that no verifier can hold up the event loop.

    score() -> backlog -> a process with a free place -> its outcome
                  ^           |
                  +-----------+  the process has died: another one is asked, unless this reward was running in two that died

A process has one place for an ordinary reward, or 128 for async ones. If a reward runs longer than the
timeout, its process is killed. So every `score` ends: with a reward, or with RewardFailed.

Why not pebble: a pool on pebble 5.2 failed 10 of this pool's 60 tests. Killing an idle process breaks
pebble's pool for good. Its processes run one task at a time: 100 async rewards of 0.2 s took 20 s; here they
take 0.25 s. Processes started by a reward survive when it is killed. Each process imports the parent's main
module, which in a Ray worker is Ray (a start takes 2.3 s; here 0.8 s). loky and concurrent.futures have no
time limit for a task.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from itertools import count
from pathlib import Path
from typing import Any

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.reward_spec import Reward, RewardSpec
from asyncrl_cli.sandbox.reward_process import (
    Backlog,
    PendingReward,
    RewardFailed,
    RewardProcess,
    Rules,
    start_process,
)

MAX_DEFAULT_WORKERS = 4
MAX_IDLE_DEATHS = 4
"""After this many processes in a row died idle and without any result, no further one is started."""
CLOSED = "the reward pool is closed"


def default_workers() -> int:
    """Half of the cores that this process may use, from one to four: the others are for generation."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_DEFAULT_WORKERS, cores // 2))


class RewardPool:
    """Scores responses in `workers` child processes. One event loop; any number of concurrent `score`
    calls."""

    def __init__(
        self,
        spec: RewardSpec,
        *,
        timeout_s: float,
        workers: int = 1,
        block_s: float | None = None,
        log_path: Path | None = None,
    ) -> None:
        """`timeout_s`: limit of one reward. `block_s`: how long one may run without awaiting (default:
        `timeout_s`). `log_path`: the file for what rewards print (default: our standard error)."""
        self._log_path = log_path
        self._spec = spec
        self._rules = Rules(timeout_s=timeout_s, block_s=block_s or timeout_s, again=not spec.plays)
        self._num_workers = workers
        self._processes: set[RewardProcess] = set()
        self._backlog: Backlog = asyncio.PriorityQueue()
        self._numbers = count(1)
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._broken = ""
        self.num_restarts = 0

    @property
    def child_pids(self) -> list[int]:
        """Pids of the processes that are ready to score."""
        return [process.process.pid for process in self._processes]

    async def start(self) -> None:
        """Start the processes ahead of the first `score`. Raises ExecutorFailed if they cannot score."""
        self._begin()
        await self._ready.wait()
        if self._broken:
            raise ExecutorFailed(f"rewards cannot start: {self._broken}")

    async def score(self, item: Item, response_text: Any) -> Reward:
        """The reward of a response. Raises RewardFailed if there is none."""
        self._begin()
        number = next(self._numbers)
        try:
            request = pickle.dumps((number, item, response_text), protocol=5)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RewardFailed(f"the item cannot be sent to the reward process: {error}") from error
        wanted = PendingReward(number, request, asyncio.get_running_loop().create_future())
        self._backlog.put_nowait(wanted)
        if self._broken:
            self._fail_all()
        outcome = await wanted.outcome
        if isinstance(outcome, RewardFailed):
            raise RewardFailed(str(outcome), outcome.kind)  # several rewards may share one outcome
        return outcome

    async def close(self) -> None:
        """End the processes; pending rewards fail."""
        self._broken = self._broken or CLOSED
        self._begin().cancel()
        await asyncio.wait({self._begin()})

    def _begin(self) -> asyncio.Task[None]:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="rewards")
        return self._task

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._num_workers):
                    tasks.create_task(self._keep_process(), name="reward process")
        except* RewardFailed as failures:
            self._broken = self._broken or str(failures.exceptions[0])
        finally:
            self._broken = self._broken or CLOSED
            self._ready.set()
            self._fail_all()

    def _fail_all(self) -> None:
        while not self._backlog.empty():
            self._backlog.get_nowait().end(RewardFailed(self._broken, "unable"))

    async def _keep_process(self) -> None:
        """Keep one process running: start another when it dies. Raises RewardFailed if none starts, or if
        they keep dying."""
        num_idle_deaths = 0
        while True:
            process, died_idle = (
                await start_process(self._spec, self._rules, self._backlog, self._log_path),
                "",
            )
            try:
                places = await process.greeting()
                self._processes.add(process)
                if len(self._processes) == self._num_workers:
                    self._ready.set()
                await process.serve(places)
            finally:
                self._processes.discard(process)
                died_idle = await process.end()
            self.num_restarts += 1
            num_idle_deaths = num_idle_deaths + 1 if died_idle else 0
            if num_idle_deaths == MAX_IDLE_DEATHS:
                raise RewardFailed(
                    f"{MAX_IDLE_DEATHS} reward processes in a row died ({died_idle})", "unable"
                )
