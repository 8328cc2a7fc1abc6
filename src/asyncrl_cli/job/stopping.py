"""How a person ends a run: by Ctrl-C, SIGTERM, SIGHUP (a terminal that goes) or `asyncrl stop`. What each request does:

    the run is     first                    second                  third
    starting       cancels the start        out, without waiting
    in its loop    step, checkpoint, end    aborts the loop         out, without waiting
    ending         is told so               nothing                 nothing

"Out" ends the process there and then. The reaper ends what it has started, and checkpoints are made to survive that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from asyncrl_cli.job import reaper
from asyncrl_cli.storage import remove_unfinished

log = logging.getLogger("asyncrl")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
LEAVE_WITHIN_S = 3.0
_LOOK_EVERY_S = 0.5
_SHOW_CURSOR = b"\x1b[?25h"


class StopRequests:
    """Requests from signals and from the run directory's stop file. `mean` sets what the next ones do."""

    def __init__(self, *actions: Callable[[], None]) -> None:
        self._actions = list(actions)

    def mean(self, *actions: Callable[[], None]) -> None:
        """From now on: one action per request, the last one again for every further request.

        A signal calls them between any two steps of the main thread: what belongs into the event loop is handed to it.
        """
        self._actions = list(actions)

    def request(self) -> None:
        if self._actions:
            action = self._actions.pop(0) if len(self._actions) > 1 else self._actions[0]
            action()

    def take_signals(self) -> dict[signal.Signals, Any]:
        """Take the signals over from whoever had them, and return these; taken again, nothing changes.

        One that was ignored from the start (SIGHUP under nohup) stays so. Outside the main thread nobody may handle signals: such
        a run is stopped by file, or by cancelling it.
        """
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in SIGNALS} if is_main else {}
        taken = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, self._on_signal)}
        for number in taken:
            signal.signal(number, self._on_signal)
        return taken

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Within the block they are taken."""
        taken = self.take_signals()
        try:
            yield
        finally:
            for number, handler in taken.items():
                signal.signal(number, handler or signal.SIG_DFL)

    async def watch(self, num_requests: Callable[[], int]) -> None:
        """Look for requests that come by file, until cancelled."""
        seen, readable = 0, True
        while True:
            try:
                total, readable = num_requests(), True
            except OSError as error:
                if readable:
                    log.warning("stop requests cannot be read, looking again until they can: %s", error)
                total, readable = seen, False
            for _ in range(seen, total):
                self.request()
            seen = max(seen, total)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request()


@contextlib.contextmanager
def blocked(number: signal.Signals) -> Iterator[None]:
    """Processes that are started within the block never get this signal. One that is sent to us meanwhile is answered after it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tell(text: str) -> None:
    """A line on stderr, safe in a signal's handler: it takes no lock that the interrupted thread may hold."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"{text}\n".encode())


def end_descendants() -> None:
    """Kill what this process has started, so that nothing writes where we clean up. The reaper is spared: it ends the rest."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not any(word.endswith("reaper.py") for word in process.cmdline()):
                process.kill()


def leave(exit_code: int = INTERRUPTED) -> NoReturn:
    """End this process now. Python would wait for threads that nobody can interrupt: an import, a download, a stuck terminal."""
    remove_unfinished()
    reaper.say_goodbye()
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)
    os._exit(exit_code)


def leave_soon() -> None:
    """In `LEAVE_WITHIN_S`, whatever holds up the main thread."""
    timer = threading.Timer(LEAVE_WITHIN_S, leave)
    timer.daemon = True
    timer.start()
