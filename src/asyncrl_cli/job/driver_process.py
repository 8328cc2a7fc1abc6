"""The driver as a process: its log file, requests to stop it, an immediate exit."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from asyncrl_cli.base.storage import remove_unfinished
from asyncrl_cli.job.host_process import LOG_FORMAT
from asyncrl_cli.job.ray.reaper_handle import say_goodbye

log = logging.getLogger("asyncrl")

GC_THRESHOLDS = (200_000, 20, 100)
NOTICES = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that machines send: a scheduler before its time limit, Ray's job stop, a closing terminal. Often
several come at once."""
SIGNALS = (signal.SIGINT, *NOTICES)
INTERRUPTED = 130
END_S = 30.0
"""Time that a stopping run has beyond `run.stop_grace_s`, for Ray and the workers to end."""
_LOOK_EVERY_S = 0.5
_SHOW_CURSOR = b"\x1b[?25h"


def collect_garbage_seldom() -> None:
    """For a process that keeps many small objects (a loop's groups) and makes hardly any cycles.

    With Python's default thresholds the collector scans all of them again and again: half of the loop's time
    per group was spent on that with 32,768 running trajectories, an eighth with a tenth as many.
    """
    gc.set_threshold(*GC_THRESHOLDS)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a full disk: Python would print a traceback for each lost line. Writing the run's other
        files reports the disk."""


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """The driver's log of one attempt: everything that asyncrl and its libraries log goes into the file."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("asyncrl").setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        with suppress(OSError):  # a full disk: the last line cannot be flushed
            handler.close()


class StopRequests:
    """The ways to end a run: Ctrl-C, `asyncrl stop` and a machine's notice (`NOTICES`). What each request
    does:

        the run is     first                    second                  third
        starting       cancels the start        out, without waiting
        in its loop    step, checkpoint, end    aborts the loop         out, without waiting
        ending         nothing at once

    Whenever the first request comes, the process is out once the limit of `within` is over. All notices
    together count as one request; a notice after another request is ignored. "Out" ends the process
    immediately; the reaper ends its children, and whole checkpoints stay whole. `set_actions` sets what the
    next requests do. Until it is called they do `actions`; by default each raises KeyboardInterrupt, as a
    Ctrl-C does.
    """

    def __init__(self, *actions: Callable[[], object]) -> None:
        self._actions = list(actions or [_interrupt])
        self.again = "a second request"
        self._is_stopping = False
        self._limit_s: Callable[[], float] = lambda: math.inf
        self._limit: threading.Timer | None = None

    def set_actions(self, *actions: Callable[[], object]) -> None:
        """From now on each request does the next of `actions`; when only the last is left, every further
        request repeats it.

        A signal calls an action at any point of the main thread: one that concerns the event loop must be
        handed to the loop.
        """
        self._actions = list(actions)

    def request(self, number: int | None = None, _frame: object = None) -> None:
        """A request, or the handler of the signal `number`."""
        if number in NOTICES and self._is_stopping:
            return
        self._is_stopping = True
        self.again = "another Ctrl-C" if number == signal.SIGINT else "a second request"
        if self._limit is None and (limit_s := self._limit_s()) < math.inf:
            why = f"{limit_s:.3g} s after the stop request the run is ended at once"
            ending = {"why": f"{why}; finished checkpoints are kept"}
            self._limit = threading.Timer(limit_s, leave, kwargs=ending)
            self._limit.daemon = True
            self._limit.start()
        action = self._actions.pop(0) if len(self._actions) > 1 else self._actions[0]
        action()

    @contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """Within the block a first request gives the process `limit_s` to end, or what `allow` says. After
        that it is out, whatever hangs."""
        self._limit_s = lambda: limit_s
        try:
            yield
        finally:
            self._limit_s = lambda: math.inf
            if self._limit is not None:
                self._limit.cancel()

    def allow(self, limit_s: Callable[[], float]) -> None:
        """From now on the limit of `within` is this one, as it is at the first request."""
        if self._limit_s() < math.inf:
            self._limit_s = limit_s

    def take_signals(self) -> dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None]:
        """Make the signals stop requests, and return their previous handlers. A second call changes nothing
        and returns none.

        A signal that was ignored from the start (SIGHUP under nohup) stays ignored. Python handles signals
        only in the main thread: a run in another thread is stopped by `asyncrl stop`, or by cancelling its
        task.
        """
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in SIGNALS if is_main}
        passed = signal.SIG_IGN, self.request
        taken = {number: handler for number, handler in before.items() if handler not in passed}
        for number in taken:
            signal.signal(number, self.request)
        return taken

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Within the block signals are stop requests (`take_signals`)."""
        taken = self.take_signals()
        try:
            yield
        finally:
            for number, handler in taken.items():
                signal.signal(number, handler or signal.SIG_DFL)

    async def watch(self, num_requests: Callable[[], int]) -> None:
        """Poll for requests that come by file (`asyncrl stop`), until cancelled. `num_requests()`: how many
        there have been."""
        seen, readable = 0, True
        while True:
            try:
                total, readable = num_requests(), True
            except OSError as error:
                if readable:
                    log.warning("stop requests cannot be read, trying again until they can: %s", error)
                total, readable = seen, False
            for _ in range(seen, total):
                self.request()
            seen = max(seen, total)
            await asyncio.sleep(_LOOK_EVERY_S)


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


@contextmanager
def blocked(number: signal.Signals) -> Iterator[None]:
    """Processes started within the block inherit the mask and never get this signal. Our own is delivered
    after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tell(text: str) -> None:
    """Write a line to stderr. Safe in a signal handler: takes no lock that the interrupted thread may
    hold."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{text}\n".encode())


def leave(exit_code: int = INTERRUPTED, why: str = "") -> NoReturn:
    """End this process now, and write `why` to stderr. Python would wait for threads that cannot be
    interrupted: an import, a download, a stuck terminal."""
    if why:
        tell(why)
    remove_unfinished()
    say_goodbye()
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)
    os._exit(exit_code)
