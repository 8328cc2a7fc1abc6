"""What one line of metrics.jsonl says: seconds of its parts, what its step trained, values between those it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]


def spent_s(line: Line, part: str) -> float:
    """Seconds of `timing/<part>_s`, 0 where the line has no such part."""
    return float(line.get(f"timing/{part}_s", 0.0))


def trajectories(line: Line) -> int:
    """Trained by the step: the histogram of staleness counts them all."""
    return sum(line.get("staleness/histogram", ()))


def sampled_tokens(line: Line) -> float:
    """Sampled tokens that the step trained: mean response length times trajectories."""
    return float(line.get("response_tokens/mean", 0.0) * trajectories(line))


def quantile(ascending: Sequence[float], share: float) -> float:
    """Between neighbours in proportion (as numpy's default)."""
    place = share * (len(ascending) - 1)
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (place - low)
