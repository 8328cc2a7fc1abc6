"""The child's side of a reward pool: scores the requests that come, and says on a board which one is running.

Ordinary rewards come one at a time; async ones run together, each with a timeout of its own while it awaits. The pool kills the
process when the board shows the same reward for longer than the timeout.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time
import traceback
import types
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from typing import Any, BinaryIO

from asyncrl_cli.tasks.child import read_frame, read_frame_async, write_frame
from asyncrl_cli.tasks.item import Item
from asyncrl_cli.tasks.scoring import RewardSpec, Scorer, build_scorer, checked_reward, is_async, module_file

MAX_AWAITING = 128
MAX_REASON_CHARS = 400
NUM_PRINTED_TRACEBACKS = 3
IDLE = 0
_ENTRY = struct.Struct("<Qd")

Outcome = float | str
"""A reward, or why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a reward process says first; `failure` is why it cannot score ("" if it can). `module_file` is where it found a function
    of the user's; `at_once`: how many rewards it takes together."""

    failure: str
    module_file: str = ""
    at_once: int = 1


class Board:
    """16 bytes that pool and child share: the id that is running (0: none) and when it began (system-wide clock).

    If the child hangs in C code or dies, only this tells which reward was the culprit.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _ENTRY.size)

    def enter(self, request_id: int) -> None:
        _ENTRY.pack_into(self._memory, 0, request_id, time.monotonic())

    def leave(self) -> None:
        self.enter(IDLE)

    def read(self) -> tuple[int, float]:
        """(id, seconds it has run). A read may fall between the two halves of a write: read twice, then act."""
        request_id, since_s = _ENTRY.unpack_from(self._memory, 0)
        return request_id, time.monotonic() - since_s


def try_scorer(spec: RewardSpec) -> tuple[Scorer | None, Ready]:
    """The scorer, or None and why there is none."""
    try:
        scorer = build_scorer(spec)
        return scorer, Ready(failure="", module_file=module_file(spec), at_once=MAX_AWAITING if is_async(scorer) else 1)
    except (Exception, SystemExit) as error:
        return None, Ready(failure=describe(error))


def try_out(spec: RewardSpec) -> Ready:
    return try_scorer(spec)[1]


def serve(requests: BinaryIO, results: BinaryIO, spec: RewardSpec, timeout_s: float, board_fd: int) -> None:
    """The child's role: `Ready` first, then an outcome for each request, until stdin ends."""
    scorer, ready = try_scorer(spec)
    write_frame(results, ready)
    if scorer is None:
        os._exit(0)  # without waiting for threads that the module has started
    worker = _Worker(scorer, results, Board(board_fd))
    if is_async(scorer):
        asyncio.run(worker.serve_awaiting(requests, timeout_s))
    else:
        worker.serve(requests)


@dataclass(slots=True)
class _Worker:
    scorer: Scorer
    results: BinaryIO
    board: Board
    tracebacks_left: int = NUM_PRINTED_TRACEBACKS

    def serve(self, requests: BinaryIO) -> None:
        while (request := read_frame(requests)) is not None:
            request_id, item, response = request
            outcome: Outcome
            self.board.enter(request_id)
            try:
                outcome = checked_reward(self.scorer(item, response))
            except (Exception, SystemExit) as error:
                outcome = self._failure(error)
            self.board.leave()
            write_frame(self.results, (request_id, outcome))

    async def serve_awaiting(self, requests: BinaryIO, timeout_s: float) -> None:
        """Async rewards, all that come: the pool sends no more than MAX_AWAITING at once."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        running: set[asyncio.Task[None]] = set()
        while (request := await read_frame_async(reader)) is not None:
            task = asyncio.create_task(self._score_awaiting(*request, timeout_s))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _score_awaiting(self, request_id: int, item: Item, response: str, timeout_s: float) -> None:
        outcome: Outcome
        try:
            async with asyncio.timeout(timeout_s) as limit:
                outcome = checked_reward(await announced(self._call(item, response), request_id, self.board))
        except (Exception, SystemExit) as error:
            outcome = f"took longer than {timeout_s:g} s" if limit.expired() else self._failure(error)
        write_frame(self.results, (request_id, outcome))

    async def _call(self, item: Item, response: str) -> Any:
        return await self.scorer(item, response)

    def _failure(self, error: BaseException) -> str:
        if self.tracebacks_left:
            self.tracebacks_left -= 1
            traceback.print_exception(error)
        return describe(error)


@types.coroutine
def announced(work: Coroutine[Any, Any, Any], request_id: int, board: Board) -> Generator[Any, Any, Any]:
    """`await work`, with its id on the board whenever it is really running, not while it awaits: blocking code in an
    async reward stops the whole event loop, and the pool must know whose it is."""
    send, argument = work.send, None
    while True:
        board.enter(request_id)
        try:
            awaited = send(argument)
        except StopIteration as ended:
            return ended.value
        finally:
            board.leave()
        try:
            send, argument = work.send, (yield awaited)
        except BaseException as error:  # also a cancellation or a timeout: hand it to the work itself
            send, argument = work.throw, error


def describe(error: BaseException) -> str:
    """One line that any file takes: the error and the place it was raised at."""
    message = str(getattr(error, "message", "") or error).encode("utf-8", "backslashreplace").decode()
    place = ""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and "importlib" not in frames[-1].filename and os.path.dirname(__file__) not in frames[-1].filename:
        place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    return f"{type(error).__name__}: {message}"[:MAX_REASON_CHARS].replace("\n", " ") + place
