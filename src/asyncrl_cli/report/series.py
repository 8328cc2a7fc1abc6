"""What the charts of a page draw: figures of train steps as columns, and where the executors' time went.

A long run has several train steps per point: their mean, between minimum and maximum. metrics.jsonl does not
say how a figure is added up (docs/metrics.md does), so all figures are treated alike: a joined point is the
mean of its steps, and `lows` and `highs` keep what a mean hides.

A long run also has more spans than a page can hold. They are merged: time is cut into cells of equal length,
and within a cell each state comes once, for as long as the executor was in it. Times in states stay right;
the order within a cell is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from statistics import fmean
from typing import Any

from asyncrl_cli.observe.recorded import add_span
from asyncrl_cli.observe.run_lines import Line, Spans, TimelineLine

MOST_STEPS = 2000
"""The steps of a longer run are joined to at most `JOINED_POINTS` points."""
JOINED_POINTS = 1000
DIGITS = 7
"""Significant digits of numbers that are not whole: a float32 has no more."""
MOST_SPANS = 24_000
"""Limit of spans in one drawn timeline; a browser draws this many without a delay."""
STATES_PER_CELL = 3
"""The most spans that a cell has on average: most states are rare."""
DECIMALS = 3
FLOW = ("trainer", "scorer", "rollout", "reward", "feed")
"""The roles in the order in which they are drawn."""

Values = dict[str, list[Any]]
"""Metric -> a value per point, None where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """`values` are numbers, or lists of numbers as in metrics.jsonl. `lows` and `highs` of the numbers are
    empty unless steps are joined."""

    steps_per_point: int
    values: Values
    lows: Values
    highs: Values


def columns_of(lines: Iterable[Line], num_steps: int) -> Columns:
    """`num_steps`: how many lines there are."""
    steps_per_point = 1 if num_steps <= MOST_STEPS else -(-num_steps // JOINED_POINTS)
    means, lows, highs, remaining = list[Line](), list[Line](), list[Line](), iter(lines)
    while steps := list(islice(remaining, steps_per_point)):
        found = {key: [line[key] for line in steps if key in line] for line in steps for key in line}
        means.append({key: rounded(_mean(values)) for key, values in found.items()})
        if steps_per_point > 1:
            numbers = {key: values for key, values in found.items() if not isinstance(values[0], list)}
            lows.append({key: rounded(min(values)) for key, values in numbers.items()})
            highs.append({key: rounded(max(values)) for key, values in numbers.items()})
    columns = [_columns(points) for points in (means, lows, highs)]
    return Columns(steps_per_point=steps_per_point, values=columns[0], lows=columns[1], highs=columns[2])


def _columns(points: Sequence[Line]) -> Values:
    return {key: [point.get(key) for point in points] for key in dict.fromkeys(chain.from_iterable(points))}


def rounded(value: Any) -> Any:
    """With `DIGITS` significant digits; whole numbers unchanged, lists item by item."""
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, int):
        return value
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 10**DIGITS else short


def _mean(values: Sequence[Any]) -> Any:
    """Of lists: item by item, where a shorter one has zeros (histograms are as long as their highest
    count)."""
    if len(values) > 1 and isinstance(values[0], list):
        return [fmean(items) for items in zip_longest(*values, fillvalue=0)]
    return fmean(values) if len(values) > 1 else values[0]


@dataclass(slots=True)
class Timeline:
    """Reads timeline.jsonl line by line. `length_s`: the run's time; `merged_s`: length of the cells, 0 if
    every span is there. `shares`: step -> the roles' shares of states in its time."""

    roles: Mapping[str, str]
    length_s: float
    most_spans: int = MOST_SPANS
    spans: Spans = field(default_factory=dict)
    shares: dict[int, dict[str, float]] = field(default_factory=dict)
    merged_s: float = 0.0

    def read(self, lines: Iterable[TimelineLine]) -> Timeline:
        for line in lines:
            spent_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
            for name, added in line["spans"].items():
                spans, states = self.spans.setdefault(name, []), spent_s[self.roles.get(name, name)]
                for state, start_s, end_s in added:
                    add_span(spans, state, start_s, end_s)
                    states[state] += end_s - start_s
            self.shares[line.get("step", 0)] = {
                f"states/{role}/{state}": seconds / sum(states.values())
                for role, states in spent_s.items()
                if sum(states.values()) > 0
                for state, seconds in states.items()
            }
            if self._num_spans > 4 * self.most_spans:
                self._merge()
        if self._num_spans > self.most_spans or self.merged_s:
            self._merge()
        return self

    @property
    def _num_spans(self) -> int:
        return sum(map(len, self.spans.values()))

    def _merge(self) -> None:
        # `length_s` is 0 if the run's status is lost.
        ended_s = max(end_s for spans in self.spans.values() for _, _, end_s in spans)
        num_cells = self.most_spans / (max(len(self.spans), 1) * STATES_PER_CELL)
        self.merged_s = max(self.length_s, ended_s, 1e-9) / num_cells
        for name, spans in self.spans.items():
            cells: dict[int, dict[str, float]] = {}
            for state, start_s, end_s in spans:
                for cell in range(int(start_s / self.merged_s), int(end_s / self.merged_s) + 1):
                    inside_s = min(end_s, (cell + 1) * self.merged_s) - max(start_s, cell * self.merged_s)
                    if inside_s > 1e-9:
                        states = cells.setdefault(cell, {})
                        states[state] = states.get(state, 0.0) + inside_s
            self.spans[name] = merged = []
            for cell, states in cells.items():
                at_s = cell * self.merged_s
                for state in sorted(states):
                    add_span(merged, state, at_s, at_s + states[state])
                    at_s += states[state]

    def to_json(self) -> dict[str, object]:
        """Executor -> state -> start and length of each span, one after the other."""

        def place(name: str) -> tuple[int, int, str]:
            role = self.roles.get(name, name)
            return (FLOW.index(role) if role in FLOW else len(FLOW), len(name), name)

        executors: dict[str, dict[str, list[float]]] = {}
        for name in sorted(self.spans, key=place):
            states = executors[name] = {}
            for state, start_s, end_s in self.spans[name]:
                times_s = round(start_s, DECIMALS), round(end_s - start_s, DECIMALS)
                states.setdefault(state, []).extend(times_s)
        return {"merged_s": round(self.merged_s, DECIMALS), "executors": executors}
