"""The child's side of `ProcessEngine`: calls come in frames, an engine on this process's event loop answers them.

    stdin -> a task per call -> engine -> outcomes of one turn of the event loop, and the engine's state -> stdout

Who waits for whom: every task for the engine; the loop for stdin, whose end ends the engine and all that runs. Writing a frame
waits for a parent that does not read, as long as that takes: it has nothing to be told then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from asyncrl_cli.loop.ports import Interrupt
from asyncrl_cli.rollout.engine import Completion, Engine, PauseReport, Sampling, Scores
from asyncrl_cli.rollout.engine_messages import CANCEL, Asked, Started, Told, portable
from asyncrl_cli.tasks.frames import pack, read_frame_async
from asyncrl_cli.weights.shared import Shared, mapped

TELL_S = 0.1
"""How often tokens are told of that belong to no finished response yet."""


class MakeEngine(Protocol):
    def __call__(self, *, on_running: Callable[[int], None]) -> Engine: ...


class EngineServer:
    def __init__(self, make_engine: MakeEngine, results: BinaryIO) -> None:
        self._engine = make_engine(on_running=lambda running: self._plan_tell())
        self._results = results
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._generating: set[str] = set()
        self._outcomes: list[tuple[int, Any]] = []
        self._is_planned = False
        self._started = False

    async def serve(self, requests: BinaryIO) -> None:
        """Until `requests` ends."""
        try:
            await self._engine.start()
        except Exception as error:
            self._write(Started(portable(error)))
            raise
        self._write(Started())
        self._started = True
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        telling = asyncio.create_task(self._tell_tokens())
        while (frame := await read_frame_async(reader)) is not None:
            for asked in frame:
                self._begin(asked)
        telling.cancel()
        for task in self._tasks.values():
            task.cancel()
        await self._engine.close()

    def _begin(self, asked: Asked) -> None:
        """Everything in a task of its own, so that calls begin in their order: an abort after what it aborts."""
        if asked.method == CANCEL:
            task = self._tasks.get(asked.arguments[0])
            if task is not None:
                task.cancel()
            return
        task = asyncio.create_task(self._answer(asked))
        self._tasks[asked.call_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(asked.call_id))

    async def _answer(self, asked: Asked) -> None:
        outcome: Any
        try:
            outcome = await getattr(self, asked.method)(*asked.arguments)
        except Exception as error:
            outcome = portable(error)
        self._outcomes.append((asked.call_id, outcome))
        self._plan_tell()

    async def generate(
        self, request_id: str, prompt_tokens: list[int], sampling: Sampling, seed: int, so_far: Completion | None
    ) -> Completion:
        self._generating.add(request_id)
        try:
            return await self._engine.generate(request_id, prompt_tokens, sampling, seed, so_far)
        finally:
            self._generating.discard(request_id)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def so_far(self, request_id: str) -> Completion | None:
        return await self._engine.so_far(request_id)

    async def load(self, shared: Shared, version: int, interrupt: Interrupt) -> PauseReport:
        return await self._engine.load(mapped(shared), version, interrupt)

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        return await self._engine.score(sequences, temperature)

    async def _tell_tokens(self) -> None:
        """A long response has no outcome for minutes; that it grows shows that nobody hangs."""
        told = -1
        while True:
            await asyncio.sleep(TELL_S)
            if self._engine.sampled_tokens != told:
                told = self._engine.sampled_tokens
                self._tell({request_id: self._engine.tokens_of(request_id) for request_id in self._generating})

    def _plan_tell(self) -> None:
        """All outcomes and changes of this turn of the event loop become one frame."""
        if self._started and not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self, tokens: dict[str, int] | None = None) -> None:
        self._is_planned = False
        engine = self._engine
        outcomes, self._outcomes = tuple(self._outcomes), []
        self._write(Told(outcomes, engine.version, engine.running, engine.sampled_tokens, engine.decode_steps, tokens))

    def _write(self, value: Any) -> None:
        self._results.write(pack(value))
        self._results.flush()
