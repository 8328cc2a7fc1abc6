"""The loop's one Observer: it computes metrics and status once and hands them to all sinks (files, screen,
W&B). Before the loop runs, StartStatus writes status.json.

    loop --StepRecord--> StepMetrics --line----+
                         span_line ----spans---+--> sinks: metrics.jsonl, events.jsonl, timeline.jsonl,
    loop --Event-------> JSON ---------event---+           status.json, screen, W&B, ...
    loop --Overview----> LiveStatus ---status--+
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.safe_files import parse_json
from asyncrl_cli.base.storage import replace_text, storage_error
from asyncrl_cli.contracts.events import Event, Observer, Overview, StepRecord
from asyncrl_cli.contracts.status import RunFacts, parse_status
from asyncrl_cli.measure.values import from_json
from asyncrl_cli.observe.format import line_text
from asyncrl_cli.observe.live_status import LiveState, LiveStatus
from asyncrl_cli.observe.metrics import MetricsState, StepMetrics
from asyncrl_cli.observe.run_lines import Line
from asyncrl_cli.observe.sinks import Sink, span_line, to_json

log = logging.getLogger("asyncrl")
T = TypeVar("T")
STATUS_EVERY_S = 1.0


class ObserversState(TypedDict):
    """What a checkpoint keeps of the observers."""

    metrics: MetricsState
    live: LiveState


class Observers(Observer):
    """Feeds the sinks. A sink that fails is dropped with a warning: watching must never end a run.

    `clock` is the driver's clock (default: the event loop's). Time 0 of a new run is when this object is
    created. `further` returns the events that follow from an event of the loop.
    """

    def __init__(
        self,
        facts: RunFacts,
        sinks: Sequence[Sink],
        *,
        clock: Callable[[], float] | None = None,
        further: Callable[[Line], Sequence[Line]] = lambda event: (),
    ) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self._sinks = list(sinks)
        self._failed: list[Sink] = []
        self._further = further
        window_steps, now_s = facts.trigger_parameter_sync_step, self._clock()
        self.metrics = StepMetrics(trigger_parameter_sync_step=window_steps, started_s=now_s)
        self.live = LiveStatus(facts, self.metrics)
        self._each(lambda sink: sink.status, self.live.picture())

    def event(self, event: Event) -> None:
        self._align(event.time_s)
        group = {} if event.key is None else {"group": str(event.key), **event.key._asdict()}
        progress = {"version": event.version, "step": event.step}
        known = {name: value for name, value in progress.items() if value is not None}
        line = {"time_s": event.time_s, "event": event.name, **group, **known, **event.fields}
        self._publish(line)
        for more in self._further(line):
            self._publish({"time_s": event.time_s, **more})

    def step(self, record: StepRecord) -> None:
        line = self.metrics.update(record)
        log.info("%s", line_text(line))
        self.live.line(line)
        self._each(lambda sink: sink.line, line)
        self._each(lambda sink: sink.spans, span_line(record, self.metrics.ahead_s))

    def tick(self, overview: Overview) -> None:
        self._align(overview.time_s)
        self.live.overview(overview)
        self._each(lambda sink: sink.status, self.live.picture())

    def warning(self, message: str) -> None:
        """Report a warning from outside the loop; the loop itself sends `warning` events."""
        self.remark(message, "warning")

    def remark(self, message: str, event: str = "remark") -> None:
        """Report something that the user should read but that is no cause for worry."""
        time_s = self._clock() + self.metrics.ahead_s
        self._publish({"time_s": time_s, "event": event, "message": message})

    def state(self, record: StepRecord | None = None) -> dict[str, Any]:
        metrics, live = self.metrics, self.live
        if record is not None:
            metrics, live = deepcopy((metrics, live))
            live.line(metrics.update(record))
        return {"metrics": metrics.state(), "live": live.state()}

    def restore(self, state: Line) -> None:
        """Raises RefusedError for a `state` that `Observers.state` cannot have written."""
        known = read_state(state)
        self.metrics.restore(known["metrics"])
        self.live.restore(known["live"])

    def close(self, phase: str, error: str = "") -> dict[str, Any]:
        """The run has ended with `phase` `done`, `stopped` or `failed`. Closes the sinks and returns the last
        status, as status.json has it."""
        self.live.phase(phase, error)
        status = self.live.picture()
        self._each(lambda sink: sink.end, status)
        self._each(lambda sink: sink.close, status)
        # Try again: a full disk may have room now that a failed checkpoint was removed.
        for sink in self._failed:
            with suppress(OSError):
                sink.close(status)
        self._sinks, self._failed = [], []
        return status.to_json()

    def _align(self, time_s: float) -> None:
        """The loop stamps events and overviews with the run's time; give lines the same time."""
        self.metrics.ahead_s = time_s - self._clock()

    def _publish(self, event: Line) -> None:
        if event["event"] == "warning":
            log.warning("%s", event.get("message", ""))
        elif "group" not in event:  # there are too many events of groups for a log
            log.info("%s", to_json({key: value for key, value in event.items() if key != "rewards"}))
        self.live.event(event)
        self._each(lambda sink: sink.event, event)

    def _each(self, method: Callable[[Sink], Callable[[T], None]], content: T) -> None:
        for sink in list(self._sinks):
            try:
                method(sink)(content)
            except OSError as error:
                self._sinks.remove(sink)
                self._failed.append(sink)
                why = storage_error(error).message
                self.warning(f"{type(sink).__name__} is disabled for the rest of the run: {why}")


