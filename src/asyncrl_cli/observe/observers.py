"""The loop's one Observer: it computes metrics and status once and hands them to all sinks (files, screen,
W&B).

loop --StepRecord--> StepMetrics --line--+
                     timeline ----spans--+
loop --Event-------> JSON ---------event-+--> sinks: metrics.jsonl, events.jsonl, timeline.jsonl, status.json,
screen, W&B loop --Snapshot----> LiveStatus --status-+
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import takewhile
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.safe_files import MIB, parse_json
from asyncrl_cli.base.storage import naming, repair_lines, replace_text, storage_error
from asyncrl_cli.contracts.events import Event, Observer, Snapshot, StepRecord
from asyncrl_cli.measure.values import from_json
from asyncrl_cli.observe.format import line_text
from asyncrl_cli.observe.live_status import LiveState, LiveStatus, RunFacts
from asyncrl_cli.observe.metrics import MetricsState, StepMetrics

log = logging.getLogger("asyncrl")
DIGITS = 4
"""Decimals of times in timeline.jsonl: a tenth of a millisecond is enough and keeps the file small."""
MAX_TRACED_BYTES = 256 * MIB
MAX_WAIT_CHARACTERS = 200


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
        further: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] = lambda event: (),
    ) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self._sinks = list(sinks)
        self._left_out: list[Sink] = []
        self._further = further
        self.metrics = StepMetrics(
            trigger_parameter_sync_step=facts.trigger_parameter_sync_step, started_s=self._clock()
        )
        self.live = LiveStatus(facts, self.metrics)
        self._each("status", self.live.picture())

    def event(self, event: Event) -> None:
        self._align(event.time_s)
        key = {} if event.key is None else {"group": str(event.key), **event.key._asdict()}
        where = {
            name: value
            for name, value in (("version", event.version), ("step", event.step))
            if value is not None
        }
        line = {"time_s": event.time_s, "event": event.name, **key, **where, **event.fields}
        self._tell(line)
        for more in self._further(line):
            self._tell({"time_s": event.time_s, **more})

    def step(self, record: StepRecord) -> None:
        line = self.metrics.update(record)
        log.info("%s", line_text(line))
        self.live.line(line)
        self._each("line", line)
        self._each("spans", span_line(record, self.metrics.ahead_s))

    def tick(self, snapshot: Snapshot) -> None:
        self._align(snapshot.time_s)
        self.live.snapshot(snapshot)
        self._each("status", self.live.picture())

    def warning(self, message: str) -> None:
        """Report a warning from outside the loop; the loop itself sends `warning` events."""
        self._tell({"time_s": self._clock() + self.metrics.ahead_s, "event": "warning", "message": message})

    def state(self, record: StepRecord | None = None) -> dict[str, Any]:
        metrics, live = self.metrics, self.live
        if record is not None:
            metrics, live = deepcopy((metrics, live))
            live.line(metrics.update(record))
        return {"metrics": metrics.state(), "live": live.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises RefusedError for a `state` that `Observers.state` cannot have written."""
        known = read_state(state)
        self.metrics.restore(known["metrics"])
        self.live.restore(known["live"])

    def close(self, phase: str, error: str = "") -> dict[str, Any]:
        """The run has ended with `phase` `done`, `stopped` or `failed`. Closes the sinks and returns the last
        status."""
        self.live.phase(phase, error)
        status = self.live.picture()
        self._each("end", status)
        self._each("close", status)
        # try again: a full disk may have room now that a failed checkpoint was removed
        for sink in self._left_out:
            with contextlib.suppress(OSError):
                sink.close(status)
        self._sinks, self._left_out = [], []
        return status

    def _align(self, time_s: float) -> None:
        """The loop stamps events and snapshots with the run's time; give lines the same time."""
        self.metrics.ahead_s = time_s - self._clock()

    def _tell(self, line: Mapping[str, Any]) -> None:
        if line["event"] == "warning":
            log.warning("%s", line.get("message", ""))
        elif "group" not in line:
            log.info("%s", to_json({key: value for key, value in line.items() if key != "rewards"}))
        self.live.event(line)
        self._each("event", line)

    def _each(self, call: str, content: Mapping[str, Any]) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, call)(content)
            except OSError as error:
                self._sinks.remove(sink)
                self._left_out.append(sink)
                self.warning(
                    f"{type(sink).__name__} is disabled for the rest of the run: "
                    f"{storage_error(error).message}"
                )


def read_state(content: Mapping[str, Any]) -> ObserversState:
    """Checks a checkpoint's state. Raises RefusedError for one that `Observers.state` cannot have written."""
    try:
        state = parse_json(json.dumps(content), ObserversState)
        for values in (state["metrics"]["in_window"], state["metrics"]["run"]):
            from_json(values)
    except (TypeError, ValueError) as error:
        raise RefusedError(
            f"the checkpoint's figures are malformed: {error}", hint="take another checkpoint"
        ) from None
    return state


