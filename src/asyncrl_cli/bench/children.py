"""Child processes in which phases run alone: each holds one object, and all of them are asked and ended together. No Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from asyncrl_cli.bench.pool import spawned
from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.job.process import set_up_process

ANSWER_TIMEOUT_S = 600.0
"""As long as the start of a job's own workers may take: a large model is loaded here, too."""

Make = Callable[[int, Any], Any]
"""Called in the child with its index and what all children are given. It imports torch inside, never at its module's top."""


class Children:
    """`count` processes named `<name>-<index>`, each with an object of its own and a log for what it prints.

    Raises ExecutorFailed, naming the child and its error, wherever one fails or gives no answer. They are gone when the `with`
    block has ended.
    """

    def __init__(self, name: str, make: Make, given: Any, *, count: int, threads: int, log_dir: Path) -> None:
        self._logs = {f"{name}-{index}": log_dir / f"{name}-{index}.log" for index in range(count)}
        self._ending = ExitStack()
        begins = [partial(set_up_process, threads=threads, log_path=log) for log in self._logs.values()]
        self._pools = [self._ending.enter_context(spawned(1, begin)) for begin in begins]
        self._starts = [pool.submit(_make, make, index, given) for index, pool in enumerate(self._pools)]

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._ending.close()

    def ready(self) -> None:
        """Wait until every child has made its object."""
        self._answers("its start", self._starts)

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """All children do the same at once; their answers, by index."""
        return self._answers(method, [pool.submit(_call, method, arguments) for pool in self._pools])

    def _answers(self, call: str, asked: Sequence[Future[Any]]) -> list[Any]:
        """The first failure counts, whoever else still waits for the failed one."""
        ended, waiting = wait(asked, ANSWER_TIMEOUT_S, return_when=FIRST_EXCEPTION)
        for name, future in zip(self._logs, asked, strict=True):
            error = future.exception() if future in ended else None
            if isinstance(error, BrokenProcessPool):
                raise ExecutorFailed(f"{name} ended during {call}: {_last_words(self._logs[name])}")
            if error is not None:
                raise ExecutorFailed(f"{name} failed in {call}: {error}")
        if waiting:
            late = ", ".join(name for name, future in zip(self._logs, asked, strict=True) if future in waiting)
            raise ExecutorFailed(f"{late}: no answer to {call} within {ANSWER_TIMEOUT_S:g} s")
        return [future.result() for future in asked]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """What a process did of its phase in `seconds`: sampled tokens, or those that all ranks together trained.

    `cpu_s` is as in `CpuTime`: on a CPU, much less than `seconds` means that others used the machine. `running_mean`: of
    generation, the mean number of running sequences.
    """

    tokens: int
    seconds: float
    cpu_s: float
    running_mean: float = 0.0


class CpuTime:
    """What this process and its children compute from now on, in CPU seconds of one core: those of the busiest thread or,
    if that is more, the mean of the busiest process over `threads`. (An engine may compute in a child.)

    A sum over threads would hide what others take: two threads with half a core each make a CPU second per second, too.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._began_s = _thread_seconds()

    def spent_s(self) -> float:
        spent_s = {
            pid: [seconds - self._began_s.get(pid, {}).get(thread, 0.0) for thread, seconds in own.items()]
            for pid, own in _thread_seconds().items()
        }
        return max(max(max(own), sum(own) / self._threads) for own in spent_s.values())


def _thread_seconds() -> dict[int, dict[int, float]]:
    """By process and thread."""
    seconds: dict[int, dict[int, float]] = {}
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # a child that ends while we look
            seconds[process.pid] = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    return seconds


_child: dict[str, Any] = {}
"""In a child: its object."""


def _make(make: Make, index: int, given: Any) -> None:
    _telling(lambda: _child.update(made=make(index, given)))


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    return _telling(lambda: getattr(_child["made"], method)(*arguments))


def _telling(work: Callable[[], Any]) -> Any:
    """An error's own class may be none that our process can load."""
    try:
        return work()
    except Exception as error:
        logging.getLogger(__name__).exception("the phase failed")
        raise ExecutorFailed(f"{type(error).__name__}: {error}") from None


def _last_words(log: Path) -> str:
    lines: Sequence[str] = log.read_text(errors="replace").split("\n") if log.is_file() else ()
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")
