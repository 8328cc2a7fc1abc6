"""A reward process: started, given requests, watched, killed if it hangs, and replaced when it has died."""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pickle import PicklingError

from asyncrl_cli.tasks.child import command, environment, how_it_ended, kill_group, pack, read_frame_async
from asyncrl_cli.tasks.item import Item
from asyncrl_cli.tasks.reward_worker import IDLE, Board, Outcome, Ready, serve
from asyncrl_cli.tasks.scoring import RewardSpec

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 2.0
MAX_WATCH_PERIOD_S = 0.25
MAX_DEATHS_OF_REQUEST = 2
"""A reward that was running in so many processes when they died is what kills them. Once may be somebody's `kill`."""
MAX_DEATHS_IN_A_ROW = 4
"""Processes that died one after the other without a single result between: no use to start another."""


class RewardFailed(Exception):
    """There is no reward for this response: it raised, hung, died or returned no number. `reason` says which."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CannotScore(Exception):
    """No process can be started, or none lives long enough; `str(error)` says why."""


@dataclass(slots=True, eq=False)
class Request:
    id: int
    item: Item
    response: str
    future: asyncio.Future[float]
    num_deaths: int = 0

    def settle(self, outcome: Outcome) -> None:
        if self.future.done():
            return
        if isinstance(outcome, str):
            self.future.set_exception(RewardFailed(outcome))
        else:
            self.future.set_result(outcome)


@dataclass(slots=True)
class _Child:
    process: asyncio.subprocess.Process
    board: Board
    at_once: int = 1
    killed_for: str = ""


class RewardProcess:
    """`again(requests)` is called with what a dead process leaves behind, `on_room()` when it can take another request."""

    def __init__(
        self, spec: RewardSpec, timeout_s: float, again: Callable[[list[Request]], None], on_room: Callable[[], None]
    ) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._again = again
        self._on_room = on_room
        self._child: _Child | None = None
        self._num_deaths_in_a_row = 0
        self._last_news_s = 0.0
        self.sent: dict[int, Request] = {}
        self.ready = asyncio.Event()
        self.num_deaths = 0

    @property
    def pid(self) -> int | None:
        """None while there is no process that scores."""
        return self._child.process.pid if self._child else None

    @property
    def has_room(self) -> bool:
        return self._child is not None and len(self.sent) < self._child.at_once

    def send(self, request: Request) -> None:
        assert self._child is not None
        assert self._child.process.stdin is not None
        try:
            frame = pack((request.id, request.item, request.response))
        except (PicklingError, TypeError, AttributeError) as error:
            request.settle(f"the item cannot be sent to the reward process: {error}")
            return
        if not self.sent:
            self._last_news_s = asyncio.get_running_loop().time()
        self.sent[request.id] = request
        self._child.process.stdin.write(frame)

    async def run(self) -> None:
        """Until cancelled. Raises CannotScore."""
        while True:
            child = await self._spawn()
            try:
                await self._greet(child)
                self.ready.set()
                await self._serve(child)
            finally:
                await self._end(child)
            self._bury(child)

    async def _spawn(self) -> _Child:
        try:
            with tempfile.TemporaryFile() as shared:  # its memory stays mapped in both processes when it is closed
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
                process.stdin.write(pack((serve, (self._spec, self._timeout_s, shared.fileno()))))
                return _Child(process, Board(shared.fileno()))
        except OSError as error:  # no memory, no process or no file to be had
            raise CannotScore(f"a reward process cannot be started: {error}") from error

    async def _greet(self, child: _Child) -> None:
        assert child.process.stdout is not None
        limit_s = max(START_TIMEOUT_S, self._timeout_s)  # an import may take as long as a reward
        try:
            async with asyncio.timeout(limit_s):
                ready: Ready | None = await read_frame_async(child.process.stdout)
        except TimeoutError:
            raise CannotScore(f"the reward process did not start within {limit_s:g} s") from None
        if ready is None or ready.failure:
            raise CannotScore("the reward process ended while it started" if ready is None else ready.failure)
        child.at_once = ready.at_once

    async def _serve(self, child: _Child) -> None:
        """Until the child's stdout ends."""
        self._child = child
        self._on_room()
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch(child), name="watch rewards")
                await self._read(child)
                watch.cancel()
        finally:
            self._child = None

    async def _read(self, child: _Child) -> None:
        assert child.process.stdout is not None
        while (result := await read_frame_async(child.process.stdout)) is not None:
            self._settle(*result)
            self._num_deaths_in_a_row = 0
            self._last_news_s = asyncio.get_running_loop().time()
            self._on_room()

    def _settle(self, request_id: int, outcome: Outcome) -> None:
        request = self.sent.pop(request_id, None)
        if request is not None:
            request.settle(outcome)

    async def _watch(self, child: _Child) -> None:
        """Kill the child when a reward runs too long, or when rewards are due and nothing comes back at all."""
        period_s = min(MAX_WATCH_PERIOD_S, self._timeout_s / 4)
        while not child.killed_for:
            await asyncio.sleep(period_s)
            seen, (running, ran_s) = child.board.read()[0], child.board.read()
            silent_s = asyncio.get_running_loop().time() - self._last_news_s
            if running != IDLE and running == seen and ran_s > self._timeout_s:
                child.killed_for = f"took longer than {self._timeout_s:g} s and was killed"
            elif running == IDLE and self.sent and silent_s > 2 * self._timeout_s + START_TIMEOUT_S:
                child.killed_for = f"its process gave no sign of life for {silent_s:.0f} s and was killed"
        kill_group(child.process.pid)

    def _bury(self, child: _Child) -> None:
        """Decide who fails for the death of `child`; all others that it had are for the next one, here or elsewhere."""
        self.num_deaths += 1
        self._num_deaths_in_a_row += 1
        culprit = child.board.read()[0]
        how = how_it_ended(child.process.returncode)
        if child.killed_for:
            for request_id in [culprit] if culprit != IDLE else list(self.sent):
                self._settle(request_id, child.killed_for)
        elif culprit in self.sent:
            self.sent[culprit].num_deaths += 1
            if self.sent[culprit].num_deaths >= MAX_DEATHS_OF_REQUEST:
                self._settle(culprit, f"the reward process died ({how}) while scoring")
        elif self._num_deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
            raise CannotScore(f"{MAX_DEATHS_IN_A_ROW} reward processes in a row died ({how})")
        left, self.sent = list(self.sent.values()), {}
        self._again(left)

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
            kill_group(child.process.pid)
            await child.process.wait()
