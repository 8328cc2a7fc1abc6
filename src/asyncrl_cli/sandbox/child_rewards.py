"""A reward process: scores responses, and marks in shared memory which reward is running.

    pool -> process    pickles: (id, item, response); (id, None, "") if nobody waits for it any more
    process -> pool    lines of JSON: {"id", "reward", "parts", "fields"}, or {"id", "failed": why, "kind"}

Ordinary rewards run one at a time; async ones run concurrently, each with its own timeout while it awaits.
The pool kills the process if the mark shows the same reward for longer than a limit. Agents are async rewards
here: the process plays the item, and the "response" is the agent's access to the model.
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
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

from asyncrl_cli.base.child_process import pickles, write_line
from asyncrl_cli.base.named_code import describe_with_traceback
from asyncrl_cli.contracts.environment import NAMES_ANSWER, RewardSpec
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.tasks.final_answer import names_answer
from asyncrl_cli.tasks.reward_functions import build_reward, checked_reward, is_async

if TYPE_CHECKING:
    import asyncio  # takes a fifth of a process's start: imported only for async rewards

MAX_AWAITING = 128
IDLE = 0
_ENTRY = struct.Struct("<Qd")


class RunningMark:
    """16 bytes that pool and process share: the id of the running request (0: none) and when it began
    (system-wide clock). If a reward hangs in C code or kills its process, only the mark tells which one.
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


class RewardServer:
    def __init__(self, spec: RewardSpec, timeout_s: float) -> None:
        """Raises any error of importing the reward."""
        self.spec = spec
        self.function = build_reward(spec)
        self.timeout_s = timeout_s

    @property
    def places(self) -> int:
        return MAX_AWAITING if is_async(self.function) else 1

    def serve(self, requests: BinaryIO, results: BinaryIO, *descriptors: int) -> None:
        """`descriptors`: of the mark."""
        mark = RunningMark(*descriptors)
        os.close(*descriptors)  # out of reach of the rewards
        if is_async(self.function):
            import asyncio

            asyncio.run(self._serve_awaiting(requests, results, mark))
            return
        for number, item, response in pickles(requests):
            if item is None:  # withdrawn, but computed already
                continue
            mark.enter(number)
            try:
                answer = self._judged(item, response, self.function(item, response))
            except (Exception, SystemExit) as error:
                answer = {"failed": describe_with_traceback(error), "kind": "raised"}
            mark.leave()
            write_line(results, {"id": number, **answer})

    async def _serve_awaiting(self, requests: BinaryIO, results: BinaryIO, mark: RunningMark) -> None:
        """Run all async rewards concurrently. The pool never has more than MAX_AWAITING running."""
        import asyncio

        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Item | None, object] | None]()

        def read() -> None:
            for request in chain(pickles(requests), [None]):
                loop.call_soon_threadsafe(arrived.put_nowait, request)

        threading.Thread(target=read, daemon=True).start()
        # for rewards that put blocking calls into threads
        loop.set_default_executor(ThreadPoolExecutor(MAX_AWAITING))
        running: dict[int, asyncio.Task[None]] = {}

        async def call(item: Item, response: object) -> object:  # a coroutine, whatever the function returns
            return await self.function(item, response)

        async def score(number: int, item: Item, response: object) -> None:
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    answer = self._judged(item, response, await marked(call(item, response), number, mark))
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                if limit.expired():
                    answer = {"failed": f"took longer than {self.timeout_s:g} s", "kind": "timed-out"}
                else:
                    answer = {"failed": describe_with_traceback(error), "kind": "raised"}
            write_line(results, {"id": number, **answer})
            del running[number]

        while (request := await arrived.get()) is not None:
            number, item, response = request
            if item is not None:
                running[number] = asyncio.create_task(score(number, item, response))
                await asyncio.sleep(0)  # a task that is cancelled before it has begun would not answer
            elif number in running:
                running[number].cancel()

    def _judged(self, item: Item, response: object, value: object) -> dict[str, object]:
        """The answer to the pool. One more part says whether the response names the reference answer, if
        there is one to look for."""
        reward, answer = checked_reward(value), item.get("answer")
        parts = reward.parts
        if self.spec.adapter != "worked" and isinstance(answer, str) and isinstance(response, str):
            parts = {**parts, NAMES_ANSWER: float(names_answer(response, answer))}
        return {"reward": reward, "parts": parts, "fields": reward.fields}


@types.coroutine
def marked(work: Coroutine[Any, Any, Any], number: int, mark: RunningMark) -> Generator[Any, Any, Any]:
    """`await work`, marked as running only while `work` really runs, not while it awaits: blocking code in an
    async reward stops the whole event loop, and the pool must know which reward does so."""
    send, argument = work.send, None
    while True:
        mark.enter(number)
        try:
            awaited = send(argument)
        except StopIteration as ended:
            return ended.value
        finally:
            mark.leave()
        try:
            send, argument = work.send, (yield awaited)
        except BaseException as error:  # also a cancellation or a timeout: throw it into the work
            send, argument = work.throw, error
