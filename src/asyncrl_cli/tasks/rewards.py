"""RewardPool: awaits rewards that a child process computes, so that no verifier can hold up the event loop.

    score() -> pending -> one frame per turn of the event loop -> child -> frames of results -> the futures of score()

Who waits for whom: `score` waits for its future, which `_read` resolves from a result, `_bury` from a death. `_watch`
looks at the board and kills a child whose reward has run longer than the timeout; the rewards behind it go to the next
child. So every `score` ends: with a reward, or with RewardFailed.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from dataclasses import dataclass, field
from pickle import PicklingError

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.tasks.child import command, environment, how_it_ended, kill_group
from asyncrl_cli.tasks.frames import IDLE, Board, Hello, Ready, pack, read_frame_async
from asyncrl_cli.tasks.item import Item
from asyncrl_cli.tasks.reward_spec import WORKER, RewardSpec

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 2.0
MAX_WATCH_PERIOD_S = 0.25
MAX_DEATHS_OF_REQUEST = 2
"""A reward that was running in so many children when they died is what kills them. Once may be somebody's `kill`."""
MAX_DEATHS_IN_A_ROW = 4
"""Children that died one after the other without a single result between: no use to start another."""


class RewardFailed(Exception):
    """There is no reward for this response: it raised, hung, died or returned no number. `reason` says which."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class _Pending:
    item: Item
    response: str
    future: asyncio.Future[float]
    num_deaths: int = 0


@dataclass(slots=True)
class _Child:
    process: asyncio.subprocess.Process
    board: Board
    killed_for: str = ""
    sent: set[int] = field(default_factory=set)

    def kill(self) -> None:
        kill_group(self.process.pid)


class RewardPool:
    """Scores responses in one child process. One event loop; any number of concurrent `score` calls."""

    def __init__(self, spec: RewardSpec, *, timeout_s: float) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._pending: dict[int, _Pending] = {}
        self._unsent: list[int] = []
        self._last_id = IDLE
        self._child: _Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._first_start: asyncio.Future[None] | None = None
        self._flush_planned = False
        self._num_deaths_in_a_row = 0
        self._last_news_s = 0.0
        self._broken = ""
        self.num_restarts = 0

    @property
    def child_pid(self) -> int | None:
        """Of the process that scores; None while there is none."""
        return self._child.process.pid if self._child else None

    async def start(self) -> None:
        """Start the child ahead of the first `score`, and learn whether it can score: ExecutorFailed if not."""
        self._begin()
        assert self._first_start is not None
        await asyncio.shield(self._first_start)
        if self._broken:
            raise ExecutorFailed(f"rewards cannot start: {self._broken}")

    async def score(self, item: Item, response_text: str) -> float:
        """Raises RewardFailed when there is no reward."""
        self._begin()
        if self._broken:
            raise RewardFailed(self._broken)
        self._last_id += 1
        request_id = self._last_id
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = _Pending(item, response_text, future)
        self._unsent.append(request_id)
        self._plan_flush()
        try:
            return await future
        finally:
            self._pending.pop(request_id, None)

    async def close(self) -> None:
        """End the child; rewards still waited for fail."""
        self._broken = self._broken or "the reward pool is closed"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _begin(self) -> None:
        if self._task is None and not self._broken:
            self._first_start = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(), name="rewards")

    async def _run(self) -> None:
        """One child after the other."""
        try:
            while not self._broken:
                child = await self._spawn()
                try:
                    self._broken = await self._greet(child)
                    self._settle_first_start()
                    if not self._broken:
                        await self._serve(child)
                finally:
                    await self._end(child)
                if not self._broken:
                    self._bury(child)
        except OSError as error:  # no memory, no process or no file to be had
            self._broken = f"a reward process cannot be started: {error}"
        finally:
            self._broken = self._broken or "the reward pool is closed"
            self._settle_first_start()
            self._fail(list(self._pending), self._broken)

    async def _spawn(self) -> _Child:
        with tempfile.TemporaryFile() as shared:  # its memory stays mapped in both processes when it is closed
            os.truncate(shared.fileno(), mmap.PAGESIZE)
            process = await asyncio.create_subprocess_exec(
                *command(WORKER, str(shared.fileno())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(shared.fileno(),),
                env=environment(),
                start_new_session=True,  # a Ctrl-C at the terminal is the driver's to handle, not the rewards'
            )
            return _Child(process, Board(shared.fileno()))

    async def _greet(self, child: _Child) -> str:
        """Why the child cannot score; "" if it can."""
        assert child.process.stdin is not None
        assert child.process.stdout is not None
        child.process.stdin.write(pack(Hello(spec=self._spec, timeout_s=self._timeout_s)))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready: Ready | None = await read_frame_async(child.process.stdout)
        except TimeoutError:
            return f"the reward process did not start within {START_TIMEOUT_S:g} s"
        return "the reward process ended while it started" if ready is None else ready.failure

    async def _serve(self, child: _Child) -> None:
        """Until the child's stdout ends."""
        self._child = child
        self._unsent = list(self._pending)
        self._news()
        self._plan_flush()
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch(child), name="watch rewards")
                await self._read(child)
                watch.cancel()
        finally:
            self._child = None

    async def _read(self, child: _Child) -> None:
        assert child.process.stdout is not None
        while (results := await read_frame_async(child.process.stdout)) is not None:
            for request_id, outcome in results:
                self._resolve(request_id, outcome)
            self._num_deaths_in_a_row = 0
            self._news()

    def _resolve(self, request_id: int, outcome: float | str) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is None or pending.future.done():
            return
        if isinstance(outcome, str):
            pending.future.set_exception(RewardFailed(outcome))
        else:
            pending.future.set_result(outcome)

    def _fail(self, request_ids: list[int], reason: str) -> None:
        for request_id in request_ids:
            self._resolve(request_id, reason)

    async def _watch(self, child: _Child) -> None:
        """Kill the child when a reward runs too long, or when rewards are due and nothing comes back at all."""
        period_s = min(MAX_WATCH_PERIOD_S, self._timeout_s / 4)
        while not child.killed_for:
            await asyncio.sleep(period_s)
            seen, (running, ran_s) = child.board.read()[0], child.board.read()
            if running != IDLE and running == seen and ran_s > self._timeout_s:
                child.killed_for = f"took longer than {self._timeout_s:g} s and was killed"
            elif running == IDLE and self._awaited(child) and self._silent_s() > 2 * self._timeout_s + START_TIMEOUT_S:
                child.killed_for = f"its process gave no sign of life for {self._silent_s():.0f} s and was killed"
        child.kill()

    def _awaited(self, child: _Child) -> bool:
        return any(request_id in self._pending for request_id in child.sent)

    def _news(self) -> None:
        self._last_news_s = asyncio.get_running_loop().time()

    def _silent_s(self) -> float:
        return asyncio.get_running_loop().time() - self._last_news_s

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Everything asked for in this turn of the event loop becomes one frame."""
        self._flush_planned = False
        if self._child is None or not self._unsent:
            return
        if not self._awaited(self._child):
            self._news()
        request_ids, self._unsent = [id_ for id_ in self._unsent if id_ in self._pending], []
        requests = [(id_, self._pending[id_].item, self._pending[id_].response) for id_ in request_ids]
        try:
            frame = pack(requests)
        except (PicklingError, TypeError, AttributeError) as error:
            self._fail(request_ids, f"the item cannot be sent to the reward process: {error}")
            return
        assert self._child.process.stdin is not None
        self._child.sent = {id_ for id_ in self._child.sent if id_ in self._pending} | set(request_ids)
        self._child.process.stdin.write(frame)

    def _bury(self, child: _Child) -> None:
        """Decide who fails for the death of `child`; all others that it had are sent to the next one."""
        self.num_restarts += 1
        self._num_deaths_in_a_row += 1
        culprit = child.board.read()[0]
        how = how_it_ended(child.process.returncode)
        reason = child.killed_for or f"the reward process died ({how}) while scoring"
        if child.killed_for:
            self._fail([culprit] if culprit != IDLE else list(child.sent), reason)
        elif culprit in self._pending:
            self._pending[culprit].num_deaths += 1
            if self._pending[culprit].num_deaths >= MAX_DEATHS_OF_REQUEST:
                self._fail([culprit], reason)
        elif self._num_deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
            self._broken = f"{MAX_DEATHS_IN_A_ROW} reward processes in a row died ({how})"

    async def _end(self, child: _Child) -> None:
        """An idle child reads the end of its stdin and goes; one that is busy, or does not, is killed."""
        assert child.process.stdin is not None
        child.process.stdin.close()
        is_scoring = child.board.read()[0] != IDLE
        try:
            async with asyncio.timeout(0 if is_scoring else END_TIMEOUT_S):
                await child.process.wait()
        except TimeoutError:
            pass
        finally:
            child.kill()
            await child.process.wait()

    def _settle_first_start(self) -> None:
        if self._first_start is not None and not self._first_start.done():
            self._first_start.set_result(None)
