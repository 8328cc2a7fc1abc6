"""vLLM's processes: how they are started, how they are asked, and that nobody waits for them once they are dead.

    this process: AsyncLLM ──ZMQ──> engine process: scheduler ─> model (tensor_parallel_size > 1: worker processes)

When an engine process dies, vLLM fails the requests that generate. What else it was asked (to pause, to load, to resume) is
never answered: `answer` is how we wait for that. The other way round: a killed parent takes them along (engines/vllm/plugin.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from asyncrl_cli.engines.vllm.arguments import check_engine_args
from asyncrl_cli.engines.vllm.counters import VllmCounters, logger_into
from asyncrl_cli.engines.vllm.log import EngineLog, how_it_ended
from asyncrl_cli.engines.vllm.settings import engine_arguments, weight_backend
from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.profile.place import Place
from asyncrl_cli.profile.schema import Profile

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
LOOK_S = 0.2
"""How often `answer` looks whether the engine still lives."""
END_TIMEOUT_S = 10.0
logger = logging.getLogger(__name__)
_logs: WeakKeyDictionary[AsyncLLM, EngineLog] = WeakKeyDictionary()
"""What each engine's processes have written since it was started."""


def import_vllm() -> None:
    """Before `start_llm`, and not called by what will hold the engine: vLLM keeps an error of its own import, and that
    the frames of all its callers, for ever. An engine that one of them refers to lives until the interpreter's end, where it cannot
    tidy up."""
    importlib.import_module("vllm.v1.engine.async_llm")


def start_llm(profile: Profile, place: Place, counters: VllmCounters) -> AsyncLLM:
    """Blocks until the model is loaded and the cache allocated. Its stat logger adds to `counters`.

    ExecutorFailed, with what the log tells of it, if one of its processes ends instead.
    """
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    check_engine_args(profile, place.device, {entry.name for entry in dataclasses.fields(AsyncEngineArgs)})
    transfer = WeightTransferConfig(backend=weight_backend(profile))
    engine_args = AsyncEngineArgs(**engine_arguments(profile, place), weight_transfer_config=transfer)
    log = EngineLog()
    try:
        llm = AsyncLLM.from_engine_args(engine_args, stat_loggers=[logger_into(counters)])
    except RuntimeError as error:  # "see root cause above": it was another process's, and is in the log
        raise ExecutorFailed(f"vLLM did not start: {log.why() or error}") from error
    _logs[llm] = log
    return llm


async def answer(llm: AsyncLLM, asked: Awaitable[T]) -> T:
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


async def end_processes(llm: AsyncLLM) -> None:
    """Kill vLLM's processes, which may wait for something that never comes. Returns when vLLM knows, so that nobody asks them.

    If vLLM does not notice in time, that is only a warning: the caller has an error of its own to raise."""
    for process in llm.engine_core.resources.engine_manager.processes:
        process.kill()
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            while not llm.errored:  # noqa: ASYNC110  (vLLM's own thread sets it)
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        logger.warning("vLLM has not noticed in %g s that its engine processes were killed", END_TIMEOUT_S)


def dead(llm: AsyncLLM) -> ExecutorFailed:
    """Says which process ended and how, as far as vLLM or its log knows. (Of its own children only the engine process knows.)"""
    manager = getattr(llm.engine_core.resources, "engine_manager", None)
    ended = manager.finished_procs() if manager is not None else {}
    killed = {name: code for name, code in ended.items() if code < 0}
    log = _logs.get(llm) or EngineLog()
    # A worker's death first: vLLM ends the engine process after it.
    how = log.killed_worker() or _listed(killed) or log.why() or _listed(ended)
    return ExecutorFailed(f"vLLM's engine process has ended ({how or 'its last words are in the log'})")


def told(error: BaseException) -> str:
    if isinstance(error, ExecutorFailed):
        return error.message
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__


def _listed(ended: Mapping[str, int]) -> str:
    return ", ".join(f"{name} with {how_it_ended(code)}" for name, code in ended.items())
