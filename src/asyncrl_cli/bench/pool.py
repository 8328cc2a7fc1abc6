"""Processes for simulated runs, which are all computation: one per core, and none is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from asyncrl_cli.errors import Interrupted
from asyncrl_cli.job.process import collect_garbage_seldom


@contextmanager
def simulators(
    processes: int, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes: the command's own has threads (its progress bar). Whatever ends the block early ends them at once.

    Raises Interrupted for a KeyboardInterrupt.
    """
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(initializer, initargs))
    try:
        yield pool
        pool.shutdown()
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted("interrupted: nothing is kept of simulated runs") from None
        raise


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Processes started in the block are deaf to Ctrl-C from their first instruction on; ours is answered after it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    """In each process. A Ctrl-C in the terminal is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    collect_garbage_seldom()
    if initializer is not None:
        initializer(*initargs)


def _end_with_parent() -> None:
    """A process of a pool that waits for work never learns that whoever would give it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
