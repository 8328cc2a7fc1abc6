"""How a person ends a run: the first Ctrl-C, SIGTERM or `asyncrl stop` asks, the second aborts."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

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
        """Take SIGINT and SIGTERM over from whoever had them (`ray.init` replaces handlers: enter this after it)."""
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
        seen = 0
        while True:
            for _ in range(seen, seen := max(seen, num_requests())):
                self.request()
            await asyncio.sleep(_LOOK_EVERY_S)
