"""The pool's side of a process that computes rewards: starts it, gives it work, watches it, kills it if it
hangs."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import pickle
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from asyncrl_cli.base.child_process import command, environment, how_it_ended, kill_group, send
from asyncrl_cli.contracts.reward_spec import Reward, RewardSpec
from asyncrl_cli.sandbox.printed import copy_output, to_file
from asyncrl_cli.sandbox.reward_worker import IDLE, RunningMark, serve

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 2.0
END_LOOK_S = 0.005
LAST_WORDS_S = 0.2
MAX_WATCH_PERIOD_S = 0.25
MAX_DEATHS_OF_REWARD = 2
"""A reward fails if this many processes died while computing it. A single death may have another cause."""


class RewardFailed(Exception):
    """This response has no reward; `str(error)` says why. `kind`: "raised" (also if the reward is not a
    finite number), "timed-out", "blocked", "died"; "lost": its process died because of another reward, so it
    may be tried again; "unable": no process can be started, or none lives long enough to score."""

    def __init__(self, text: str, kind: str = "raised") -> None:
        super().__init__(text)
        self.kind = kind


Outcome = Reward | RewardFailed


@dataclass(order=True, slots=True)
class PendingReward:
    """A requested reward. The oldest is computed first, even if it came back from a process that died."""

    number: int
    request: bytes = field(compare=False)
    outcome: asyncio.Future[Outcome] = field(compare=False)
    num_deaths: int = field(default=0, compare=False)

    def end(self, outcome: Outcome) -> None:
        if not self.outcome.done():  # else nobody waits any more
            self.outcome.set_result(outcome)


Backlog = asyncio.PriorityQueue[PendingReward]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """`timeout_s`: limit of one reward. `block_s`: how long a reward may run without awaiting. `again`:
    whether unanswered rewards of a process that died are computed again in another one."""

    timeout_s: float
    block_s: float
    again: bool = True


async def start_process(
    spec: RewardSpec, rules: Rules, backlog: Backlog, log_path: Path | None = None
) -> RewardProcess:
    """`log_path`: the file for what the process prints; None: our standard error. Raises RewardFailed if the
    system cannot start a process."""
    try:
        # its memory stays mapped in both processes after it is closed
        with tempfile.TemporaryFile() as shared:
            os.truncate(shared.fileno(), mmap.PAGESIZE)
            process = await asyncio.create_subprocess_exec(
                *command(serve, spec.python),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None if log_path is None else asyncio.subprocess.PIPE,
                pass_fds=(shared.fileno(),),
                env=environment(spec.python),
                start_new_session=True,  # Ctrl-C at the terminal must reach the driver only
            )
            process.stdin.write(pickle.dumps((serve, (spec, rules.timeout_s, shared.fileno()))))
            started = RewardProcess(process, RunningMark(shared.fileno()), rules, backlog)
            if log_path is not None:
                started.output = asyncio.create_task(
                    copy_output(process.stderr, to_file(log_path), "rewards"), name="rewards' output"
                )
            return started
    except OSError as error:  # out of memory, processes or file descriptors
        raise RewardFailed(f"a reward process cannot be started: {error}", "unable") from error


@dataclass(slots=True, eq=False)
class RewardProcess:
    """Takes rewards from `backlog` and computes them. Those still unanswered when it ends go back there, for
    another process."""

    process: asyncio.subprocess.Process
    board: RunningMark
    rules: Rules
    backlog: Backlog
    output: asyncio.Task[None] | None = None
    """Copies what the process prints."""
    _asked: dict[int, PendingReward] = field(default_factory=dict)
    _last_news_s: float = 0.0
    _num_results: int = 0
    _killed_for: RewardFailed | None = None

    async def greeting(self) -> int:
        """Wait for the process's first line: how many rewards it takes at once. Raises RewardFailed if it
        cannot score."""
        limit_s = max(START_TIMEOUT_S, self.rules.timeout_s)  # an import may take as long as a reward
        try:
            async with asyncio.timeout(limit_s):
                greeting = await self._next_answer()
        except TimeoutError:
            raise RewardFailed(f"the reward process did not start within {limit_s:g} s", "unable") from None
        if greeting is None:
            raise RewardFailed("the reward process ended while it started", "unable")
        if isinstance(greeting[1], RewardFailed):
            raise greeting[1]
        return int(greeting[1])

    async def serve(self, places: int) -> None:
        """Compute `places` rewards at a time, until the process ends, or is killed because it hangs."""
        free = asyncio.Semaphore(places)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(work, name="rewards") for work in (self._ask(free), self._watch())]
            while (answer := await self._next_answer()) is not None:
                number, outcome = answer
                self._num_results += 1
                self._last_news_s = asyncio.get_running_loop().time()
                self._asked.pop(number).end(outcome)
                free.release()  # only now: the process finishes a reward even if nobody waits for it
            for task in beside:
                task.cancel()

    async def _ask(self, free: asyncio.Semaphore) -> None:
        """Take a reward from the backlog whenever a place is free."""
        while True:
            await free.acquire()
            while (wanted := await self.backlog.get()).outcome.done():
                pass
            if not self._asked:
                self._last_news_s = asyncio.get_running_loop().time()
            self._asked[wanted.number] = wanted
            send(self.process.stdin, wanted.request)
            wanted.outcome.add_done_callback(partial(self._withdraw, wanted.number))
            await asyncio.sleep(0)  # give the other processes a turn, so that rewards spread over all

    def _withdraw(self, number: int, outcome: asyncio.Future[Outcome]) -> None:
        """Tell the process that nobody waits for this reward any more. It cancels the reward if that is
        async."""
        if outcome.cancelled() and number in self._asked:
            send(self.process.stdin, pickle.dumps((number, None, "")))

    async def _next_answer(self) -> tuple[int, Outcome] | None:
        """The next (number, outcome); None if the process has ended."""
        line = await self.process.stdout.readline()
        if not line.endswith(b"\n"):
            return None
        number, outcome, *parts = json.loads(line)
        return number, RewardFailed(*outcome) if isinstance(outcome, list) else Reward(outcome, *parts)

    async def _watch(self) -> None:
        """Kill the process if a reward runs too long, or if it owes rewards but for long neither runs nor
        answers one. Once it has ended, end `serve` too: a process that a reward started may still hold the
        pipe open."""
        period_s = min(MAX_WATCH_PERIOD_S, self.rules.block_s / 4)
        while self.process.returncode is None:
            seen = self.board.read()[0]
            await asyncio.sleep(period_s)
            if not self._killed_for and (reason := self._reason_to_kill(seen)):
                self._killed_for = reason
                kill_group(self.process.pid)
        await asyncio.sleep(period_s)  # until its last answers have been read
        self.process.stdout.feed_eof()

    def _reason_to_kill(self, seen: int) -> RewardFailed | None:
        """`seen`: the reward that was running one watch period ago."""
        (running, ran_s), rules = self.board.read(), self.rules
        silent_s = asyncio.get_running_loop().time() - self._last_news_s
        if running != IDLE and running == seen and ran_s > rules.block_s:
            return RewardFailed(f"took longer than {rules.block_s:g} s and was killed", "blocked")
        if running == IDLE and self._asked and silent_s > 2 * rules.timeout_s + START_TIMEOUT_S:
            return RewardFailed(
                f"its process gave no sign of life for {silent_s:.0f} s and was killed", "timed-out"
            )
        return None

    async def end(self) -> str:
        """End the process. An idle one exits when its stdin closes; a busy one, or one that does not exit, is
        killed. Returns how it ended if it was idle and never gave a result, else ""."""
        self.process.stdin.close()
        culprit = self.board.read()[0]
        try:
            if culprit == IDLE:
                await self._ends_soon()
        finally:
            kill_group(self.process.pid)
            try:
                await self._ends_soon()
            finally:
                how = how_it_ended(self.process.returncode)
                self._give_back(culprit, how)
                try:
                    await self._close_output()
                finally:
                    # the pipes, which a process that a reward has started may hold open
                    self.process._transport.close()
        return how if culprit == IDLE and not (self._killed_for or self._num_results) else ""

    async def _close_output(self) -> None:
        """Copy the last words, unless a process that a reward has started holds the pipe open."""
        if self.output is not None:
            await asyncio.wait({self.output}, timeout=LAST_WORDS_S)
            self.output.cancel()

    async def _ends_soon(self) -> None:
        """Wait at most END_TIMEOUT_S for the process to end. (`Process.wait` would also wait for its pipes to
        close.)"""
        limit_s = time.monotonic() + END_TIMEOUT_S
        while self.process.returncode is None and time.monotonic() < limit_s:  # noqa: ASYNC110
            await asyncio.sleep(END_LOOK_S)

    def _give_back(self, culprit: int, how: str) -> None:
        """Return unanswered rewards to the backlog. Those that hung or killed too many processes fail; all do
        if not `again`."""
        for wanted in self._asked.values():
            wanted.num_deaths += wanted.number == culprit
            if self._killed_for and culprit in (wanted.number, IDLE):
                wanted.end(self._killed_for)
            elif wanted.num_deaths == MAX_DEATHS_OF_REWARD or (wanted.num_deaths and not self.rules.again):
                wanted.end(RewardFailed(f"the reward process died ({how}) while scoring", "died"))
            elif not self.rules.again:
                wanted.end(
                    RewardFailed(f"the process that it shared with other rewards ended ({how})", "lost")
                )
            else:
                self.backlog.put_nowait(wanted)
