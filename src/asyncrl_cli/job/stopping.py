"""How a person ends a run: the first Ctrl-C, SIGTERM or `asyncrl stop` asks, the second aborts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator

log = logging.getLogger("asyncrl")

_LOOK_EVERY_S = 0.5


class StopRequests:
    """Counts requests from signals and from the run directory's stop file, and calls `stop` and then `abort` once each."""

    def __init__(self, stop: Callable[[], None], abort: Callable[[], None]) -> None:
        self._actions = [stop, abort]
        self._from_signals = 0

    def request(self) -> None:
        if self._actions:
            self._actions.pop(0)()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM over from whoever had them (`ray.init` replaces handlers: enter this after it).

        Outside the main thread nobody may: such a run is stopped by file, or by cancelling it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            loop.add_signal_handler(number, self.request)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

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
