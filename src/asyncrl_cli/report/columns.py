"""Lines of metrics as columns for charts. A long run has several train steps per point: their mean, between minimum and maximum.

metrics.jsonl does not say how a figure is added up (docs/metrics.md does), so all figures are treated alike: a joined point is the
mean of its steps, and `lows` and `highs` keep what a mean hides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from statistics import fmean
from typing import Any

from asyncrl_cli.observe.lines import Line

MOST_STEPS = 2000
"""A run of more train steps is joined to at most `JOINED_POINTS` points."""
JOINED_POINTS = 1000
DIGITS = 7
"""Significant digits of what is not a whole number: a float32 has no more."""


@dataclass(slots=True)
class Columns:
    """`values`: metric -> a value per point, None where it was not measured. Values are numbers, or lists of numbers as in
    metrics.jsonl. `lows` and `highs` of the numbers are empty unless steps are joined."""

    steps_per_point: int
    values: dict[str, list[Any]] = field(default_factory=dict)
    lows: dict[str, list[Any]] = field(default_factory=dict)
    highs: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, steps: Sequence[Line], point: int) -> None:
        """Append the point of these steps; `point` have been added before."""
        if self.steps_per_point == 1:
            _append(self.values, steps[0], point)
            return
        found = {key: [line[key] for line in steps if key in line] for line in steps for key in line}
        numbers = {key: values for key, values in found.items() if not isinstance(values[0], list)}
        _append(self.values, {key: _mean(values) for key, values in found.items()}, point)
        for columns, extreme in ((self.lows, min), (self.highs, max)):
            _append(columns, {key: extreme(values) for key, values in numbers.items()}, point)


def columns_of(lines: Iterable[Line], num_steps: int) -> Columns:
    """`num_steps`: how many lines there are."""
    columns = Columns(steps_per_point=1 if num_steps <= MOST_STEPS else -(-num_steps // JOINED_POINTS))
    points, remaining = 0, iter(lines)
    while steps := list(islice(remaining, columns.steps_per_point)):
        columns.add(steps, points)
        points += 1
    for column in (*columns.values.values(), *columns.lows.values(), *columns.highs.values()):
        column.extend([None] * (points - len(column)))
    return columns


def rounded(value: Any) -> Any:
    """With `DIGITS` significant digits; whole numbers unchanged, lists item by item."""
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, int):
        return value
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 10**DIGITS else short


def _append(columns: dict[str, list[Any]], line: Line, point: int) -> None:
    for key, value in line.items():
        column = columns.setdefault(key, [])
        column.extend([None] * (point - len(column)))
        column.append(rounded(value))


def _mean(values: Sequence[Any]) -> Any:
    """Of lists: item by item, where a shorter one has zeros (histograms are as long as their highest count)."""
    if isinstance(values[0], list):
        return [fmean(items) for items in zip_longest(*values, fillvalue=0)]
    return fmean(values)
