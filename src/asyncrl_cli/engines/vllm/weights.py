"""A load in vLLM's words: prepare beside generation; pause, finish, resume."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from asyncrl_cli.engines.vllm.processes import answer, told
from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.loop.ports import Interrupt

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

FAILED = "vLLM could not prepare the next weights"


@contextlib.asynccontextmanager
async def paused(llm: AsyncLLM, interrupt: Interrupt) -> AsyncIterator[None]:
    """No forward pass runs inside; without `keep-kv` all caches are empty at the end.

    If the pause fails or is cancelled, generation goes on. If the block raises, the engine has failed and nobody asks it to resume:
    its processes may wait for bytes that never come, and would not answer."""
    try:
        mode = "wait" if interrupt == "drain" else "keep"
        await answer(llm, llm.pause_generation(mode=mode, clear_cache=interrupt != "keep-kv"))
    except BaseException:
        if not llm.errored:
            await answer(llm, llm.resume_generation())
        raise
    yield
    await answer(llm, llm.resume_generation())


class Updates:
    """One version after the other into vLLM's workers. They tell through a pipe, open for the engine's life, when they are ready:
    vLLM's own calls would keep its engine process, and with it generation, waiting for so long."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._beginning: asyncio.Future[None] | None = None
        """vLLM's update stays open when a prepared version is given up; the next one goes on in it."""
        self._number = 0
        self._told = asyncio.StreamReader()
        self._ends = contextlib.ExitStack()
        """Of the pipe."""

    async def open(self) -> None:
        reading, self._writing = os.pipe()
        self._ends.callback(os.close, self._writing)
        pipe = self._ends.enter_context(os.fdopen(reading, "rb"))
        protocol = asyncio.StreamReaderProtocol(self._told)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        self._ends.callback(transport.close)

    def close(self) -> None:
        """Also of one that was never opened, or not wholly."""
        self._ends.close()

    async def prepare(self, announced: dict[str, Any]) -> None:
        """`announced`: `SharedWeights.describe`; that memory is read until this returns, and by `finish`. Nothing has changed for
        generation. ExecutorFailed with a worker's own error; another version can be prepared after it."""
        self._number += 1
        try:
            await self._ask(announced)
        except ExecutorFailed:
            raise
        except Exception as error:  # it was refused; or a worker has just died, and vLLM does not know it yet
            self._beginning = None  # vLLM has ended the update
            raise ExecutorFailed(f"{FAILED}: {told(error)}") from error
        for _ in range(self._llm.vllm_config.parallel_config.world_size):
            await self._one_is_ready()

    async def _ask(self, announced: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._beginning is None:
            self._beginning = asyncio.ensure_future(self._llm.start_weight_update())
        await answer(self._llm, asyncio.shield(self._beginning))  # asked in full, also if nobody waits for the answer any more
        pipe = f"/proc/{os.getpid()}/fd/{self._writing}"
        request = WeightTransferUpdateRequest(update_info=announced | {"number": self._number, "tell": pipe})
        await answer(self._llm, self._llm.update_weights(request))

    async def _one_is_ready(self) -> None:
        number = 0
        while number != self._number:  # lines of versions that were given up may still come
            line = (await answer(self._llm, self._told.readline())).decode().rstrip("\n")
            number, failure = int(line.partition(" ")[0]), line.partition(" ")[2]
        if failure:
            raise ExecutorFailed(f"{FAILED}: {failure}")

    async def finish(self, version: int) -> None:
        """Within `paused`: what was prepared goes in. If it raises, layers may be of either version."""
        self._beginning = None
        await answer(self._llm, self._llm.finish_weight_update(weight_version=str(version)))
