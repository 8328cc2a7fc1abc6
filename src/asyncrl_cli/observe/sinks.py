"""Files that a run leaves behind while it goes: metrics.jsonl, events.jsonl, timeline.jsonl, status.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.loop.watching import StepRecord
from asyncrl_cli.storage import naming, repair_lines, replace_text

DIGITS = 4
"""Of times in timeline.jsonl: a tenth of a millisecond keeps the file small."""


class Sink:
    """Writes or shows what `Observers` has worked out; a subclass overrides the calls it needs. They come from the event loop and
    must return at once."""

    def line(self, line: Mapping[str, Any]) -> None:
        """The metrics of a train step."""

    def event(self, event: Mapping[str, Any]) -> None:
        """One event, as it stands in events.jsonl."""

    def spans(self, spans: Mapping[str, Any]) -> None:
        """Where the executors' time went since the last train step, as it stands in timeline.jsonl."""

    def status(self, status: Mapping[str, Any]) -> None:
        """The run at a glance, once a second."""

    def close(self, status: Mapping[str, Any]) -> None:
        """The run has ended with this status."""


class LineFile(Sink):
    """A file of JSON lines, each handed to the system at once, so that a killed process leaves at most one line incomplete."""

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
    """A line per train step. A resume takes back the lines of steps that will happen again."""

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] != "resumed":
            return
        kept_bytes = 0
        with self._path.open("rb") as file:
            for line in file:
                if json.loads(line)["step"] > event["from_step"]:
                    break
                kept_bytes += len(line)
        self._file.truncate(kept_bytes)


class MetricsFile(StepFile):
    """metrics.jsonl."""

    line = LineFile.append


class EventsFile(LineFile):
    """events.jsonl: nothing is ever taken back; `resumed` says which events were lost with a crash."""

    event = LineFile.append


class TimelineFile(StepFile):
    """timeline.jsonl: what every executor did when, on the run's time axis (`time_s`).

        {"step": 7, "spans": {"trainer": [["starved", 11.2, 11.9], ...]}, "running": {"rollout-0": [[12.1, 64], ...]}}

    A step's line holds what was reported since the line before; `running` counts a worker's running sequences, once a second.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._running: dict[str, list[tuple[float, float]]] = {}

    def spans(self, spans: Mapping[str, Any]) -> None:
        self.append({**spans, "running": self._running})
        self._running = {}

    def status(self, status: Mapping[str, Any]) -> None:
        """Remember how many sequences run now."""
        for executor in status.get("executors", ()):
            if executor["role"] == "rollout" and "running_sequences" in executor["gauges"]:
                sample = (round(status["progress"]["time_s"], DIGITS), executor["gauges"]["running_sequences"])
                self._running.setdefault(executor["name"], []).append(sample)


def span_line(record: StepRecord, ahead_s: float) -> dict[str, Any]:
    """A step's spans as JSON; `ahead_s` is what the run's time is ahead of the driver's clock."""
    spans = {
        name: [(str(span.state), round(span.start_s + ahead_s, DIGITS), round(span.end_s + ahead_s, DIGITS)) for span in stays]
        for name, stays in record.spans.items()
    }
    return {"step": record.step, "spans": spans}


class StatusFile(Sink):
    """status.json, replaced whole. Not flushed to the disk: a second later there is a newer one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def status(self, status: Mapping[str, Any]) -> None:
        replace_text(self._path, to_json(status), durable=False)

    def close(self, status: Mapping[str, Any]) -> None:
        replace_text(self._path, to_json(status))


def to_json(content: Mapping[str, Any]) -> str:
    """Strict JSON. A figure that is not finite becomes a string ("nan", "inf"): it was measured, so it is not left out."""
    return json.dumps(_finite(content), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
