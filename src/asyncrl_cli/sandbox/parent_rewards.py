"""RewardPool: awaits rewards that processes compute, so that no verifier can hold up the event loop.

    score() -> backlog -> a process with a free place -> its outcome
                  ^           |
                  +-----------+  the process has died: another one is asked, unless this reward was running
                                 in two that died

A process has one place for an ordinary reward, or 128 for async ones. If a reward runs longer than the
timeout, its process is killed. So every `score` ends: with a reward, or with RewardFailed.

Why not pebble: killing an idle process breaks its pool for good, its processes run one task at a time, what
a reward has started survives it, and each imports Ray. loky and concurrent.futures have no time limits.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from asyncrl_cli.base.child_process import send
from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.environment import Reward, RewardSpec
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.sandbox.child_rewards import IDLE, RewardServer, RunningMark
from asyncrl_cli.sandbox.parent_processes import Process, ProcessEnded, Processes, UnreadableAnswer

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 2.0
MAX_WATCH_PERIOD_S = 0.25
MAX_DEFAULT_WORKERS = 4
MAX_DEATHS_OF_REWARD = 2
"""A reward fails if this many processes died while computing it. A single death may have another cause."""
MAX_IDLE_DEATHS = 4
"""After this many processes in a row died idle and without any result, no further one is started."""
CLOSED = "the reward pool is closed"


class RewardFailed(Exception):
    """This response has no reward; `str(error)` says why. `kind`: "raised" (also if the reward is not a
    finite number), "timed-out", "blocked", "died"; "lost": its process died because of another reward, so it
    may be tried again; "unable": no process can be started, or none lives long enough to score."""

    def __init__(self, text: str, kind: str = "raised") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(order=True, slots=True)
class PendingReward:
    """A requested reward. The oldest is computed first, even if it came back from a process that died."""

    number: int
    request: bytes = field(compare=False)
    outcome: asyncio.Future[Reward | RewardFailed] = field(compare=False)
    num_deaths: int = field(default=0, compare=False)

    def end(self, outcome: Reward | RewardFailed) -> None:
        if not self.outcome.done():  # else nobody waits any more
            self.outcome.set_result(outcome)


def default_workers() -> int:
    """Half of the cores that this process may use, from one to four: the others are for generation."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_DEFAULT_WORKERS, cores // 2))


class RewardPool:
    """Scores responses in `workers` processes. One event loop; any number of concurrent `score` calls."""

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
        self.timeout_s = timeout_s
        self.block_s = block_s or timeout_s
        self.scores_again = not spec.plays
        """Whether unanswered rewards of a process that died are computed again in another one."""
        self.backlog = asyncio.PriorityQueue[PendingReward]()
        self.processes = Processes(
            name="reward",
            load=RewardServer,
            arguments=(spec, timeout_s),
            start_limit_s=max(START_TIMEOUT_S, timeout_s),  # an import may take as long as a reward
            python=spec.python,
            log_path=log_path,
        )
        self.num_restarts = 0
        self._num_workers = workers
        self._ready = asyncio.Event()
        self._scoring: set[RewardProcess] = set()
        self._numbers = count(1)
        self._task: asyncio.Task[None] | None = None
        self._broken = ""

    @property
    def child_pids(self) -> list[int]:
        """Pids of the processes that are ready to score."""
        return [each.process.pid for each in self._scoring]

    async def start(self) -> None:
        """Start the processes ahead of the first `score`. Raises ExecutorFailed if they cannot score."""
        self._begin()
        await self._ready.wait()
        if self._broken:
            raise ExecutorFailed(f"rewards cannot start: {self._broken}")

    async def score(self, item: Item, response: object) -> Reward:
        """The reward of a response. Raises RewardFailed if there is none."""
        self._begin()
        number = next(self._numbers)
        try:
            request = pickle.dumps((number, item, response), protocol=5)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RewardFailed(f"the item cannot be sent to the reward process: {error}") from error
        wanted = PendingReward(number, request, asyncio.get_running_loop().create_future())
        self.backlog.put_nowait(wanted)
        if self._broken:
            self._fail_all()
        outcome = await wanted.outcome
        if isinstance(outcome, RewardFailed):
            raise RewardFailed(str(outcome), outcome.kind)  # several rewards may share one outcome
        return outcome

    async def close(self) -> None:
        """End the processes; pending rewards fail."""
        if not self._broken:  # else it ends its processes already, and must not be disturbed
            self._broken = CLOSED
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
            await self.processes.close()

    def _fail_all(self) -> None:
        while not self.backlog.empty():
            self.backlog.get_nowait().end(RewardFailed(self._broken, "unable"))

    async def _keep_process(self) -> None:
        """Keep one process running: start another when it dies. Raises RewardFailed if none starts, or if
        they keep dying."""
        num_idle_deaths = 0
        while True:
            fd = os.memfd_create("running reward")
            try:
                os.truncate(fd, mmap.PAGESIZE)
                mark, process = RunningMark(fd), await self.processes.take(fd)
            except ProcessEnded as ended:
                raise RewardFailed(str(ended), "unable") from None
            finally:
                os.close(fd)  # the memory stays mapped in both processes
            scoring, died_idle = RewardProcess(self, process, mark), ""
            self._scoring.add(scoring)
            if len(self._scoring) == self._num_workers:
                self._ready.set()
            try:
                await scoring.serve()
            finally:
                self._scoring.discard(scoring)
                died_idle = await scoring.end()
            self.num_restarts += 1
            num_idle_deaths = num_idle_deaths + 1 if died_idle else 0
            if num_idle_deaths == MAX_IDLE_DEATHS:
                why = f"{MAX_IDLE_DEATHS} reward processes in a row died ({died_idle})"
                raise RewardFailed(why, "unable")


