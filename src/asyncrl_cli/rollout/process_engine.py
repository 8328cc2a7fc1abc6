"""An engine in a child process, behind the same port: what else its worker does takes no time from the forward passes.

    generate, load, ... -> one frame per turn of the event loop -> child: EngineServer -> TransformersEngine
    futures, mirrored state <- Told                             <-

An embedded engine computes in a thread; in one process that thread waits for Python's interpreter lock whenever Ray, the groups or
the rewards hold it. (Measured: an eighth of a run's speed with a small model.) Weights do not travel: the child maps them.

Who waits for whom: a call for its outcome. `_read` resolves it, or fails all of them when the child's stdout ends; every later call
fails then, too. `close` waits for the child, `END_TIMEOUT_S` at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.loop.ports import Interrupt
from asyncrl_cli.rollout.engine import (
    NO_COUNTERS,
    Completion,
    EngineCounters,
    PauseReport,
    Sampling,
    Scores,
    check_request,
)
from asyncrl_cli.rollout.engine_messages import CANCEL, Asked, Started, Told
from asyncrl_cli.tasks.child import command, environment, how_it_ended
from asyncrl_cli.tasks.frames import pack, read_frame_async
from asyncrl_cli.weights.shared import SharedWeights

if TYPE_CHECKING:
    import torch

    from asyncrl_cli.weights.buckets import Bucket

END_TIMEOUT_S = 5.0


class ProcessEngine:
    """See `engine.Engine`. `program` is the module that the child runs, `settings` (picklable) the arguments of the engine in it:
    slots, version, max_prompt_tokens and max_response_tokens at least."""

    def __init__(
        self,
        program: str,
        settings: Mapping[str, Any],
        *,
        on_running: Callable[[int], None] = lambda running: None,
    ) -> None:
        self.slots: int = settings["slots"]
        self._program = program
        self._settings = settings
        self._sizes = {name: settings[name] for name in ("max_prompt_tokens", "max_response_tokens")}
        self._on_running = on_running
        self._state = Told((), settings["version"], running=0, sampled_tokens=0, decode_steps=0)
        self._tokens: Mapping[str, int] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._unsent: list[Asked] = []
        self._last_id = 0
        self._generating: set[str] = set()
        self._ended = ""

    @property
    def version(self) -> int:
        return self._state.version

    @property
    def running(self) -> int:
        return self._state.running

    @property
    def sampled_tokens(self) -> int:
        return self._state.sampled_tokens

    @property
    def decode_steps(self) -> int:
        return self._state.decode_steps

    @property
    def child_pid(self) -> int | None:
        return self._process.pid if self._process else None

    def counters(self) -> EngineCounters:
        return NO_COUNTERS

    def tokens_of(self, request_id: str) -> int:
        """As of the last tenth of a second."""
        return self._tokens.get(request_id, 0) if request_id in self._generating else 0

    async def so_far(self, request_id: str) -> Completion | None:
        if request_id not in self._generating:
            return None
        known: Completion | None = await self._ask("so_far", request_id)
        return known

    async def start(self) -> None:
        """Start the child and wait until its model is loaded. Raises what failed there."""
        self._process = await asyncio.create_subprocess_exec(
            *command(self._program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment(),
            start_new_session=True,  # a Ctrl-C at the terminal is the driver's to handle
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(pack(self._settings))
        try:
            started: Started | None = await read_frame_async(self._process.stdout)
        except BaseException:
            self._kill()
            raise
        if started is None or started.failure is not None:
            self._kill()
            await self._process.communicate()  # and close its pipes
            how = how_it_ended(self._process.returncode)
            raise (started and started.failure) or ExecutorFailed(f"the rollout engine's process ended while it started ({how})")
        self._reading = asyncio.create_task(self._read(self._process), name="rollout engine")

    async def close(self) -> None:
        """The child reads the end of its stdin, ends its engine and goes, or is killed."""
        self._end("the rollout engine is closed")
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            self._kill()
            await process.wait()
            if self._reading is not None:
                await self._reading

    async def generate(
        self, request_id: str, prompt_tokens: list[int], sampling: Sampling, seed: int, so_far: Completion | None = None
    ) -> Completion:
        if request_id in self._generating:
            raise ValueError(f"request {request_id} is running already")
        check_request(request_id, prompt_tokens, sampling, so_far, **self._sizes)
        self._generating.add(request_id)
        try:
            completion: Completion = await self._ask("generate", request_id, prompt_tokens, sampling, seed, so_far)
            return completion
        finally:
            self._generating.discard(request_id)

    async def abort(self, request_id: str) -> None:
        if request_id in self._generating:
            await self._ask("abort", request_id)

    def receive(self, buckets: Iterable[Bucket], load_bucket_size_bytes: int) -> SharedWeights:
        """One copy, as they arrive, into memory that the child maps."""
        return SharedWeights.of_buckets(buckets)

    async def prepare(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Nothing: they are copied as they were received."""

    async def load(self, weights: Mapping[str, torch.Tensor], version: int, interrupt: Interrupt) -> PauseReport:
        shared = weights if isinstance(weights, SharedWeights) else await asyncio.to_thread(SharedWeights.of_tensors, weights)
        report: PauseReport = await self._ask("load", shared.place, version, interrupt)
        return report

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        scores: Scores = await self._ask("score", sequences, temperature)
        return scores

    async def sleep(self) -> None:
        """Weights and cache stay where they are: on a CPU the machine's memory is the trainer's anyway."""

    async def wake(self) -> None:
        pass

    async def _ask(self, method: str, *arguments: Any) -> Any:
        if self._ended:
            raise ExecutorFailed(self._ended)
        self._last_id += 1
        call_id = self._last_id
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(Asked(call_id, method, arguments))
        try:
            return await future
        except asyncio.CancelledError:
            self._send(Asked(0, CANCEL, (call_id,)))
            raise
        finally:
            del self._calls[call_id]

    def _send(self, asked: Asked) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(asked)

    def _flush(self) -> None:
        """Everything asked in this turn of the event loop becomes one frame."""
        asked, self._unsent = self._unsent, []
        assert self._process is not None
        assert self._process.stdin is not None
        if not self._ended:
            self._process.stdin.write(pack(asked))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while (told := await read_frame_async(process.stdout)) is not None:
                self._take(told)
            self._kill()
            how = how_it_ended(await process.wait())
            self._end(f"the rollout engine's process has ended ({how})")
        except Exception as error:  # a frame that is none: nothing that comes after it could be read
            self._kill()
            self._end(f"the rollout engine's process cannot be understood: {type(error).__name__}: {error}")

    def _take(self, told: Told) -> None:
        was_running, self._state = self._state.running, told
        if told.tokens is not None:
            self._tokens = told.tokens
        if told.running != was_running:
            self._on_running(told.running)
        for call_id, outcome in told.outcomes:
            future = self._calls.get(call_id)
            if future is None or future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _end(self, why: str) -> None:
        """All calls fail, now and later; the first reason counts."""
        self._ended = self._ended or why
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ExecutorFailed(self._ended))

    def _kill(self) -> None:
        """With whatever it has started: the child leads a process group of its own."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
