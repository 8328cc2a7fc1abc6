"""timeline.jsonl: what every executor did when, one line per train step, on the run's time axis (`time_s`).

    {"step": 7, "spans": {"trainer": [["starved", 11.2, 11.9], ["busy", 11.9, 13.1]], ...}, "running": {"rollout-0": [[12.1, 64]]}}

A step's line holds what was reported since the line before; `running` counts a worker's running sequences, once a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.loop.watching import StepRecord
from asyncrl_cli.observe.sinks import StepFile

Spans = dict[str, list[tuple[str, float, float]]]
Counts = dict[str, list[tuple[float, float]]]
DIGITS = 4
"""A tenth of a millisecond: a run's file stays small."""


class TimelineFile(StepFile):
    """timeline.jsonl, as a sink."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._running: Counts = {}

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


def read_timeline(path: Path) -> tuple[Spans, Counts]:
    """All of a run's spans and counts of running sequences, by executor, ascending in time; stays cut by a line are joined."""
    spans: Spans = {}
    running: Counts = {}
    with path.open(encoding="utf-8") as file:
        for text in file:
            line = json.loads(text)
            for name, stays in line["spans"].items():
                joined = spans.setdefault(name, [])
                for state, start_s, end_s in stays:
                    add_span(joined, state, start_s, end_s)
            for name, samples in line.get("running", {}).items():
                running.setdefault(name, []).extend((time_s, count) for time_s, count in samples)
    return spans, running


def add_span(spans: list[tuple[str, float, float]], state: str, start_s: float, end_s: float) -> None:
    """Append a stay, or lengthen the last one if it goes on."""
    if spans and spans[-1][0] == state and start_s - spans[-1][2] < 1e-3:
        spans[-1] = (state, spans[-1][1], max(end_s, spans[-1][2]))
    else:
        spans.append((state, start_s, end_s))
