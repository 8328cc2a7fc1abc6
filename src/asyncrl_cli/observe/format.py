"""Figures for people: durations, counts, shares, bars and sparklines as plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

SPARKS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉█"
NOTHING = "-"


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and math.isfinite(value)


def duration(seconds: object) -> str:
    """`1:02:03` for long ones, `4.2 s` and `12 ms` for short ones."""
    if not is_number(seconds) or seconds >= 60:
        return clock(seconds)
    if seconds >= 0.0995:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 9.95e-3 or seconds == 0 else f"{seconds * 1e3:.1f} ms"


def clock(seconds: object) -> str:
    """`0:01:34`, `3:02:03`."""
    if not is_number(seconds):
        return _written(seconds, "")
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


def share(value: object) -> str:
    """`81%`."""
    return _written(value, ".0%")


def number(value: object, digits: int = 2) -> str:
    return _written(value, f".{digits}f")


def count(value: object) -> str:
    """`12,345`."""
    return _written(value, ",.0f")


def small(value: object) -> str:
    """`2.1e-07`."""
    return _written(value, ".1e")


def _written(value: object, form: str) -> str:
    """`-` for what is absent, never 0. What is not a finite number is shown by its name: JSON has it as a string."""
    return NOTHING if value is None else format(value, form) if is_number(value) else str(value)


def bar(fraction: float, width: int) -> str:
    """A bar of `width` cells, in eighths of a cell."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (EIGHTHS[rest] if rest else "")).ljust(width)


def sparkline(values: Sequence[Any], width: int, *, low: float | None = None, high: float | None = None) -> str:
    """The last values, at most `width` of them, between `low` and `high` (their own extremes if not given); only finite ones."""
    shown = [value for value in list(values)[-width:] if is_number(value)]
    if not shown or width <= 0:
        return ""
    low = min(shown) if low is None else low
    high = max(shown) if high is None else high
    if high <= low:
        return SPARKS[3] * len(shown)
    steps = [(min(high, max(low, value)) - low) / (high - low) for value in shown]
    return "".join(SPARKS[round(step * (len(SPARKS) - 1))] for step in steps)
