"""Everyone who watches a run, behind the loop's one Observer port: metrics are worked out once and shared.

loop --StepRecord--> StepMetrics --line--+
                     timeline ----spans--+
loop --Event-------> JSON ---------event-+--> sinks: metrics.jsonl, events.jsonl, timeline.jsonl, status.json, screen, W&B
loop --Snapshot----> LiveStatus --status-+
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.loop.values import from_json
from asyncrl_cli.loop.watching import Event, Observer, Snapshot, StepRecord
from asyncrl_cli.observe.live_status import LiveState, LiveStatus, RunFacts
from asyncrl_cli.observe.metrics import MetricsState, StepMetrics
from asyncrl_cli.observe.sinks import Sink, span_line, to_json
from asyncrl_cli.safe_files import parse_json
from asyncrl_cli.storage import storage_error

log = logging.getLogger("asyncrl")


class ObserversState(TypedDict):
    """As a checkpoint has it."""

    metrics: MetricsState
    live: LiveState


class Observers(Observer):
    """A sink that fails is left out from then on, with a warning: watching never ends a run.

    `clock` is the driver's clock (the event loop's, by default); time 0 of a new run is when this is made.
    """

    def __init__(self, facts: RunFacts, sinks: Sequence[Sink], *, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self._sinks = list(sinks)
        self._left_out: list[Sink] = []
        self.metrics = StepMetrics(trigger_parameter_sync_step=facts.trigger_parameter_sync_step, started_s=self._clock())
        self.live = LiveStatus(facts, self.metrics)
        self._each("status", self.live.picture())

    def event(self, event: Event) -> None:
        self._align(event.time_s)
        key = {} if event.key is None else {"group": str(event.key), **event.key._asdict()}
        where = {name: value for name, value in (("version", event.version), ("step", event.step)) if value is not None}
        self._tell({"time_s": event.time_s, "event": event.name, **key, **where, **event.fields})

    def step(self, record: StepRecord) -> None:
        line = self.metrics.update(record)
        self.live.line(line)
        self._each("line", line)
        self._each("spans", span_line(record, self.metrics.ahead_s))

    def tick(self, snapshot: Snapshot) -> None:
        self._align(snapshot.time_s)
        self.live.snapshot(snapshot)
        self._each("status", self.live.picture())

    def warning(self, message: str) -> None:
        """Something that people should know, from outside the loop (it has its own `warning` events)."""
        self._tell({"time_s": self._clock() + self.metrics.ahead_s, "event": "warning", "message": message})

    def state(self) -> dict[str, Any]:
        state: ObserversState = {"metrics": self.metrics.state(), "live": self.live.state()}
        return {**state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises RefusedError for what `state` has not written."""
        known = read_state(state)
        self.metrics.restore(known["metrics"])
        self.live.restore(known["live"])

    def close(self, phase: str, error: str = "") -> dict[str, Any]:
        """The run has ended: `done`, `stopped` or `failed`. Returns the last status. Sinks close once."""
        self.live.phase(phase, error)
        status = self.live.picture()
        self._each("close", status)
        for sink in self._left_out:  # a disk that was full may have room again: a failed checkpoint was removed
            with contextlib.suppress(OSError):
                sink.close(status)
        self._sinks, self._left_out = [], []
        return status

    def _align(self, time_s: float) -> None:
        """The loop stamps events and snapshots with the run's own time; lines follow it."""
        self.metrics.ahead_s = time_s - self._clock()

    def _tell(self, line: Mapping[str, Any]) -> None:
        if line["event"] == "warning":
            log.warning("%s", line.get("message", ""))
        elif "group" not in line:
            log.info("%s", to_json(line))
        self.live.event(line)
        self._each("event", line)

    def _each(self, call: str, content: Mapping[str, Any]) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, call)(content)
            except OSError as error:
                self._sinks.remove(sink)
                self._left_out.append(sink)
                self.warning(f"{type(sink).__name__} is left out from now on: {storage_error(error).message}")


def read_state(content: Mapping[str, Any]) -> ObserversState:
    """Raises RefusedError for what no `Observers.state` has written."""
    try:
        state = parse_json(json.dumps(content), ObserversState)
        for values in (state["metrics"]["in_window"], state["metrics"]["run"]):
            from_json(values)
    except (TypeError, ValueError) as error:
        raise RefusedError(f"the checkpoint's figures are malformed: {error}", hint="take another checkpoint") from None
    return state
