"""One running engine (vLLM, unless a test brings another) and the event loop that it lives in."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from transformers import Qwen3ForCausalLM

from asyncrl_cli.engines.port import Completion, PauseReport, Sampling
from asyncrl_cli.engines.vllm.engine_processes import answer
from asyncrl_cli.engines.vllm.vllm_engine import VllmEngine
from asyncrl_cli.profile.schema import Interrupt
from asyncrl_cli.weights.receivers import SharedWeights
from tests.engines import tiny
from tests.engines.made import made_for
from tests.engines.vllm.vllm_pace import Paced, beating
from tests.packed import pack

DEADLINE_S = 300.0
MAX_PROMPT_TOKENS = 64
MAX_RESPONSE_TOKENS = 256
FUNCTIONS_MAY_BE_SENT = ("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
"""In the environment of an engine's start."""
KEPT: list[Any] = []
"""ZMQ contexts of ended engines. vLLM leaves them to the garbage collector, which warns, in whatever test it
happens to run; at the end of the interpreter nobody does."""


class World:
    """`weights[version]` are those that the engine held; each test loads versions of its own, always newer
    ones."""

    def __init__(
        self, model: Qwen3ForCausalLM, engine: VllmEngine, runner: asyncio.Runner, beats: Path
    ) -> None:
        self.model = model
        self.engine = engine
        self.weights: dict[int, dict[str, Any]] = {0: model.state_dict()}
        self._runner = runner
        self._beats = beats
        self._num_requests = 0

    def run(self, body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(DEADLINE_S), beating(self._beats):
                return await body()

        return self._runner.run(bounded())

    def newer(self) -> int:
        """A version that was not there yet, with weights of its own, whose responses hardly ever end
        early."""
        version = max(self.weights) + 1
        weights = tiny.weights_after(self.model, 1 + version % 5)
        head = "model.embed_tokens.weight" if self.model.config.tie_word_embeddings else "lm_head.weight"
        weights[head][tiny.EOS] = 0.0
        self.weights[version] = weights
        return version

    async def load(self, version: int, interrupt: Interrupt) -> PauseReport:
        return await self.load_these(self.weights[version], version, interrupt)

    async def load_these(self, weights: dict[str, Any], version: int, interrupt: Interrupt) -> PauseReport:
        """As they arrive from rank 0."""
        received = SharedWeights(pack(weights, 300_000))
        return await self.engine.load(received, version, interrupt)

    async def all_of(self, requests: list[list[int]], how: Sampling) -> list[Completion]:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.generate(prompt, how)) for prompt in requests]
        return [task.result() for task in running]

    async def generate(
        self, prompt: list[int], how: Sampling, seed: int | None = None, **turn: Any
    ) -> Completion:
        """`turn`: `first_version`, for a later one."""
        self._num_requests += 1
        seed = self._num_requests if seed is None else seed
        return await self.engine.generate(f"r{self._num_requests}", prompt, how, seed, **turn)

    async def sampled(self, tokens: int) -> None:
        """Until that many more tokens are there."""
        until = self.engine.sampled_tokens + tokens
        while self.engine.sampled_tokens < until:  # noqa: ASYNC110  (it is counted where the tokens come in)
            await asyncio.sleep(0)

    async def in_engine(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of ours in the process that holds the model, with vLLM's worker as its first
        argument. The engine must have been started with `FUNCTIONS_MAY_BE_SENT`."""
        assert self.engine.llm is not None
        return (await answer(self.engine.llm, self.engine.llm.collective_rpc(function, args=args)))[0]

    @asynccontextmanager
    async def replaced(self, name: str, how: str) -> AsyncIterator[None]:
        """A function of `engines/vllm/bucket_engine.py` does otherwise in the block."""
        await self.in_engine(replace, name, how)
        try:
            yield
        finally:
            await self.in_engine(replace, name, "original")

    def plain(
        self, version: int, prompt: list[int], completion: Completion, temperature: float = 1.0
    ) -> list[float]:
        """Of the response's tokens, by a plain transformers forward of one version's weights."""
        found = tiny.plain_logprobs(
            self.model, self.weights[version], prompt + completion.tokens, temperature
        )
        return found[len(prompt) - 1 :]


def replace(worker: Any, name: str, how: str) -> None:
    """For `in_engine`: a function of `engines/vllm/bucket_engine.py` does otherwise from here on."""
    from asyncrl_cli.engines.vllm import bucket_engine

    def fails(*args: Any) -> None:
        raise MemoryError("no memory for packing")

    original = vars(bucket_engine).setdefault(f"original_{name}", getattr(bucket_engine, name))
    ways = {
        "original": original,
        "does nothing": lambda *args: None,
        "fails": fails,
        "never returns": lambda *args: threading.Event().wait(),
    }
    setattr(bucket_engine, name, ways[how])


@contextmanager
def world(
    model: Qwen3ForCausalLM, directory: Path, kind: type[World] = World, **changes: Any
) -> Iterator[World]:
    with asyncio.Runner() as runner, tempfile.NamedTemporaryFile() as beats:
        beats.write(bytes(8))
        beats.flush()
        settings = dict(slots=8, max_prompt_tokens=MAX_PROMPT_TOKENS, max_response_tokens=MAX_RESPONSE_TOKENS)
        engine_args = {
            "worker_extension_cls": f"{Paced.__module__}.{Paced.__name__}",
            **changes.pop("engine_args", {}),
        }
        engine = VllmEngine(*made_for(directory, engine_args=engine_args, **(settings | changes)))
        there = kind(model, engine, runner, Path(beats.name))
        try:
            runner.run(engine.start())
            assert engine.llm is not None
            KEPT.append(engine.llm.engine_core.resources.ctx)
            runner.run(answer(engine.llm, engine.llm.collective_rpc("keep_pace", args=(beats.name,))))
            yield there
        finally:
            there.run(engine.close)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
