"""The embedded engine in a process of its own: the same responses, loads from shared memory, and nobody waits for a dead child."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import Qwen3ForCausalLM

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.job.engines import ENGINE_CHILD
from asyncrl_cli.rollout import process_engine
from asyncrl_cli.rollout.engine import Completion, Sampling
from asyncrl_cli.rollout.engine_server import EngineServer
from asyncrl_cli.rollout.process_engine import ProcessEngine
from asyncrl_cli.rollout.transformers_engine import TransformersEngine
from asyncrl_cli.weights.buckets import pack
from tests.rollout import tiny

DEADLINE_S = 60.0
GONE_WITHIN_S = 20.0
ENDLESS = Sampling(temperature=0.1, max_response_tokens=900)
PROMPTS = [[5 + i // 4, 6, 7, *range(8, 8 + i // 4)] for i in range(12)]
"""Groups of four, of different lengths."""


def settings(model_dir: Path, **changes: Any) -> dict[str, Any]:
    sizes = {"slots": 8, "max_prompt_tokens": 64, "max_response_tokens": 900, "threads": 1, "version": 0}
    return {"model_dir": str(model_dir), **sizes, **changes}


class World:
    """One engine and the event loop that it lives in, for many tests: each loads versions of its own, always newer ones."""

    def __init__(self, model: Qwen3ForCausalLM, model_dir: Path) -> None:
        self.seen: list[int] = []
        self.engine = ProcessEngine(ENGINE_CHILD, settings(model_dir), on_running=self.seen.append)
        self.weights: dict[int, Any] = {0: model.state_dict()}
        self._model = model
        self._runner = asyncio.Runner()
        self.run(self.engine.start)

    def run(self, body: Callable[[], Awaitable[Any]]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(DEADLINE_S):
                return await body()

        return self._runner.run(bounded())

    def newer(self) -> int:
        """A version that was not there yet, whose responses hardly ever end early."""
        version = max(self.weights) + 1
        self.weights[version] = tiny.weights_after(self._model, version)
        self.weights[version]["lm_head.weight"][tiny.EOS] = 0.0
        return version

    def check(self, prompt: list[int], completion: Completion, temperature: float = 1.0) -> None:
        """Each token's logprob against plain forwards of the weights that sampled it (recompute-kv, or one version)."""
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions)
        for version in set(completion.versions):
            plain = tiny.plain_logprobs(self._model, self.weights[version], prompt + completion.tokens, temperature)[
                len(prompt) - 1 :
            ]
            pairs = zip(completion.logprobs, plain, completion.versions, strict=True)
            assert [a for a, _, v in pairs if v == version] == pytest.approx(
                [p for p, v in zip(plain, completion.versions, strict=True) if v == version], abs=1e-4
            )

    def close(self) -> None:
        self.run(self.engine.close)
        self._runner.close()


@pytest.fixture(scope="module")
def there(model: Qwen3ForCausalLM, model_dir: Path) -> Iterator[World]:
    world = World(model, model_dir)
    yield world
    world.close()


async def all_of(engine: Any, how: Sampling, name: str) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(f"{name}{i}", prompt, how, i) for i, prompt in enumerate(PROMPTS)))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (what it watches is told by another process)
        await asyncio.sleep(0.005)


