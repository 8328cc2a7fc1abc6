"""In the rollout worker's process: starts vLLM's processes, waits for their answers without hanging when one
of them dies, and finds out why it died.

    this process: AsyncLLM ──ZMQ──> engine process: scheduler ─> model
                                    (tensor_parallel_size > 1: the model is in worker processes of its own)

When an engine process dies, vLLM fails the requests that generate, but never answers other calls (pause,
load, resume): `answer` waits for those and notices the death. In the other direction, a killed parent ends
its children (plugin.py).

The reason for a death is in the log: all of vLLM's processes write to our stdout, which in a rollout worker
is its log file. (A terminal or a pipe cannot be read again, so there the reason stays unknown.)
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Awaitable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from asyncrl_cli.base.child_process import how_it_ended
from asyncrl_cli.base.errors import AsyncrlError, ConfigError, ExecutorFailed, timeout
from asyncrl_cli.base.safe_files import first_problem
from asyncrl_cli.engines.vllm.launch import (
    MERGE,
    check_engine_args,
    check_experts,
    engine_arguments,
    weight_backend,
)
from asyncrl_cli.engines.vllm.requests import VllmCounters
from asyncrl_cli.profile.schema import ProcessPlace, Profile

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerFactory

T = TypeVar("T")
LOOK_S = 0.2
"""How often `answer` checks that the engine is alive."""
END_TIMEOUT_S = 10.0
STDOUT = 1
TAIL_BYTES = 512 * 1024
LONGEST_ERROR = 400
"""A message quotes at most this many characters of an error from the log."""
DIED = re.compile(r"Worker proc (\S+) died unexpectedly \(exit code: (-\d+|None)\)")
"""The exit code is None if vLLM looks before the kernel has it: the worker was killed, or logged its error
before it failed."""
ERROR = re.compile(
    r"^(?:.*\bERROR\b[^\]\n]*\] )?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b(?:: .*)?)$", re.MULTILINE
)
"""The last line of a traceback, as vLLM's loggers write it (with process, level, time and place before it),
or bare."""
POINTS_ELSEWHERE = re.compile(r"see (the )?(root cause|stack trace|error)", re.IGNORECASE)
logger = logging.getLogger(__name__)


class EngineLog:
    """The part of the log written since this object was made. (A restarted worker appends to its
    predecessor's log.)"""

    def __init__(self, descriptor: int = STDOUT) -> None:
        # opened again, because our descriptor may be write-only
        self._path = Path(f"/proc/self/fd/{descriptor}")
        self._begin = self._size()

    def killed_worker(self) -> str:
        """The worker process that was killed, as logged by the engine process; "" if there is none."""
        tail = self._tail()
        if (found := DIED.search(tail)) is None:
            return ""
        if found[2] == "None":
            return "" if ERROR.search(tail, 0, found.start()) else f"{found[1]} with an unknown exit code"
        return _ended({found[1]: int(found[2])})

    def why(self) -> str:
        """The signal or the last error that ended a process of the engine; "" if the log has neither."""
        errors = [error for error in ERROR.findall(self._tail()) if not POINTS_ELSEWHERE.search(error)]
        last = errors[-1] if errors else ""
        return self.killed_worker() or (last if len(last) <= LONGEST_ERROR else f"{last[:LONGEST_ERROR]}...")

    def _tail(self) -> str:
        size = self._size()
        begin = max(self._begin, size - TAIL_BYTES)
        if size <= begin:
            return ""
        try:
            with self._path.open("rb") as log:
                log.seek(begin)
                return log.read(size - begin).decode(errors="replace")
        except OSError:
            return ""

    def _size(self) -> int:
        """Bytes of a regular file; 0 for anything else."""
        return self._path.stat().st_size if self._path.is_file() else 0


_logs: WeakKeyDictionary[AsyncLLM, EngineLog] = WeakKeyDictionary()
"""The log of each running engine, from its start on."""


def start_llm(
    profile: Profile, place: ProcessPlace, counters: VllmCounters, adapted: Collection[str] = ()
) -> AsyncLLM:
    """Start vLLM; blocks until the model is loaded and the cache allocated. `counters` becomes its stat
    logger. `adapted`: names of the layers with an adapter.

    ExecutorFailed, with the reason from the log, if one of vLLM's processes ends instead; ConfigError if vLLM
    refuses its settings.
    """
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    check_experts(profile, place.device)
    check_engine_args(profile, place.device, {entry.name for entry in dataclasses.fields(AsyncEngineArgs)})
    transfer = WeightTransferConfig(backend=weight_backend(profile))
    arguments = engine_arguments(profile, place, adapted)
    engine_args = AsyncEngineArgs(**arguments, weight_transfer_config=transfer)
    log, factory = EngineLog(), cast("StatLoggerFactory", lambda config, index: counters)
    try:
        llm = AsyncLLM.from_engine_args(engine_args, stat_loggers=[factory])
    # says only "see root cause above": the cause, in another process, is in the log
    except RuntimeError as error:
        why = log.why() or str(error)
        hint = MERGE if adapted and "LoRA" in why else ""
        raise ExecutorFailed(f"vLLM did not start: {why}", hint=hint) from error
    except ValueError as error:  # by vLLM's own checks, in this process; pydantic's errors cannot be pickled
        why = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"vLLM refuses its settings: {why}") from error
    _logs[llm] = log
    return llm


async def answer(llm: AsyncLLM, call: Awaitable[T]) -> T:
    """Await vLLM's answer; ExecutorFailed if an engine process is dead or dies meanwhile."""
    task = asyncio.ensure_future(call)
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
    """Kill vLLM's processes, which may be waiting forever. Returns once vLLM has noticed and sends them no
    more calls.

    If vLLM does not notice in time, only logs a warning, because the caller raises its own error."""
    for process in llm.engine_core.resources.engine_manager.processes:
        process.kill()
    try:
        async with timeout(END_TIMEOUT_S):
            while not llm.errored:  # noqa: ASYNC110  (vLLM's own thread sets it)
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        logger.warning("vLLM has not noticed in %g s that its engine processes were killed", END_TIMEOUT_S)


def dead(llm: AsyncLLM) -> ExecutorFailed:
    """An error that says which process ended and how, from vLLM or its log. (Only the engine process knows
    its workers.)"""
    manager = getattr(llm.engine_core.resources, "engine_manager", None)
    ended = manager.finished_procs() if manager is not None else {}
    killed = {name: code for name, code in ended.items() if code < 0}
    log = _logs.get(llm) or EngineLog()
    # A worker's death first: vLLM ends the engine process after it.
    how = log.killed_worker() or _ended(killed) or log.why() or _ended(ended)
    return ExecutorFailed(f"vLLM's engine process has ended ({how or 'see its last lines in the log'})")


def message_of(error: BaseException) -> str:
    if isinstance(error, AsyncrlError):
        return error.message
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__


def _ended(codes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} with {how_it_ended(code)}" for name, code in codes.items())
