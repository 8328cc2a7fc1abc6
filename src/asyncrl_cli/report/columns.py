"""Lines of metrics as columns for charts. A long run has several train steps per point: their mean, between
minimum and maximum.

metrics.jsonl does not say how a figure is added up (docs/metrics.md does), so all figures are treated alike:
a joined point is the mean of its steps, and `lows` and `highs` keep what a mean hides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from statistics import fmean
from typing import Any

from asyncrl_cli.observe.line_types import Line

MOST_STEPS = 2000
"""The steps of a longer run are joined to at most `JOINED_POINTS` points."""
JOINED_POINTS = 1000
DIGITS = 7
"""Significant digits of numbers that are not whole: a float32 has no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """`values`: metric -> a value per point, None where it was not measured. Values are numbers, or lists of
    numbers as in metrics.jsonl. `lows` and `highs` of the numbers are empty unless steps are joined."""

    steps_per_point: int
    values: dict[str, list[Any]]
    lows: dict[str, list[Any]]
    highs: dict[str, list[Any]]


def columns_of(lines: Iterable[Line], num_steps: int) -> Columns:
    """`num_steps`: how many lines there are."""
    steps_per_point = 1 if num_steps <= MOST_STEPS else -(-num_steps // JOINED_POINTS)
    means, lows, highs, remaining = list[Line](), list[Line](), list[Line](), iter(lines)
    while steps := list(islice(remaining, steps_per_point)):
        found = {key: [line[key] for line in steps if key in line] for line in steps for key in line}
        numbers = {
            key: values
            for key, values in found.items()
            if steps_per_point > 1 and not isinstance(values[0], list)
        }
        means.append({key: rounded(_mean(values)) for key, values in found.items()})
        lows.append({key: rounded(min(values)) for key, values in numbers.items()})
        highs.append({key: rounded(max(values)) for key, values in numbers.items()})
    return Columns(
        steps_per_point=steps_per_point, values=_columns(means), lows=_columns(lows), highs=_columns(highs)
    )


def _columns(points: Sequence[Line]) -> dict[str, list[Any]]:
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
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], list):
        return [fmean(items) for items in zip_longest(*values, fillvalue=0)]
    return fmean(values)