@dataclass(slots=True, eq=False)
class RewardProcess:
    """Takes rewards from the pool's backlog and has the process compute them. Those still unanswered when it
    ends go back there, for another process."""

    pool: RewardPool
    process: Process
    mark: RunningMark
    _asked: dict[int, PendingReward] = field(default_factory=dict)
    _last_news_s: float = 0.0
    _num_results: int = 0
    _killed_for: RewardFailed | None = None

    async def serve(self) -> None:
        """Compute as many rewards at a time as the process has places, until it ends, or is killed because it
        hangs."""
        clock, free = asyncio.get_running_loop().time, asyncio.Semaphore(self.process.places)

        async def ask() -> None:
            """Take a reward from the backlog whenever a place is free."""
            while True:
                await free.acquire()
                while (wanted := await self.pool.backlog.get()).outcome.done():
                    pass
                if not self._asked:
                    self._last_news_s = clock()
                self._asked[wanted.number] = wanted
                send(self.process.writer, wanted.request)
                wanted.outcome.add_done_callback(partial(withdraw, wanted.number))
                await asyncio.sleep(0)  # give the other processes a turn, so that rewards spread over all

        def withdraw(number: int, outcome: asyncio.Future[Reward | RewardFailed]) -> None:
            """Tell the process that nobody waits for it any more. It cancels the reward if that is async."""
            if outcome.cancelled() and number in self._asked:
                send(self.process.writer, pickle.dumps((number, None, "")))

        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(work, name="rewards") for work in (ask(), self._watch())]
            try:
                while True:
                    answer = await self.process.answer()
                    wanted = self._asked[answer["id"]]
                    if "failed" in answer:
                        wanted.end(RewardFailed(answer["failed"], answer["kind"]))
                    else:
                        wanted.end(Reward(answer["reward"], answer["parts"], answer["fields"]))
                    del self._asked[wanted.number]
                    self._num_results += 1
                    self._last_news_s = clock()
                    free.release()  # only now: the process finishes a reward even if nobody waits for it
            except (UnreadableAnswer, KeyError, TypeError, ValueError):
                why = "its process gave an unreadable answer and was killed"
                self._killed_for = RewardFailed(why, "died")
            except ProcessEnded:
                pass
            for task in beside:
                task.cancel()

    async def _watch(self) -> None:
        """Kill the process if a reward runs too long, or if it owes rewards but for long neither runs nor
        answers one."""
        block_s, silence_s = self.pool.block_s, 2 * self.pool.timeout_s + START_TIMEOUT_S
        while not self._killed_for:
            before, _ = self.mark.read()
            await asyncio.sleep(min(MAX_WATCH_PERIOD_S, block_s / 4))
            running, ran_s = self.mark.read()
            silent_s = asyncio.get_running_loop().time() - self._last_news_s
            if running != IDLE and running == before and ran_s > block_s:
                self._killed_for = RewardFailed(f"took longer than {block_s:g} s and was killed", "blocked")
            elif running == IDLE and self._asked and silent_s > silence_s:
                why = f"its process gave no sign of life for {silent_s:.0f} s and was killed"
                self._killed_for = RewardFailed(why, "timed-out")
        self.pool.processes.kill(self.process)

    async def end(self) -> str:
        """End the process. An idle one exits when its socket closes; a busy one, or one that does not exit,
        is killed. Returns how it ended if it was idle and never gave a result, else ""."""
        self.process.writer.close()
        culprit, how = self.mark.read()[0], ""
        try:
            if culprit == IDLE:
                how = await self.process.how_it_ended(END_TIMEOUT_S)
        finally:
            try:
                if not how:
                    self.pool.processes.kill(self.process)
                    how = await self.process.how_it_ended(END_TIMEOUT_S) or "it does not end"
            finally:  # what hung or killed too many processes fails; the rest may be computed in another one
                for wanted in self._asked.values():
                    wanted.num_deaths += wanted.number == culprit
                    most_deaths = MAX_DEATHS_OF_REWARD if self.pool.scores_again else 1
                    if self._killed_for and culprit in (wanted.number, IDLE):
                        wanted.end(self._killed_for)
                    elif wanted.num_deaths >= most_deaths:
                        wanted.end(RewardFailed(f"the reward process died ({how}) while scoring", "died"))
                    elif self.pool.scores_again:
                        self.pool.backlog.put_nowait(wanted)
                    else:
                        why = f"the process that it shared with other rewards ended ({how})"
                        wanted.end(RewardFailed(why, "lost"))
        return how if culprit == IDLE and not (self._killed_for or self._num_results) else ""
