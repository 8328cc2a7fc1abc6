"""A sink whose service may be slow: only the sink's own thread calls it, so that the loop never waits for a
network or a disk."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.observe.observers import Sink

log = logging.getLogger("asyncrl")

QUEUED_LINES = 10_000
"""Lines that may wait while the service is slow: hours of steps, a few MB."""
START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 60.0
EARLY_CLOSE_TIMEOUT_S = 3.0
"""For a run that was stopped or has failed: someone may wait at the terminal, and metrics.jsonl has every
line."""


class Background(Sink):
    """Gives every line of metrics.jsonl to `write`, in order. A subclass has `service`, its name for people,
    and `otherwise`, a hint for when it does not start; `open`, `write` and `finish` are called in the sink's
    thread.

    Construct it before the loop starts: it waits (at most a minute) for the service to start, and raises
    PreflightError if it does not. A service that fails later gets no more lines, and the run goes on.
    """

    service: str
    otherwise: str

    def __init__(self) -> None:
        self._last: Mapping[str, Any] = {}
        self._queue: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._started: Future[None] = Future()
        self._dropped = 0
        self._is_left = False
        self._thread = threading.Thread(target=self._work, name=self.service, daemon=True)
        self._thread.start()
        try:
            self._started.result(START_TIMEOUT_S)
        except Exception as error:  # the service's own error, or a TimeoutError without a message
            why = str(error) or f"it takes longer than {START_TIMEOUT_S:g} s"
            raise PreflightError(f"{self.service} did not start: {why}", hint=self.otherwise) from None

    def open(self) -> None:
        """Start the service. May raise anything."""
        raise NotImplementedError

    def write(self, line: Mapping[str, Any]) -> None:
        """Log a train step's metrics, over `step`."""
        raise NotImplementedError

    def finish(self, status: Mapping[str, Any]) -> None:
        """All lines are written, and the run has ended with this status."""
        raise NotImplementedError

    def line(self, line: Mapping[str, Any]) -> None:
        if self._queue.qsize() < QUEUED_LINES:
            self._queue.put(dict(line))
        else:
            self._dropped += 1

    def end(self, status: Mapping[str, Any]) -> None:
        """Let the thread finish, at the same time as those of the other sinks. They share one time limit,
        which is short unless the run is `done`."""
        self._last = status
        self._limit_s = CLOSE_TIMEOUT_S if status.get("phase") == "done" else EARLY_CLOSE_TIMEOUT_S
        self._until_s = time.monotonic() + self._limit_s
        if self._dropped:
            log.warning("%s was too slow: %d lines are in metrics.jsonl only", self.service, self._dropped)
        self._queue.put(None)

    def close(self, status: Mapping[str, Any]) -> None:
        """Wait until all queued lines are written, or the limit has passed."""
        self._thread.join(max(0.0, self._until_s - time.monotonic()))
        if self._thread.is_alive():
            self._is_left = True
            log.warning("%s did not finish within %g s; it is abandoned", self.service, self._limit_s)

    def _work(self) -> None:
        try:
            self.open()
        except Exception as error:  # the constructor raises it
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            while (line := self._queue.get()) is not None:
                self.write(line)
            self.finish(self._last)
        except Exception:  # an error of the service must not end the run
            if not self._is_left:  # after `close` gave up, errors of an ending process mean nothing
                log.exception("%s failed and gets no more lines; metrics.jsonl has them all", self.service)
