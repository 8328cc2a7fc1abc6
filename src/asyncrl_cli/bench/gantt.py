"""The data of a Gantt chart: a run's spans by executor, its running sequences, its publishes, the ends of its windows.

Real runs left it in timeline.jsonl and events.jsonl; in a simulated run an observer keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl_cli.bench.measure import stretch_of
from asyncrl_cli.loop.watching import Event, Observer, Snapshot, StepRecord
from asyncrl_cli.observe.lines import Counts, Line, Spans, add_span, read_events, read_timeline

MAX_WORKERS = 8
TRAINER, ROLLOUT = "trainer", "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One run. Times are seconds of the run; `num_workers` may be more than are in `workers`, which are shown."""

    profile: str
    trainers: tuple[str, ...]
    workers: tuple[str, ...]
    num_workers: int
    spans: Mapping[str, Sequence[tuple[str, float, float]]]
    running: Mapping[str, Sequence[tuple[float, float]]]
    publishes_s: tuple[float, ...]
    window_ends_s: tuple[float, ...]

    def middle_s(self, length_s: float) -> float:
        """Where a view of about `length_s` begins: the end of a window, so that the view lies in the middle of the run."""
        ends = self.window_ends_s
        wanted_s = max(0.0, (ends[0] + ends[-1] - length_s) / 2)
        return min(ends, key=lambda end_s: abs(end_s - wanted_s))

    @property
    def window_s(self) -> float:
        """Mean length of a window."""
        ends = self.window_ends_s
        return (ends[-1] - ends[0]) / (len(ends) - 1)


class KeptTimeline(Observer):
    """Keeps what a picture of a simulated run needs, of `MAX_WORKERS` workers at most."""

    def __init__(self) -> None:
        self._spans: Spans = {}
        self._running: Counts = {}
        self._publishes_s: list[float] = []
        self._roles: dict[str, str] = {}

    def event(self, event: Event) -> None:
        if event.name == "published":
            self._publishes_s.append(event.time_s)

    def step(self, record: StepRecord) -> None:
        if not self._roles:
            self._roles = {name: report.role for name, report in record.reports.items()}
            self._spans = {name: [] for name in (*_of_role(self._roles, TRAINER), *shown_workers(self._roles))}
        for name in self._spans.keys() & record.spans.keys():
            for span in record.spans[name]:
                add_span(self._spans[name], str(span.state), span.start_s, span.end_s)

    def tick(self, snapshot: Snapshot) -> None:
        for name in self._spans.keys() & snapshot.reports.keys():
            gauges = snapshot.reports[name].gauges
            if "running_sequences" in gauges:
                self._running.setdefault(name, []).append((snapshot.time_s, gauges["running_sequences"]))

    def timeline(self, profile: str, lines: Sequence[Line]) -> Timeline:
        return _timeline(profile, lines, self._roles, self._spans, self._running, self._publishes_s)


def timeline_of_run(profile: str, run_dir: Path, lines: Sequence[Line]) -> Timeline | None:
    """None for a run that kept no timeline."""
    path = run_dir / "timeline.jsonl"
    if not path.is_file():
        return None
    status = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    roles = {executor["name"]: executor["role"] for executor in status["executors"]}
    publishes_s = [event["time_s"] for event in read_events(run_dir / "events.jsonl") if event["event"] == "published"]
    return _timeline(profile, lines, roles, *read_timeline(path), publishes_s)


def shown_workers(roles: Mapping[str, str]) -> tuple[str, ...]:
    """All of them, or `MAX_WORKERS` spread evenly from the first to the last."""
    names = _of_role(roles, ROLLOUT)
    if len(names) <= MAX_WORKERS:
        return tuple(names)
    return tuple(names[round(index * (len(names) - 1) / (MAX_WORKERS - 1))] for index in range(MAX_WORKERS))


def _of_role(roles: Mapping[str, str], role: str) -> list[str]:
    """In the order of their numbers: rollout-2 before rollout-10."""
    return sorted((name for name, found in roles.items() if found == role), key=lambda name: (len(name), name))


def _timeline(
    profile: str, lines: Sequence[Line], roles: Mapping[str, str], spans: Spans, running: Counts, publishes_s: Sequence[float]
) -> Timeline:
    stretch = stretch_of(lines)
    ends = {line["window"]: line["time_s"] for line in stretch.lines}
    return Timeline(
        profile=profile,
        trainers=tuple(_of_role(roles, TRAINER)),
        workers=shown_workers(roles),
        num_workers=len(_of_role(roles, ROLLOUT)),
        spans=spans,
        running=running,
        publishes_s=tuple(publishes_s),
        window_ends_s=(stretch.before["time_s"], *ends.values()),
    )
