"""Child processes that only compute: pools for simulated runs, and children that each run one phase of a job. No child outlives
the command, however the command ends."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl_cli.errors import ExecutorFailed, Interrupted
from asyncrl_cli.job.process import StopRequests, blocked, collect_garbage_seldom, set_up_process

ANSWER_TIMEOUT_S = 600.0
"""The same limit as for the start of a job's own workers: a large model is loaded here, too."""

Make = Callable[[int, Any], Any]
"""Called in each child with the child's index and the input that all children share; makes the child's object."""
Begin = Callable[[], None]
"""Called first in each process."""


class Pool(ProcessPoolExecutor):
    """A process pool whose children never get SIGINT (a Ctrl-C in the terminal), not even while they start."""

    def submit(self, *arguments: Any, **keywords: Any) -> Future[Any]:
        with blocked(signal.SIGINT):
            return super().submit(*arguments, **keywords)


@contextmanager
def spawned(processes: int, begin: Begin) -> Iterator[Pool]:
    """A pool of spawned processes (forking would be unsafe, because ours has threads). They are killed at the end of the block."""
    others = set(multiprocessing.active_children())
    pool = Pool(processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(begin,))
    try:
        yield pool
    finally:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        pool.shutdown(cancel_futures=True)


@contextmanager
def simulators(processes: int, begin: Begin = collect_garbage_seldom) -> Iterator[Pool]:
    """A pool for simulated runs. Raises Interrupted on SIGINT, SIGTERM or SIGHUP within the block."""
    try:
        with StopRequests().on_signals(), spawned(processes, begin) as pool:
            yield pool
    except KeyboardInterrupt:
        raise Interrupted("interrupted: nothing is kept of simulated runs") from None


def _begin(begin: Begin) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    begin()


def _end_with_parent() -> None:
    """Kill this process when its parent has ended: a process that waits for work would never notice."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


class Children(ExitStack):
    """`count` processes named `<name>-<index>`, each with an object of its own and a log of its output. The end of the `with` block
    kills them.

    Methods raise ExecutorFailed, with the child's name and error, if a child fails or does not answer in `ANSWER_TIMEOUT_S`.
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
        """Call `method` of every child's object at the same time. Returns the answers by index."""
        return self._answers(method, [pool.submit(_call, method, arguments) for pool in self._pools])

    def _answers(self, call: str, asked: Sequence[Future[Any]]) -> list[Any]:
        """Raises at the first failure: other children may be waiting for the failed one, and never answer."""
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
"""In a child, under "made": the child's object."""


def _make(make: Make, index: int, given: Any) -> None:
    _telling(lambda: _child.update(made=make(index, given)))


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    return _telling(lambda: getattr(_child["made"], method)(*arguments))


def _telling(work: Callable[[], Any]) -> Any:
    """Call `work`; an error is sent to the parent as text, because the parent may not be able to import its class."""
    try:
        return work()
    except Exception as error:
        logging.getLogger(__name__).exception("the phase failed")
        raise ExecutorFailed(f"{type(error).__name__}: {error}") from None