class Sink:
    """Writes or shows what `Observers` computes. A subclass overrides the methods it needs. They are called
    on the event loop and must return at once."""

    def line(self, line: Mapping[str, Any]) -> None:
        """The metrics of a train step."""

    def event(self, event: Mapping[str, Any]) -> None:
        """One event, as it stands in events.jsonl."""

    def spans(self, spans: Mapping[str, Any]) -> None:
        """Where the executors' time went since the last train step, as it stands in timeline.jsonl."""

    def status(self, status: Mapping[str, Any]) -> None:
        """The run at a glance, once a second."""

    def end(self, status: Mapping[str, Any]) -> None:
        """The run has ended with this status. All sinks get this call before any is closed."""

    def close(self, status: Mapping[str, Any]) -> None:
        """Finish. The only call that may take time."""


class LineFile(Sink):
    """A file of JSON lines, each flushed to the system at once: a killed process leaves at most one
    incomplete line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        repair_lines(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def append(self, content: Mapping[str, Any]) -> None:
        with naming(self._path):
            self._file.write(to_json(content) + "\n")

    def close(self, status: Mapping[str, Any]) -> None:
        self._file.close()


class StepFile(LineFile):
    """One line per train step. A resume removes the lines of steps that will be trained again."""

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] != "resumed":
            return
        with self._path.open("rb") as file:
            kept = takewhile(lambda line: json.loads(line)["step"] <= event["from_step"], file)
            self._file.truncate(sum(map(len, kept)))


class MetricsFile(StepFile):
    """metrics.jsonl."""

    line = LineFile.append


class EventsFile(LineFile):
    """events.jsonl: lines are never removed. After a crash, `resumed` says from which step the run
    continues."""

    event = LineFile.append


class TimelineFile(StepFile):
    """timeline.jsonl: what every executor did when, on the run's time axis (`time_s`).

        {"step": 7, "spans": {"trainer": [["starved", 11.2, 11.9], ...]}, "running": {"rollout-0": [[12.1,
        64], ...]}}

    A step's line holds what was reported since the previous line. Once a second `running` gets (time, running
    sequences) and, if it has changed, `waits` gets (time, what the executor waits for). With
    `logging.trace_sequences` there is `slots`, too: (slot, sequence, start, end) of each worker's sequences,
    until the file has `MAX_TRACED_BYTES`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._running: dict[str, list[tuple[float, float]]] = {}
        self._waits: dict[str, list[tuple[float, str]]] = {}
        self._waiting_for: dict[str, str] = {}
        self._is_full = False

    def spans(self, spans: Mapping[str, Any]) -> None:
        if (
            not self._is_full
            and "slots" in spans
            and os.fstat(self._file.fileno()).st_size > MAX_TRACED_BYTES
        ):
            self._is_full = True
            log.warning("timeline.jsonl has %d MiB: sequences are traced no further", MAX_TRACED_BYTES // MIB)
        kept = {key: content for key, content in spans.items() if key != "slots" or not self._is_full}
        self.append({**kept, "running": self._running, "waits": self._waits})
        self._running, self._waits = {}, {}

    def status(self, status: Mapping[str, Any]) -> None:
        """Remember how many sequences run now, and what every executor waits for."""
        for executor in status.get("executors", ()):
            name, time_s = executor["name"], round(status["progress"]["time_s"], DIGITS)
            if executor["role"] == "rollout" and "running_sequences" in executor["gauges"]:
                self._running.setdefault(name, []).append((time_s, executor["gauges"]["running_sequences"]))
            wait = executor.get("waiting_for", "")[:MAX_WAIT_CHARACTERS]
            if wait != self._waiting_for.get(name, ""):
                self._waiting_for[name] = wait
                self._waits.setdefault(name, []).append((time_s, wait))


def span_line(record: StepRecord, ahead_s: float) -> dict[str, Any]:
    """A step's spans as JSON. `ahead_s` is the run's time minus the driver's clock."""

    def at(time_s: float) -> float:
        return round(time_s + ahead_s, DIGITS)

    spans = {
        name: [(str(span.state), at(span.start_s), at(span.end_s)) for span in stays]
        for name, stays in record.spans.items()
    }
    slots = {
        name: [(slot, sequence, at(start_s), at(end_s)) for slot, sequence, start_s, end_s in stays]
        for name, stays in record.stays.items()
    }
    return {"step": record.step, "spans": spans, **({"slots": slots} if slots else {})}


class StatusFile(Sink):
    """status.json, replaced atomically. Not synced to disk until the run ends: a newer one comes every
    second."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def status(self, status: Mapping[str, Any]) -> None:
        replace_text(self._path, to_json(status), durable=False)

    def close(self, status: Mapping[str, Any]) -> None:
        replace_text(self._path, to_json(status))


def to_json(content: Mapping[str, Any]) -> str:
    """Strict JSON. A figure that is not finite becomes a string ("nan", "inf"): it was measured, so it is not
    left out."""
    return json.dumps(_finite(content), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
