"""What a picture of a simulated run needs: spans by executor, running sequences, publishes. A real run leaves it in files."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl_cli.loop.watching import Event, Observer, Snapshot, StepRecord
from asyncrl_cli.observe.lines import Counts, Spans, add_span
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER

MAX_WORKERS = 8


class KeptTimeline(Observer):
    """Keeps what a picture of a simulated run needs, of `MAX_WORKERS` workers at most."""

    def __init__(self) -> None:
        self.spans: Spans = {}
        self.running: Counts = {}
        self.publishes_s: list[float] = []
        self.roles: dict[str, str] = {}

    def event(self, event: Event) -> None:
        if event.name == "published":
            self.publishes_s.append(event.time_s)

    def step(self, record: StepRecord) -> None:
        if not self.roles:
            self.roles = {name: report.role for name, report in record.reports.items()}
            self.spans = {name: [] for name in (*of_role(self.roles, TRAINER), *shown_workers(self.roles))}
        for name in self.spans.keys() & record.spans.keys():
            for span in record.spans[name]:
                add_span(self.spans[name], str(span.state), span.start_s, span.end_s)

    def tick(self, snapshot: Snapshot) -> None:
        for name in self.spans.keys() & snapshot.reports.keys():
            gauges = snapshot.reports[name].gauges
            if "running_sequences" in gauges:
                self.running.setdefault(name, []).append((snapshot.time_s, gauges["running_sequences"]))


def shown_workers(roles: Mapping[str, str]) -> tuple[str, ...]:
    """All of them, or `MAX_WORKERS` spread evenly from the first to the last."""
    names = of_role(roles, ROLLOUT)
    if len(names) <= MAX_WORKERS:
        return tuple(names)
    return tuple(names[round(index * (len(names) - 1) / (MAX_WORKERS - 1))] for index in range(MAX_WORKERS))


def of_role(roles: Mapping[str, str], role: str) -> list[str]:
    """In the order of their numbers: rollout-2 before rollout-10."""
    return sorted((name for name, found in roles.items() if found == role), key=lambda name: (len(name), name))
