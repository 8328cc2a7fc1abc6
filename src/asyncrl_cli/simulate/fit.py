"""A line through measured times, where what was timed shared its machine for part of the time.

    seconds = (constant + slope * amount) / (1 - shared * i / (1 + i))

`shared` is the part of those seconds in which the other side computed too, and i the interference ratio of
`simulate/machine.py`: work is done at the rate 1 alone and at 1 / (1 + i) beside the other, on average 1 - shared * i / (1 + i).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_INTERFERENCE = 2.0
INTERFERENCE_STEPS = 200
LEAST_SHARED_RANGE = 0.05
"""Where `shared` varies less, interference cannot be told from slower work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was timed once: `amount` of work in `seconds` > 0, of which a share was shared."""

    amount: float
    seconds: float
    shared: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """`tells_interference`: the points could tell it at all."""

    constant: float
    slope: float
    interference: float
    tells_interference: bool


def rate(shared: float, interference: float) -> float:
    """Work per second, against that on a machine of its own."""
    return 1 - shared * interference / (1 + interference)


def fit_line(points: Sequence[Point]) -> Fit:
    """All coefficients >= 0. Least squares of relative errors give the line's form, so that slow steps (a disturbed machine) do not
    rule it; they ask for less than the mean, so its level is set by the sum: predictions add up to the seconds that were spent."""
    assert points
    shares = [point.shared for point in points]
    tells = max(shares) - min(shares) > LEAST_SHARED_RANGE
    ratios = [MAX_INTERFERENCE * step / INTERFERENCE_STEPS for step in range(INTERFERENCE_STEPS + 1)] if tells else [0.0]
    constant, slope, _, ratio = min(
        ((*_fit_with(points, ratio), ratio) for ratio in ratios), key=lambda candidate: (candidate[2], candidate[3])
    )
    predicted_s = sum((constant + slope * point.amount) / rate(point.shared, ratio) for point in points)
    level = sum(point.seconds for point in points) / predicted_s
    return Fit(constant=level * constant, slope=level * slope, interference=ratio, tells_interference=tells)


def _fit_with(points: Sequence[Point], ratio: float) -> tuple[float, float, float]:
    """(constant, slope, error) at that interference: two normal equations in (1, amount) / work, and their edges where one is 0."""
    ones = [1 / (point.seconds * rate(point.shared, ratio)) for point in points]
    slopes = [one * point.amount for one, point in zip(ones, points, strict=True)]
    a, b, c = _dot(ones, ones), _dot(ones, slopes), _dot(slopes, slopes)
    p, q = sum(ones), sum(slopes)
    determinant = a * c - b * b
    pairs = [(p / a, 0.0), (0.0, q / c if c else 0.0)]
    if determinant > 1e-12 * a * c:
        pairs.append(((p * c - q * b) / determinant, (q * a - p * b) / determinant))

    def error(pair: tuple[float, float]) -> float:
        predicted = (pair[0] * one + pair[1] * slope for one, slope in zip(ones, slopes, strict=True))
        return sum((value - 1) ** 2 for value in predicted) / len(ones)

    constant, slope = min((pair for pair in pairs if min(pair) >= 0), key=error)
    return constant, slope, error((constant, slope))


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))
