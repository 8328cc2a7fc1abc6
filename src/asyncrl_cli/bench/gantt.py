"""The data of a Gantt chart: a run's spans by executor, its running sequences, its publishes, the ends of its windows.

Real runs left it in timeline.jsonl and events.jsonl; in a simulated run an observer keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl_cli.bench.measure import stretch_of
from asyncrl_cli.observe.lines import Counts, Line, Spans, read_events, read_timeline
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER
from asyncrl_cli.simulate.kept_timeline import of_role, shown_workers


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


def timeline_of_run(profile: str, run_dir: Path, lines: Sequence[Line]) -> Timeline | None:
    """None for a run that kept no timeline."""
    path = run_dir / "timeline.jsonl"
    if not path.is_file():
        return None
    status = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    roles = {executor["name"]: executor["role"] for executor in status["executors"]}
    publishes_s = [event["time_s"] for event in read_events(run_dir / "events.jsonl") if event["event"] == "published"]
    return timeline_of(profile, lines, roles, *read_timeline(path), publishes_s)


def timeline_of(
    profile: str, lines: Sequence[Line], roles: Mapping[str, str], spans: Spans, running: Counts, publishes_s: Sequence[float]
) -> Timeline:
    stretch = stretch_of(lines)
    ends = {line["window"]: line["time_s"] for line in stretch.lines}
    return Timeline(
        profile=profile,
        trainers=tuple(of_role(roles, TRAINER)),
        workers=shown_workers(roles),
        num_workers=len(of_role(roles, ROLLOUT)),
        spans=spans,
        running=running,
        publishes_s=tuple(publishes_s),
        window_ends_s=(stretch.before["time_s"], *ends.values()),
    )
