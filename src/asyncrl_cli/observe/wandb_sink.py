"""The sink for Weights & Biases. Only its own thread calls W&B, so a slow network never blocks the loop."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from asyncrl_cli.errors import PreflightError
from asyncrl_cli.observe.format import LEADING
from asyncrl_cli.observe.observers import Sink
from asyncrl_cli.storage import replace_text

log = logging.getLogger("asyncrl")

RUN_ID = "wandb-run-id"
QUEUED_LINES = 10_000
"""Lines that may wait while the network is slow: hours of steps, a few MB."""
START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 60.0
EARLY_CLOSE_TIMEOUT_S = 3.0
"""For a run that was stopped or has failed: someone may wait at the terminal, and metrics.jsonl has every line."""


class Wandb(Sink):
    """Logs every line of metrics.jsonl under the same names, over `step`, into `run_dir/wandb`. At the end it sets the utilization
    figures of W&B's summary to those of the whole run, as in `asyncrl status`: W&B would keep the last step's.

    Construct it before the loop starts: it waits (at most a minute) for W&B to start, and raises PreflightError if it
    does not. A resumed run continues the same W&B run: its id is kept in the run's directory.
    """

    def __init__(
        self, run_dir: Path, *, mode: Literal["offline", "online"], project: str, name: str, config: Mapping[str, Any]
    ) -> None:
        self._settings: dict[str, Any] = {"mode": mode, "project": project, "name": name, "id": _run_id(run_dir)}
        self._settings |= {"dir": str(run_dir), "config": dict(config)}
        self._whole_run: dict[str, Any] = {}
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue(maxsize=QUEUED_LINES)
        self._started: Future[None] = Future()
        self._dropped = 0
        self._is_left = False
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()
        try:
            self._started.result(START_TIMEOUT_S)
        except Exception as error:  # W&B's own error, or a TimeoutError without a message
            why = str(error) or f"it takes longer than {START_TIMEOUT_S:g} s"
            raise PreflightError(f"W&B did not start: {why}", hint=_OTHER_MODES) from None

    def line(self, line: Mapping[str, Any]) -> None:
        try:
            self._queue.put_nowait(dict(line))
        except queue.Full:
            self._dropped += 1

    def close(self, status: Mapping[str, Any]) -> None:
        """Wait until all queued lines are written, within a limit that is short unless the run is `done`."""
        limit_s = CLOSE_TIMEOUT_S if status.get("phase") == "done" else EARLY_CLOSE_TIMEOUT_S
        until_s = time.monotonic() + limit_s
        self._whole_run = {key: value for key, value in status.get("totals", {}).items() if key in LEADING}
        if self._dropped:
            log.warning("W&B was too slow: %d lines are in metrics.jsonl only", self._dropped)
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=limit_s)
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            self._is_left = True
            log.warning("W&B did not finish within %g s; it is left behind", limit_s)

    def _work(self) -> None:
        try:
            run = self._start()
        except Exception as error:  # the constructor raises it
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            while (line := self._queue.get()) is not None:
                run.log({key: _chart(key, value) for key, value in line.items()})
            if self._whole_run:
                run.summary.update(self._whole_run)
            run.finish()
        except Exception:  # an error of W&B must not end the run
            if not self._is_left:  # after `close` gave up, errors of its ending process mean nothing
                log.exception("W&B failed and gets no more lines; metrics.jsonl has them all")
        finally:
            _end_service()

    def _start(self) -> Any:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        settings = wandb.Settings(console="off", silent=True, init_timeout=START_TIMEOUT_S, finish_timeout=CLOSE_TIMEOUT_S)
        run = wandb.init(**self._settings, resume="allow", settings=settings)
        run.define_metric("*", step_metric="step")
        return run


def _end_service() -> None:
    """End W&B's own process now. Otherwise it would outlive ours and print a traceback."""
    import wandb

    with contextlib.suppress(Exception):  # it has ended already
        wandb.teardown()


def check_login() -> None:
    """Raises PreflightError if no W&B login is stored. Does not use the network."""
    import wandb

    if not wandb.login(prompt=False):
        raise PreflightError("W&B did not start: nobody is logged in", hint=_OTHER_MODES)


_OTHER_MODES = "log in with `wandb login`, or --set logging.wandb=offline, or --set logging.wandb=disabled"


def _run_id(run_dir: Path) -> str:
    """The run's W&B id, made once and kept in its directory: run names are not unique within a W&B project."""
    path = run_dir / RUN_ID
    if not path.exists():
        replace_text(path, uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8")


def _chart(key: str, value: Any) -> Any:
    """A value as W&B takes it. Quantiles become a histogram as if they were samples; any other list holds counts of 0, 1, 2, ..."""
    if isinstance(value, list):
        import numpy as np
        import wandb

        if key.endswith("/quantiles"):
            return wandb.Histogram(value)
        return wandb.Histogram(np_histogram=(np.array(value), np.arange(len(value) + 1) - 0.5))
    return value
