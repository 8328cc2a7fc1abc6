"""Child processes in which phases run alone: each holds one object, and all of them are asked and ended together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl_cli.bench.pool import spawned
from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.job.process import set_up_process

ANSWER_TIMEOUT_S = 600.0
"""As long as the start of a job's own workers may take: a large model is loaded here, too."""

Make = Callable[[int, Any], Any]
"""Called in the child with its index and what all children are given."""


class Children(ExitStack):
    """`count` processes named `<name>-<index>`, each with an object of its own and a log for what it prints.

    Raises ExecutorFailed, naming the child and its error, wherever one fails or gives no answer. They are gone when the `with`
    block has ended.
    """

    def __init__(self, name: str, make: Make, given: Any, *, count: int, threads: int, log_dir: Path) -> None:
        super().__init__()
        self._logs = [log_dir / f"{name}-{index}.log" for index in range(count)]
        begins = [partial(set_up_process, threads=threads, log_path=log) for log in self._logs]
        self._pools = [self.enter_context(spawned(1, begin)) for begin in begins]
        self._starts = [pool.submit(_make, make, index, given) for index, pool in enumerate(self._pools)]

    def ready(self) -> None:
        """Wait until every child has made its object."""
        self._answers("its start", self._starts)

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """All children do the same at once; their answers, by index."""
        return self._answers(method, [pool.submit(_call, method, arguments) for pool in self._pools])

    def _answers(self, call: str, asked: Sequence[Future[Any]]) -> list[Any]:
        """The first failure counts, whoever else still waits for the failed one."""
        ended, waiting = wait(asked, ANSWER_TIMEOUT_S, return_when=FIRST_EXCEPTION)
        for log, future in zip(self._logs, asked, strict=True):
            error = future.exception() if future in ended else None
            if isinstance(error, BrokenProcessPool):
                said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.is_file() else []
                raise ExecutorFailed(f"{log.stem} ended during {call}: {said[-1] if said else 'it said nothing'}")
            if error is not None:
                raise ExecutorFailed(f"{log.stem} failed in {call}: {error}")
        if waiting:
            late = ", ".join(log.stem for log, future in zip(self._logs, asked, strict=True) if future in waiting)
            raise ExecutorFailed(f"{late}: no answer to {call} within {ANSWER_TIMEOUT_S:g} s")
        return [future.result() for future in asked]


_child: dict[str, Any] = {}
"""In a child: its object."""


def _make(make: Make, index: int, given: Any) -> None:
    _telling(lambda: _child.update(made=make(index, given)))


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    return _telling(lambda: getattr(_child["made"], method)(*arguments))


def _telling(work: Callable[[], Any]) -> Any:
    """Our process may not be able to load the class of an error, so only its text is sent."""
    try:
        return work()
    except Exception as error:
        logging.getLogger(__name__).exception("the phase failed")
        raise ExecutorFailed(f"{type(error).__name__}: {error}") from None
