"""vLLM's processes: how they are started, how they are asked, and that nobody waits for them once they are dead.

    this process: AsyncLLM ──ZMQ──> engine process: scheduler ──> worker process(es): model

When an engine process dies, vLLM fails the requests that generate. What else it was asked (to pause, to load, to resume) is
never answered: `answer` is how we wait for that. The other way round: a killed parent takes them along (weights/vllm_plugin.py).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.rollout.vllm_counters import VllmCounters, logger_into
from asyncrl_cli.rollout.vllm_settings import VllmSetup, check_engine_args, engine_arguments

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
LOOK_S = 0.2
"""How often `answer` looks whether the engine still lives."""


def start_llm(setup: VllmSetup, counters: VllmCounters) -> AsyncLLM:
    """Blocks until the model is loaded and the cache allocated. Its stat logger adds to `counters`."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from asyncrl_cli.weights.vllm_plugin import BACKEND

    check_engine_args(setup.options.engine_args, setup.device)
    engine_args = AsyncEngineArgs(**engine_arguments(setup), weight_transfer_config=WeightTransferConfig(backend=BACKEND))
    return AsyncLLM.from_engine_args(engine_args, stat_loggers=[logger_into(counters)])


async def answer(llm: AsyncLLM, asked: Coroutine[Any, Any, T]) -> T:
    """What vLLM answers; ExecutorFailed if an engine process is dead or dies meanwhile."""
    task = asyncio.ensure_future(asked)
    try:
        while not task.done():
            if llm.errored:
                raise dead(llm)
            await asyncio.wait([task], timeout=LOOK_S)
        if llm.errored and task.exception() is not None:
            raise dead(llm) from task.exception()
        return task.result()
    finally:
        task.cancel()


def dead(llm: AsyncLLM) -> ExecutorFailed:
    """Says which process ended and how, as far as vLLM knows."""
    manager = getattr(llm.engine_core.resources, "engine_manager", None)
    ended = manager.finished_procs() if manager is not None else {}
    how = ", ".join(f"{name} with {_how_it_ended(code)}" for name, code in ended.items()) or "its last words are in the log"
    return ExecutorFailed(f"vLLM's engine process has ended ({how})")


def told(error: BaseException) -> str:
    if isinstance(error, ExecutorFailed):
        return error.message
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__


def _how_it_ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
