"""The child process that scores: `python -m asyncrl_cli.tasks.reward_worker PARENT_PID BOARD_FD`.

Reads frames from stdin until it ends, scores their requests, writes frames to stdout (see frames.py). What rewards
print goes to stderr. Ordinary rewards run one after the other; async ones run together, each with a timeout of its own
while it awaits. The pool kills the process when the board shows the same reward for longer than the timeout.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
import types
from collections.abc import Coroutine, Generator
from typing import Any, BinaryIO

from asyncrl_cli.tasks.child import become_child
from asyncrl_cli.tasks.frames import Board, Ready, pack, read_frame, read_frame_async
from asyncrl_cli.tasks.item import Item
from asyncrl_cli.tasks.scoring import Scorer, build_scorer, checked_reward, is_async, module_file

FLUSH_S = 0.002
MAX_AWAITING = 128
MAX_REASON_CHARS = 400
NUM_PRINTED_TRACEBACKS = 3

Outcome = float | str
"""A reward, or why there is none."""


def main() -> None:
    parent_pid, board_fd = int(sys.argv[1]), sys.argv[2]
    requests, results = become_child(parent_pid)
    hello = read_frame(requests)
    if hello is None:
        return
    try:
        scorer = build_scorer(hello.spec)
        ready = Ready(failure="", module_file=module_file(hello.spec), at_once=MAX_AWAITING if is_async(scorer) else 1)
    except (Exception, SystemExit) as error:
        ready = Ready(failure=describe(error))
    results.write(pack(ready))
    results.flush()
    if ready.failure or board_fd == "-":
        os._exit(0)  # without waiting for threads that the module has started
    worker = Worker(scorer, results, Board(int(board_fd)))
    if is_async(scorer):
        asyncio.run(worker.serve_awaiting(requests, hello.timeout_s))
    else:
        worker.serve(requests)


class Worker:
    """Scores requests with `scorer`, says on the board which one is running, and writes results in batches."""

    def __init__(self, scorer: Scorer, results: BinaryIO, board: Board) -> None:
        self._scorer = scorer
        self._results = results
        self._board = board
        self._finished: list[tuple[int, Outcome]] = []
        self._flush_planned = False
        self._tracebacks_left = NUM_PRINTED_TRACEBACKS

    def serve(self, requests: BinaryIO) -> None:
        """Ordinary rewards, until stdin ends."""
        while (frame := read_frame(requests)) is not None:
            flushed_s = time.monotonic()
            for request_id, item, response in frame:
                self._board.enter(request_id)
                self._finished.append((request_id, self._score(item, response)))
                if time.monotonic() - flushed_s > FLUSH_S:
                    self._flush()
                    flushed_s = time.monotonic()
            self._board.leave()
            self._flush()

    def _score(self, item: Item, response: str) -> Outcome:
        try:
            return checked_reward(self._scorer(item, response))
        except (Exception, SystemExit) as error:
            return self._failure(error)

    async def serve_awaiting(self, requests: BinaryIO, timeout_s: float) -> None:
        """Async rewards, until stdin ends, all that come at once: the pool sends no more than MAX_AWAITING."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        async with asyncio.TaskGroup() as tasks:
            running: set[asyncio.Task[None]] = set()
            while (frame := await read_frame_async(reader)) is not None:
                for request_id, item, response in frame:
                    task = tasks.create_task(self._score_awaiting(request_id, item, response, timeout_s))
                    running.add(task)
                    task.add_done_callback(running.discard)
            for task in running:
                task.cancel()

    async def _score_awaiting(self, request_id: int, item: Item, response: str, timeout_s: float) -> None:
        outcome: Outcome
        try:
            async with asyncio.timeout(timeout_s) as limit:
                outcome = checked_reward(await announced(self._call(item, response), request_id, self._board))
        except (Exception, SystemExit) as error:
            outcome = f"took longer than {timeout_s:g} s" if limit.expired() else self._failure(error)
        self._finished.append((request_id, outcome))
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    async def _call(self, item: Item, response: str) -> Any:
        return await self._scorer(item, response)

    def _flush(self) -> None:
        self._flush_planned = False
        if self._finished:
            self._results.write(pack(self._finished))
            self._results.flush()
            self._finished = []

    def _failure(self, error: BaseException) -> str:
        if self._tracebacks_left:
            self._tracebacks_left -= 1
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


if __name__ == "__main__":
    main()