def test_it_samples_what_the_engine_in_this_process_samples(there: World, model_dir: Path) -> None:
    how = Sampling(temperature=0.9, top_k=20, max_response_tokens=40)

    async def body() -> tuple[list[Completion], list[Completion]]:
        before = there.engine.sampled_tokens
        apart = await all_of(there.engine, how, "apart")
        assert there.engine.sampled_tokens - before == sum(len(completion.tokens) for completion in apart)
        embedded = TransformersEngine(**settings(model_dir))
        await embedded.start()
        try:
            return apart, await all_of(embedded, how, "here")
        finally:
            await embedded.close()

    apart, here = there.run(body)
    assert [(c.tokens, c.versions, c.finish_reason) for c in apart] == [(c.tokens, c.versions, c.finish_reason) for c in here]
    for one, other in zip(apart, here, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert max(there.seen) == 8
    assert there.seen[-1] == there.engine.running == 0
    assert there.engine.decode_steps > 0


@pytest.mark.parametrize("interrupt", ["drain", "recompute-kv"])
def test_loads_in_flight_from_buckets_and_from_tensors(there: World, interrupt: Any) -> None:
    how = Sampling(temperature=0.8, max_response_tokens=200)
    first, second = there.newer(), there.newer()

    async def body() -> list[Completion]:
        engine, began = there.engine, there.engine.sampled_tokens
        generating = asyncio.create_task(all_of(engine, how, "r"))
        await until(lambda: engine.sampled_tokens > began + 20)
        buckets = pack(there.weights[first], 300_000)
        received = await asyncio.to_thread(engine.receive, buckets, 100_000)
        report = await engine.load(received, first, interrupt)
        assert 0 < report.load_s <= report.pause_s
        assert engine.version == first
        await engine.load(there.weights[second], second, interrupt)
        assert engine.version == second
        return await generating

    completions = there.run(body)
    seen = {version for completion in completions for version in completion.versions}
    assert (first if interrupt == "drain" else second) in seen  # a drain is over with the last response, and 12 are two rounds
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.versions == sorted(completion.versions)
        assert interrupt == "recompute-kv" or len(set(completion.versions)) == 1
        there.check(prompt, completion, 0.8)


def test_weights_that_do_not_fit_are_refused_and_scores_are_of_those_that_are_held(there: World, model: Qwen3ForCausalLM) -> None:
    bad = tiny.weights_after(model, 1)
    del bad["lm_head.weight"]

    async def body() -> None:
        held = there.engine.version
        with pytest.raises(ValueError, match=r"weights of version 900 do not fit .* missing lm_head.weight"):
            await there.engine.load(bad, 900, "keep-kv")
        assert there.engine.version == held
        scores = await there.engine.score([[5, 6, 7, 8]], 0.7)
        assert scores.logprobs == [pytest.approx(tiny.plain_logprobs(model, there.weights[held], [5, 6, 7, 8], 0.7), abs=1e-4)]

    there.run(body)


def test_an_abort_returns_what_there_is_and_a_cancelled_call_frees_its_slot(there: World) -> None:
    async def body() -> None:
        engine = there.engine
        tasks = [asyncio.create_task(engine.generate(f"a{i}", [5, 6, 7], ENDLESS, 1)) for i in range(10)]
        await until(lambda: engine.tokens_of("a0") > 5)
        known = await engine.so_far("a0")
        await engine.abort("a9")  # it waits for a slot
        assert (await tasks[9]).tokens == []
        await engine.abort("a0")
        await engine.abort("unknown")
        aborted = await tasks[0]
        assert known is not None
        assert aborted.finish_reason == known.finish_reason == "abort"
        assert aborted.tokens[: len(known.tokens)] == known.tokens
        assert 5 < len(aborted.tokens) < 900
        there.check([5, 6, 7], aborted, 0.1)
        assert (engine.tokens_of("a0"), await engine.so_far("a0")) == (0, None)
        with pytest.raises(ValueError, match="a1 is running already"):
            await engine.generate("a1", [5], ENDLESS, 0)
        for task in tasks[1:9]:
            task.cancel()
        await asyncio.gather(*tasks[1:9], return_exceptions=True)
        await until(lambda: engine.running == 0)
        assert len((await engine.generate("next", [5, 6], Sampling(temperature=0.0, max_response_tokens=3), 0)).tokens) <= 3

    there.run(body)


def test_tokens_are_told_of_while_no_response_ends(there: World) -> None:
    async def body() -> None:
        engine, began = there.engine, there.engine.sampled_tokens
        running = asyncio.create_task(engine.generate("long", [5, 6, 7], ENDLESS, 1))
        await until(lambda: engine.sampled_tokens > began)
        first = engine.tokens_of("long")
        await until(lambda: engine.tokens_of("long") > first)
        assert not running.done()
        await engine.abort("long")
        assert engine.tokens_of("long") <= len((await running).tokens)

    there.run(body)


def test_a_killed_child_fails_what_runs_and_what_comes_later(model_dir: Path) -> None:
    async def body() -> None:
        engine = ProcessEngine(ENGINE_CHILD, settings(model_dir, slots=1))
        await engine.start()
        waits = [asyncio.create_task(engine.generate(f"r{i}", [5, 6, 7], ENDLESS, 0)) for i in range(2)]
        await until(lambda: engine.sampled_tokens > 0)
        waits.append(asyncio.create_task(engine.score([[5, 6]], 1.0)))  # type: ignore[arg-type]
        assert engine.child_pid is not None
        os.kill(engine.child_pid, signal.SIGKILL)
        errors = await asyncio.gather(*waits, return_exceptions=True)
        assert {str(error) for error in errors} == {"the rollout engine's process has ended (SIGKILL)"}
        assert all(isinstance(error, ExecutorFailed) for error in errors)
        with pytest.raises(ExecutorFailed, match="SIGKILL"):
            await engine.generate("late", [5], ENDLESS, 0)
        await engine.close()

    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))


