"""Processes for simulated runs, which are all computation: one per core, and none is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from asyncrl_cli.errors import Interrupted
from asyncrl_cli.job.process import collect_garbage_seldom

Begin = Callable[[], None]
"""Called first in each process."""


@contextmanager
def simulators(processes: int, begin: Begin = collect_garbage_seldom) -> Iterator[ProcessPoolExecutor]:
    """Whatever ends the block early ends the processes at once. Raises Interrupted for a KeyboardInterrupt."""
    others = set(multiprocessing.active_children())
    pool = spawned(processes, begin)
    try:
        yield pool
        pool.shutdown()
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted("interrupted: nothing is kept of simulated runs") from None
        raise


def spawned(processes: int, begin: Begin) -> ProcessPoolExecutor:
    """Fresh processes (the command's own has threads: its progress bar), which leave a Ctrl-C in the terminal to their parent and
    end with it, however it ends."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(begin,))


def _begin(begin: Begin) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    begin()


def _end_with_parent() -> None:
    """A process of a pool that waits for work never learns that whoever would give it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
