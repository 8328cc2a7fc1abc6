"""The sinks that write a run's own files: metrics.jsonl, events.jsonl, timeline.jsonl and status.json."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from asyncrl_cli.base.safe_files import MIB
from asyncrl_cli.base.storage import naming, repair_lines, replace_text
from asyncrl_cli.contracts.events import StepRecord
from asyncrl_cli.contracts.status import Status
from asyncrl_cli.observe.format import is_number
from asyncrl_cli.observe.line_types import Line
from asyncrl_cli.observe.sinks import Sink

log = logging.getLogger("asyncrl")
DIGITS = 4
"""Decimals of times in timeline.jsonl: a tenth of a millisecond is enough and keeps the file small."""
MAX_TRACED_BYTES = 256 * MIB
MAX_WAIT_CHARACTERS = 200


class LineFile(Sink):
    """A file of JSON lines, each flushed to the system at once: a killed process leaves at most one
    incomplete line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        repair_lines(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def append(self, line: Line) -> None:
        with naming(self._path):
            self._file.write(to_json(line) + "\n")

    def close(self, status: Status) -> None:
        self._file.close()


class StepFile(LineFile):
    """One line per train step. A resume removes the lines of steps that will be trained again."""

    def event(self, event: Line) -> None:
        if event["event"] == "resumed":
            with self._path.open("rb") as file:
                lasting = takewhile(lambda line: json.loads(line)["step"] <= event["from_step"], file)
                self._file.truncate(sum(map(len, lasting)))


class MetricsFile(StepFile):
    """metrics.jsonl."""

    def line(self, line: Line) -> None:
        self.append(line)


class EventsFile(LineFile):
    """events.jsonl: lines are never removed. After a crash, `resumed` says from which step the run
    continues."""

    def event(self, event: Line) -> None:
        self.append(event)


class TimelineFile(StepFile):
    """timeline.jsonl: what every executor did when, on the run's time axis (`time_s`).

        {"step": 7, "spans": {"trainer": [["starved", 11.2, 11.9], ...]},
         "running": {"rollout-0": [[12.1, 64], ...]}}

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

    def spans(self, spans: Line) -> None:
        if not self._is_full and "slots" in spans:
            self._is_full = os.fstat(self._file.fileno()).st_size > MAX_TRACED_BYTES
            if self._is_full:
                size = MAX_TRACED_BYTES // MIB
                log.warning("timeline.jsonl has %d MiB: sequences are traced no further", size)
        wanted = {key: content for key, content in spans.items() if key != "slots" or not self._is_full}
        self.append({**wanted, "running": self._running, "waits": self._waits})
        self._running, self._waits = {}, {}

    def status(self, status: Status) -> None:
        """Remember how many sequences run now, and what every executor waits for."""
        time_s = round(status.progress.time_s, DIGITS)
        for executor in status.executors:
            name, sequences = executor.name, executor.gauges.get("running_sequences")
            if executor.role == "rollout" and is_number(sequences):
                self._running.setdefault(name, []).append((time_s, sequences))
            wait = executor.waiting_for[:MAX_WAIT_CHARACTERS]
            if wait != self._waiting_for.get(name, ""):
                self._waiting_for[name] = wait
                self._waits.setdefault(name, []).append((time_s, wait))


def span_line(record: StepRecord, ahead_s: float) -> dict[str, Any]:
    """A step's spans as JSON. `ahead_s` is the run's time minus the driver's clock."""

    def at(time_s: float) -> float:
        return round(time_s + ahead_s, DIGITS)

    spans = {
        name: [(str(span.state), at(span.start_s), at(span.end_s)) for span in of_executor]
        for name, of_executor in record.spans.items()
    }
    slots = {
        name: [(slot, sequence, at(start_s), at(end_s)) for slot, sequence, start_s, end_s in of_worker]
        for name, of_worker in record.stays.items()
    }
    return {"step": record.step, "spans": spans} | ({"slots": slots} if slots else {})


class StatusFile(Sink):
    """status.json, replaced atomically. Not synced to disk until the run ends: a newer one comes every
    second."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def status(self, status: Status) -> None:
        replace_text(self._path, to_json(status.to_json()), durable=False)

    def close(self, status: Status) -> None:
        replace_text(self._path, to_json(status.to_json()))


def to_json(content: Line) -> str:
    """Strict JSON. A figure that is not finite becomes a string ("nan", "inf"): it was measured, so it is not
    left out."""
    return json.dumps(_finite(content), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