def test_closing_fails_what_runs_and_ends_a_child_that_hangs(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_engine, "END_TIMEOUT_S", 0.2)

    async def body() -> None:
        engine = ProcessEngine(ENGINE_CHILD, settings(model_dir))
        await engine.start()
        running = asyncio.create_task(engine.generate("r", [5, 6, 7], ENDLESS, 0))
        await until(lambda: engine.sampled_tokens > 0)
        assert engine.child_pid is not None
        child = psutil.Process(engine.child_pid)
        child.suspend()
        await engine.close()
        assert not child.is_running()
        for call in (running, engine.generate("late", [5], ENDLESS, 0)):
            with pytest.raises(ExecutorFailed, match="the rollout engine is closed"):
                await call

    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    engine = ProcessEngine(ENGINE_CHILD, settings(tmp_path))
    with pytest.raises((ExecutorFailed, ValueError), match="tokenizer"):
        asyncio.run(engine.start())
    nothing = ProcessEngine("asyncrl_cli.no_such_module", settings(tmp_path))
    with pytest.raises(ExecutorFailed, match=r"process ended while it started \(exit code 1\)"):
        asyncio.run(nothing.start())


HOLD_AN_ENGINE = f"""
import asyncio, sys
from asyncrl_cli.rollout.process_engine import ProcessEngine

async def main():
    settings = dict(model_dir=sys.argv[1], slots=2, max_prompt_tokens=8, max_response_tokens=8, threads=1, version=0)
    engine = ProcessEngine("{ENGINE_CHILD}", settings)
    await engine.start()
    print("child", engine.child_pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_a_killed_owner_takes_the_child_along(model_dir: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLD_AN_ENGINE, str(model_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        child = psutil.Process(int(owner.stdout.readline().split()[1]))
    finally:
        owner.kill()
        owner.wait()
    psutil.wait_procs([child], timeout=GONE_WITHIN_S)
    assert not child.is_running()


def test_an_error_of_the_engine_that_nobody_else_knows_arrives_by_its_name() -> None:
    """Whatever a call raises in the child, another process can read it."""

    class Broken:
        async def generate(self, *arguments: Any) -> None:
            class HomeMade(RuntimeError):
                pass

            raise HomeMade("no luck")

    from asyncrl_cli.rollout.engine_messages import Asked

    async def body() -> list[tuple[int, Any]]:
        server = EngineServer(lambda *, on_running: Broken(), io.BytesIO())  # type: ignore[arg-type, return-value]
        await server._answer(Asked(7, "generate", ("r", [5], ENDLESS, 0, None)))
        return server._outcomes

    ((call_id, error),) = asyncio.run(body())
    assert (call_id, type(error), str(error)) == (7, ExecutorFailed, "HomeMade: no luck")
