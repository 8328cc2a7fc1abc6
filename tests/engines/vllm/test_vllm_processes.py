"""What is asked of vLLM's processes when they fail. They are played here: nothing needs vLLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.engines.vllm import engine_processes
from asyncrl_cli.engines.vllm.engine_processes import end_processes
from asyncrl_cli.engines.vllm.worker_transports import paused


class Process:
    """One that vLLM has started; `on_kill`: what vLLM then notices."""

    def __init__(self, on_kill: Callable[[], None] = lambda: None) -> None:
        self.on_kill = on_kill
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True
        self.on_kill()


class Llm:
    """AsyncLLM, as far as a pause knows it."""

    def __init__(self) -> None:
        self.errored = False
        self.asked: list[str] = []
        self.pausing: Callable[[], Coroutine[Any, Any, None]] = lambda: asyncio.sleep(0)
        self.process = Process()
        self.engine_core = SimpleNamespace(
            resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[self.process]))
        )

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.asked.append(f"pause {mode} {clear_cache}")
        await self.pausing()

    async def resume_generation(self) -> None:
        self.asked.append("resume")

    def shutdown(self, timeout_s: float) -> None:
        self.asked.append("shutdown")
        raise RuntimeError("a process does not go")


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """By the module itself: the garbage collector may have asyncio complain of what other tests have left."""
    return [record.getMessage() for record in caplog.records if record.name == engine_processes.__name__]


def test_killed_processes_that_vllm_does_not_miss_are_a_warning_beside_the_real_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_processes, "END_TIMEOUT_S", 0.01)
    llm = Llm()

    async def fail() -> None:
        try:
            raise ExecutorFailed("the meeting failed")
        except ExecutorFailed:
            await end_processes(llm)  # type: ignore[arg-type]
            raise

    with caplog.at_level(logging.WARNING), pytest.raises(ExecutorFailed, match="the meeting failed"):
        asyncio.run(fail())
    assert llm.process.is_killed
    assert warned(caplog) == ["vLLM has not noticed in 0.01 s that its engine processes were killed"]


def test_killed_processes_that_vllm_misses_are_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    llm = Llm()
    llm.process.on_kill = lambda: setattr(llm, "errored", True)
    asyncio.run(end_processes(llm))  # type: ignore[arg-type]
    assert llm.process.is_killed
    assert warned(caplog) == []


def test_an_engine_that_has_failed_in_a_pause_is_not_asked_to_resume() -> None:
    llm = Llm()

    async def body() -> None:
        async with paused(llm, "keep-kv"):  # type: ignore[arg-type]
            raise MemoryError("half-way")

    with pytest.raises(MemoryError):
        asyncio.run(body())
    assert llm.asked == ["pause keep False"]


async def test_a_pause_that_is_cancelled_before_it_begins_lets_generation_go_on() -> None:
    llm = Llm()

    async def never() -> None:
        await asyncio.Event().wait()

    async def load() -> None:
        async with paused(llm, "drain"):  # type: ignore[arg-type]
            raise AssertionError("it is not paused")

    llm.pausing = never
    loading = asyncio.create_task(load())
    while not llm.asked:  # noqa: ASYNC110  (it asks in its first turns)
        await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert llm.asked == ["pause wait True", "resume"]


async def test_a_pause_ends_with_a_resume() -> None:
    llm = Llm()

    async with paused(llm, "recompute-kv"):  # type: ignore[arg-type]
        llm.asked.append("load")
    assert llm.asked == ["pause keep True", "load", "resume"]
