"""vLLM's processes: how they are started, how they are asked, and that nobody waits for them once they are dead.

    this process: AsyncLLM ──ZMQ──> engine process: scheduler ─> model (tensor_parallel_size > 1: worker processes)

When an engine process dies, vLLM fails the requests that generate. What else it was asked (to pause, to load, to resume) is
never answered: `answer` is how we wait for that. The other way round: a killed parent takes them along (engines/vllm/plugin.py).

Why a process ended is in its log: they all write to the stdout that they share with us. In a rollout worker that is its log file.
(A terminal or a pipe cannot be read again: nothing is known then.)
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import signal
import stat
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from asyncrl_cli.engines.vllm.launch import check_engine_args, engine_arguments, weight_backend
from asyncrl_cli.engines.vllm.requests import VllmCounters
from asyncrl_cli.errors import AsyncrlError, ExecutorFailed
from asyncrl_cli.profile.schema import Place, Profile

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
LOOK_S = 0.2
"""How often `answer` looks whether the engine still lives."""
END_TIMEOUT_S = 10.0
STDOUT = 1
TAIL_BYTES = 512 * 1024
LONGEST_ERROR = 400
"""Characters of it in a message; all of it is in the log."""
DIED = re.compile(r"Worker proc (\S+) died unexpectedly \(exit code: (-\d+)\)")
ERROR = re.compile(r"^(?:.*\bERROR\b[^\]\n]*\] )?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b(?:: .*)?)$", re.MULTILINE)
"""The last line of a traceback, as vLLM's loggers write it (with process, level, time and place before it), or bare."""
POINTS_ELSEWHERE = re.compile(r"see (the )?(root cause|stack trace|error)", re.IGNORECASE)
logger = logging.getLogger(__name__)


class EngineLog:
    """What has been written since this was made: the log of a restarted worker begins with its predecessor's."""

    def __init__(self, descriptor: int = STDOUT) -> None:
        self._descriptor = descriptor
        self._begin = self._size()

    def killed_worker(self) -> str:
        """The worker process that a signal has ended, as the engine process saw it; "" if none was."""
        found = DIED.search(self._tail())
        return _ended(found[1], int(found[2])) if found else ""

    def why(self) -> str:
        """The signal or the last error with which a process of the engine has ended; "" if the log has neither."""
        errors = [error for error in ERROR.findall(self._tail()) if not POINTS_ELSEWHERE.search(error)]
        last = errors[-1] if errors else ""
        return self.killed_worker() or (last if len(last) <= LONGEST_ERROR else f"{last[:LONGEST_ERROR]}...")

    def _tail(self) -> str:
        size = self._size()
        begin = max(self._begin, size - TAIL_BYTES)
        if size <= begin:
            return ""
        try:
            # Opened anew: ours may be open for writing only.
            with open(f"/proc/self/fd/{self._descriptor}", "rb") as log:
                log.seek(begin)
                return log.read(size - begin).decode(errors="replace")
        except OSError:
            return ""

    def _size(self) -> int:
        """Bytes of a regular file; 0 for anything else."""
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else 0


_logs: WeakKeyDictionary[AsyncLLM, EngineLog] = WeakKeyDictionary()
"""Of each engine, since its start."""


def start_llm(profile: Profile, place: Place, counters: VllmCounters) -> AsyncLLM:
    """Blocks until the model is loaded and the cache allocated. `counters` is its stat logger.

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
        llm = AsyncLLM.from_engine_args(engine_args, stat_loggers=[lambda config, index: counters])
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
    """Kill vLLM's processes, which may wait for something that never comes. Returns once vLLM has noticed: nobody asks them then.

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
    """Says which process ended and how, as far as vLLM or its log knows. (Only the engine process knows of its own children.)"""
    manager = getattr(llm.engine_core.resources, "engine_manager", None)
    ended = manager.finished_procs() if manager is not None else {}
    killed = {name: code for name, code in ended.items() if code < 0}
    log = _logs.get(llm) or EngineLog()
    # A worker's death first: vLLM ends the engine process after it.
    how = log.killed_worker() or _listed(killed) or log.why() or _listed(ended)
    return ExecutorFailed(f"vLLM's engine process has ended ({how or 'its last words are in the log'})")


def told(error: BaseException) -> str:
    if isinstance(error, AsyncrlError):
        return error.message
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__


def _listed(ended: Mapping[str, int]) -> str:
    return ", ".join(_ended(name, code) for name, code in ended.items())


def _ended(name: str, code: int) -> str:
    return f"{name} with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