def read_state(content: Line) -> ObserversState:
    """Checks a checkpoint's state. Raises RefusedError for one that `Observers.state` cannot have written."""
    try:
        state = parse_json(json.dumps(content), ObserversState)
        for values in (state["metrics"]["in_window"], state["metrics"]["run"]):
            from_json(values)
    except (TypeError, ValueError) as error:
        hint = "take another checkpoint"
        raise RefusedError(f"the checkpoint's figures are malformed: {error}", hint=hint) from None
    return state


class StartStatus:
    """Writes status.json while a run starts: `doing = StartStatus(path, facts); doing("loading the task")`.

    Imports and the start of Ray may block the process for minutes: the run's lock shows readers that it is
    alive. A resumed run's earlier figures stay in the file until its loop runs; `take_back` restores the old
    file.
    """

    def __init__(self, path: Path, facts: RunFacts) -> None:
        self._path = path
        self._before = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
        metrics = StepMetrics(trigger_parameter_sync_step=facts.trigger_parameter_sync_step, started_s=0.0)
        self._status = fresh = LiveStatus(facts, metrics).picture()
        with suppress(ValueError):  # there was no status, or it is malformed: the fresh one counts
            self._status = replace(
                parse_status(self._before or ""),
                phase=fresh.phase,
                executors=fresh.executors,
                admission=fresh.admission,
                error=fresh.error,
                pid=fresh.pid,
                host=fresh.host,
                started_at=fresh.started_at,
            )
        self._lock = threading.Lock()
        self._is_over = False
        self._write("")

    def __call__(self, line: str, is_new: bool = True) -> None:
        """`line` goes into the status, at most once a second; a new stage of the start is also logged."""
        if is_new:
            log.info("%s", line)
        with self._lock:
            is_due = is_new or time.time() - self._status.updated_at >= STATUS_EVERY_S
            if is_due and not self._is_over:  # a thread of the start may go on for a while
                try:
                    self._write(line)
                except OSError as error:
                    log.warning("the status of the start cannot be written: %s", error)

    def take_back(self) -> None:
        """The run has not begun: restore what the file said before, and write no more."""
        with self._lock:
            if self._before is not None:
                replace_text(self._path, self._before)
            self._is_over = True

    def _write(self, doing: str) -> None:
        self._status = replace(self._status, doing=doing, updated_at=time.time())
        replace_text(self._path, to_json(self._status.to_json()), durable=False)
