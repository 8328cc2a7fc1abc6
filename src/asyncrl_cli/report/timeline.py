"""Where the executors' time went: their spans, for drawing, and each role's share of states per train step.

A long run has more spans than a page can hold. They are merged: time is cut into cells of equal length, and
within a cell each state comes once, for as long as the executor was in it. Times in states stay right; the
order within a cell is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl_cli.observe.line_types import RecordedSpan, Spans, TimelineLine
from asyncrl_cli.observe.recorded import add_span

MOST_SPANS = 24_000
"""Limit of spans in one drawn timeline; a browser draws this many without a delay."""
STATES_PER_CELL = 3
"""The most stays that a cell has on average: most states are rare."""
DECIMALS = 3


@dataclass(slots=True)
class Timeline:
    """Reads timeline.jsonl line by line. `length_s`: the run's time; `merged_s`: length of the cells, 0 if
    every span is there."""

    roles: Mapping[str, str]
    length_s: float
    most_spans: int = MOST_SPANS
    spans: Spans = field(default_factory=dict)
    shares: dict[int, dict[str, float]] = field(default_factory=dict)
    merged_s: float = 0.0

    def read(self, lines: Iterable[TimelineLine]) -> Timeline:
        for line in lines:
            self._add(line)
        if self._num_spans > self.most_spans or self.merged_s:
            self._merge()
        return self

    @property
    def _num_spans(self) -> int:
        return sum(map(len, self.spans.values()))

    def _add(self, line: TimelineLine) -> None:
        spent_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for name, stays in line["spans"].items():
            drawn, role = self.spans.setdefault(name, []), spent_s[self.roles.get(name, name)]
            for state, start_s, end_s in stays:
                add_span(drawn, state, start_s, end_s)
                role[state] += end_s - start_s
        self.shares[line.get("step", 0)] = {
            f"states/{role}/{state}": seconds / sum(states.values())
            for role, states in spent_s.items()
            if sum(states.values()) > 0
            for state, seconds in states.items()
        }
        if self._num_spans > 4 * self.most_spans:
            self._merge()

    def _merge(self) -> None:
        # `length_s` is 0 if the run's status is lost.
        ended_s = max(end_s for stays in self.spans.values() for _, _, end_s in stays)
        self.merged_s = (
            max(self.length_s, ended_s, 1e-9) * max(len(self.spans), 1) * STATES_PER_CELL / self.most_spans
        )
        self.spans = {name: _merged(stays, self.merged_s) for name, stays in self.spans.items()}

    def to_json(self) -> dict[str, Any]:
        """Executor -> state -> start and length of each stay, one after the other."""
        drawn = {name: self.spans[name] for name in sorted(self.spans, key=self._place)}
        return {
            "merged_s": round(self.merged_s, DECIMALS),
            "executors": {name: _by_state(stays) for name, stays in drawn.items()},
        }

    def _place(self, name: str) -> tuple[int, int, str]:
        flow = ("trainer", "scorer", "rollout", "reward", "feed")
        role = self.roles.get(name, name)
        return (flow.index(role) if role in flow else len(flow), len(name), name)


def _merged(stays: Iterable[RecordedSpan], cell_s: float) -> list[RecordedSpan]:
    cells: dict[int, dict[str, float]] = {}
    for state, start_s, end_s in stays:
        for cell in range(int(start_s / cell_s), int(end_s / cell_s) + 1):
            inside_s = min(end_s, (cell + 1) * cell_s) - max(start_s, cell * cell_s)
            if inside_s > 1e-9:
                states = cells.setdefault(cell, {})
                states[state] = states.get(state, 0.0) + inside_s
    merged: list[RecordedSpan] = []
    for cell, states in cells.items():
        at_s = cell * cell_s
        for state in sorted(states):
            add_span(merged, state, at_s, at_s + states[state])
            at_s += states[state]
    return merged


def _by_state(stays: Iterable[RecordedSpan]) -> dict[str, list[float]]:
    states: dict[str, list[float]] = {}
    for state, start_s, end_s in stays:
        states.setdefault(state, []).extend((round(start_s, DECIMALS), round(end_s - start_s, DECIMALS)))
    return states
