"""A process that computes rewards, seen from the pool: starts it, asks it, watches it, kills it if it hangs."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import pickle
import tempfile

from asyncrl_cli.tasks.child import command, environment, how_it_ended, kill_group
from asyncrl_cli.tasks.reward_worker import IDLE, Board, Outcome, serve
from asyncrl_cli.tasks.scoring import RewardSpec

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 2.0
MAX_WATCH_PERIOD_S = 0.25


class CannotScore(Exception):
    """No process can be started, or none lives long enough to score; `str(error)` says why."""


class Died(Exception):
    """The process ended before it answered; `str(error)` says how. `is_culprit`: it was computing this reward when it died."""

    def __init__(self, how: str, is_culprit: bool) -> None:
        super().__init__(how)
        self.is_culprit = is_culprit


async def start_process(spec: RewardSpec, timeout_s: float) -> RewardProcess:
    """Raises CannotScore if the system cannot start a process."""
    try:
        with tempfile.TemporaryFile() as shared:  # its memory stays mapped in both processes after it is closed
            os.truncate(shared.fileno(), mmap.PAGESIZE)
            process = await asyncio.create_subprocess_exec(
                *command(serve),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(shared.fileno(),),
                env=environment(),
                start_new_session=True,  # a Ctrl-C at the terminal is the driver's to handle, not the rewards'
            )
            assert process.stdin is not None
            process.stdin.write(pickle.dumps((serve, (spec, timeout_s, shared.fileno()))))
            return RewardProcess(process, Board(shared.fileno()), timeout_s)
    except OSError as error:  # out of memory, processes or file descriptors
        raise CannotScore(f"a reward process cannot be started: {error}") from error


class RewardProcess:
    def __init__(self, process: asyncio.subprocess.Process, board: Board, timeout_s: float) -> None:
        self._process = process
        self._board = board
        self._timeout_s = timeout_s
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._last_news_s = 0.0
        self._num_results = 0
        self._killed_for = ""
        self.pid = process.pid
        self.is_over = False

    async def greeting(self) -> int:
        """Wait for the process's first line: how many rewards it takes at once. Raises CannotScore if it cannot score."""
        limit_s = max(START_TIMEOUT_S, self._timeout_s)  # an import may take as long as a reward
        try:
            async with asyncio.timeout(limit_s):
                greeting = await self._next_answer()
        except TimeoutError:
            raise CannotScore(f"the reward process did not start within {limit_s:g} s") from None
        if greeting is None or isinstance(greeting[1], str):
            raise CannotScore("the reward process ended while it started" if greeting is None else greeting[1])
        return greeting[1]

    def ask(self, request_id: int, request: bytes) -> asyncio.Future[Outcome]:
        """Send a request; the future gets its outcome, or Died if the process ends first."""
        assert self._process.stdin is not None
        if not self._waiting:
            self._last_news_s = asyncio.get_running_loop().time()
        answer = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(request)
        return answer

    async def serve(self) -> None:
        """Deliver answers until the process ends, or is killed because it hangs."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(), name="watch rewards")
            while (answer := await self._next_answer()) is not None:
                request_id, outcome = answer
                self._num_results += 1
                self._last_news_s = asyncio.get_running_loop().time()
                self._waiting.pop(request_id).set_result(outcome)
            watch.cancel()

    async def _next_answer(self) -> tuple[int, Outcome] | None:
        """The next (id, outcome); None if the process has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    async def _watch(self) -> None:
        """Kill the process if a reward runs too long, or if rewards are due but neither running nor answered for long."""
        period_s = min(MAX_WATCH_PERIOD_S, self._timeout_s / 4)
        while not self._killed_for:
            await asyncio.sleep(period_s)
            seen, (running, ran_s) = self._board.read()[0], self._board.read()
            silent_s = asyncio.get_running_loop().time() - self._last_news_s
            if running != IDLE and running == seen and ran_s > self._timeout_s:
                self._killed_for = f"took longer than {self._timeout_s:g} s and was killed"
            elif running == IDLE and self._waiting and silent_s > 2 * self._timeout_s + START_TIMEOUT_S:
                self._killed_for = f"its process gave no sign of life for {silent_s:.0f} s and was killed"
        kill_group(self.pid)

    async def end(self) -> str:
        """End the process and fail its unanswered requests. An idle process exits when its stdin closes; a busy one, or one that
        stays, is killed. Returns how it ended if it was idle and had never given a result, else ""."""
        assert self._process.stdin is not None
        self.is_over = True
        self._process.stdin.close()
        culprit = self._board.read()[0]
        try:
            async with asyncio.timeout(END_TIMEOUT_S if culprit == IDLE else 0):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            kill_group(self.pid)
            await self._process.wait()
        how = how_it_ended(self._process.returncode)
        self._fail_waiting(culprit, how)
        return how if culprit == IDLE and not (self._killed_for or self._num_results) else ""

    def _fail_waiting(self, culprit: int, how: str) -> None:
        """Fail unanswered requests: the one that hung with that reason; all others with Died, so that another process is asked."""
        for request_id, waiting in self._waiting.items():
            if self._killed_for and culprit in (request_id, IDLE):
                waiting.set_result(self._killed_for)
            else:
                waiting.set_exception(Died(how, is_culprit=request_id == culprit))
