"""status.json while a run starts: what it is doing, from the moment that the command was typed."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from asyncrl_cli.checkpoint.run_directory import STARTING
from asyncrl_cli.observe.live_status import LiveStatus, RunFacts
from asyncrl_cli.observe.metrics import StepMetrics
from asyncrl_cli.observe.sinks import to_json
from asyncrl_cli.observe.status_file import parse_status
from asyncrl_cli.storage import replace_text

log = logging.getLogger("asyncrl")

EVERY_S = 1.0


class StartStatus:
    """`with StartStatus(path, facts) as doing: doing("loading the task")`.

    It writes in a thread of its own: imports and the start of Ray block the others for so long that readers would think the run is
    dead. The figures of a resumed run's earlier attempts stay in the file until its loop runs; `take_back` restores all of it.
    """

    def __init__(self, path: Path, facts: RunFacts) -> None:
        self._path = path
        self._before = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
        metrics = StepMetrics(trigger_parameter_sync_step=facts.trigger_parameter_sync_step, started_s=0.0)
        self._base = LiveStatus(facts, metrics).picture()
        with contextlib.suppress(ValueError):  # one that no reader would take is not kept
            self._base = {**parse_status(self._before or "")}
        self._started_at = time.time()
        self._doing = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="start-status", daemon=True)

    def __enter__(self) -> StartStatus:
        self._write()  # in this thread, so that an error is raised
        self._thread.start()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self.close()

    def __call__(self, line: str) -> None:
        """`line`: what people are told is going on."""
        if line.partition("  ")[0] != self._doing.partition("  ")[0]:
            log.info("%s", line)
        self._doing = line

    def close(self) -> None:
        """Nothing is written after it: the next status is the loop's."""
        self._ended.set()
        if self._thread.is_alive():  # it never began, if the first status could not be written
            self._thread.join()

    def take_back(self) -> None:
        """The run has not begun: restore what the file said before."""
        self.close()
        if self._before is not None:
            replace_text(self._path, self._before)

    def _work(self) -> None:
        while not self._ended.wait(EVERY_S):
            try:
                self._write()
            except OSError as error:
                log.warning("the status of the start cannot be written: %s", error)
                return

    def _write(self) -> None:
        now: dict[str, Any] = {
            "phase": STARTING,
            "doing": self._doing,
            "executors": [],  # an earlier attempt's have ended
            "admission": {},
            "error": "",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_at": self._started_at,
            "updated_at": time.time(),
        }
        replace_text(self._path, to_json({**self._base, **now}), durable=False)
