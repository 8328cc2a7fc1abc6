"""Pools of child processes that do nothing but compute: none is left behind, however the command ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from asyncrl_cli.errors import Interrupted
from asyncrl_cli.job.process import StopRequests, blocked, collect_garbage_seldom

Begin = Callable[[], None]
"""Called first in each process."""


class Pool(ProcessPoolExecutor):
    """A Ctrl-C in the terminal is for its parent alone, also while a process starts."""

    def submit(self, *arguments: Any, **keywords: Any) -> Future[Any]:
        with blocked(signal.SIGINT):
            return super().submit(*arguments, **keywords)


@contextmanager
def spawned(processes: int, begin: Begin) -> Iterator[Pool]:
    """Fresh processes, because ours has threads. They are killed at the end of the block: nothing they still hold is of value."""
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
    """For simulated runs. Raises Interrupted for a Ctrl-C or a SIGTERM within the block."""
    try:
        with terminating_as_interrupt(), spawned(processes, begin) as pool:
            yield pool
    except KeyboardInterrupt:
        raise Interrupted("interrupted: nothing is kept of simulated runs") from None


def terminating_as_interrupt() -> AbstractContextManager[None]:
    """SIGTERM and SIGHUP become KeyboardInterrupt, as SIGINT is, so that all who clean up after that do so after these."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    return StopRequests(interrupt).on_signals()


def _begin(begin: Begin) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    begin()


def _end_with_parent() -> None:
    """A process that waits for work would never learn that its parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
