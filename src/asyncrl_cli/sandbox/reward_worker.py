"""The reward process's own side: scores requests, and writes on a shared board which one is running.

    pool -> child    pickles: (id, item, response); (id, None, "") if nobody waits for an async reward any more
    child -> pool    lines of JSON: [id, reward, parts], or [id, ["why there is none", kind]]

The child's first line has id 0 and says how many rewards it takes at once, or why it cannot score. Ordinary
rewards run one at a time; async ones run concurrently, each with its own timeout while it awaits. The pool
kills the process if the board shows the same reward for longer than a limit. Agents (agents.py) are async
rewards here: the child plays the item, and the "response" is the agent's access to the model.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import types
from collections.abc import Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

from asyncrl_cli.base.child_process import pickles, write_line
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.reward_spec import Reward, RewardSpec
from asyncrl_cli.contracts.user_code import describe, report
from asyncrl_cli.tasks.reward_functions import Scorer, is_async
from asyncrl_cli.tasks.scoring import build_scorer, checked_reward, with_reference

if TYPE_CHECKING:
    import asyncio  # takes a fifth of a child's start: imported only for async rewards

MAX_AWAITING = 128
IDLE = 0
_ENTRY = struct.Struct("<Qd")


Request = tuple[int, Item | None, Any]


class RunningMark:
    """16 bytes that pool and child share: the id of the running request (0: none) and when it began
    (system-wide clock).

    If the child hangs in C code or dies, only the board tells which reward was the cause.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _ENTRY.size)

    def enter(self, request_id: int) -> None:
        _ENTRY.pack_into(self._memory, 0, request_id, time.monotonic())

    def leave(self) -> None:
        self.enter(IDLE)

    def read(self) -> tuple[int, float]:
        """(id, seconds it has run). A read may see half of a write: act only after two reads with the same
        id."""
        request_id, since_s = _ENTRY.unpack_from(self._memory, 0)
        return request_id, time.monotonic() - since_s


def serve(requests: BinaryIO, results: BinaryIO, spec: RewardSpec, timeout_s: float, board_fd: int) -> None:
    """The child's role: answer each request with its outcome, until stdin closes."""
    try:
        scorer = build_scorer(spec)
    except (Exception, SystemExit) as error:
        write_line(results, [IDLE, [describe(error), "unable"]])
        os._exit(0)  # without waiting for threads that the module has started
    worker = _Worker(spec, scorer, results, RunningMark(board_fd), timeout_s)
    if is_async(scorer):
        import asyncio

        write_line(results, [IDLE, MAX_AWAITING])
        asyncio.run(worker.serve_awaiting(requests))
    else:
        write_line(results, [IDLE, 1])
        worker.serve(requests)


@dataclass(slots=True)
class _Worker:
    spec: RewardSpec
    scorer: Scorer
    results: BinaryIO
    board: RunningMark
    timeout_s: float

    def serve(self, requests: BinaryIO) -> None:
        for request_id, item, response in pickles(requests):
            if item is None:  # withdrawn, but computed already
                continue
            self.board.enter(request_id)
            try:
                reward = self._judged(item, response, self.scorer(item, response))
                outcome = [reward, reward.parts]
            except (Exception, SystemExit) as error:
                outcome = [(report(error), "raised")]
            self.board.leave()
            write_line(self.results, [request_id, *outcome])

    async def serve_awaiting(self, requests: BinaryIO) -> None:
        """Run all async rewards concurrently. The pool never has more than MAX_AWAITING running."""
        import asyncio

        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Request | None]()

        def read() -> None:
            for request in chain(pickles(requests), [None]):
                loop.call_soon_threadsafe(arrived.put_nowait, request)

        threading.Thread(target=read, daemon=True).start()
        # for rewards that put blocking calls into threads
        loop.set_default_executor(ThreadPoolExecutor(MAX_AWAITING))
        running: dict[int, asyncio.Task[None]] = {}
        while (request := await arrived.get()) is not None:
            request_id, item, response = request
            if item is not None:
                task = running[request_id] = asyncio.create_task(
                    self._score_awaiting(request_id, item, response)
                )
                task.add_done_callback(lambda _, request_id=request_id: running.pop(request_id))
            elif request_id in running:
                running[request_id].cancel()

    async def _score_awaiting(self, request_id: int, item: Item, response: Any) -> None:
        import asyncio

        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                value = await announced(self._call(item, response), request_id, self.board)
                reward = self._judged(item, response, value)
                outcome = [reward, reward.parts]
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            took_too_long = f"took longer than {self.timeout_s:g} s", "timed-out"
            outcome = [took_too_long if limit.expired() else (report(error), "raised")]
        write_line(self.results, [request_id, *outcome])

    def _judged(self, item: Item, response: Any, value: Any) -> Reward:
        return with_reference(self.spec, item, response, checked_reward(value))

    async def _call(self, item: Item, response: Any) -> Any:
        return await self.scorer(item, response)


@types.coroutine
def announced(
    work: Coroutine[Any, Any, Any], request_id: int, board: RunningMark
) -> Generator[Any, Any, Any]:
    """`await work`, with `request_id` on the board only while `work` is really running, not while it awaits:
    blocking code in an async reward stops the whole event loop, and the pool must know which reward does
    so."""
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
        except BaseException as error:  # also a cancellation or a timeout: throw it into the work
            send, argument = work.throw, error
