"""A line through measured times, where what was timed shared its machine for part of the time.

    seconds = (constant + slope * amount) / (1 - shared * i / (1 + i))

`shared` is the part of those seconds in which the other side computed too, and i the interference ratio (`SharedMachine`): work is
done at the rate 1 alone and at 1 / (1 + i) beside the other, on average 1 - shared * i / (1 + i).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

INTERFERENCES = tuple(step / 100 for step in range(201))
"""Those that are tried where the points can tell it."""
LEAST_SHARED_RANGE = 0.05
"""Where `shared` varies less, interference cannot be told from slower work."""


class Point(NamedTuple):
    """What was timed once: `amount` of work in `seconds` > 0, of which a share was shared."""

    amount: float
    seconds: float
    shared: float = 0.0


class Fit(NamedTuple):
    """`tells_interference`: the points could tell it at all."""

    constant: float
    slope: float
    interference: float
    tells_interference: bool


def rate(shared: Any, interference: float) -> Any:
    """Work per second, against that on a machine of its own; of one share, or of an array of them."""
    return 1 - shared * interference / (1 + interference)


@np.errstate(divide="raise", over="raise", invalid="raise")
def fit_line(points: Sequence[Point]) -> Fit:
    """All coefficients are >= 0. The line's form comes from least squares of relative errors, so that slow steps (of a disturbed
    machine) do not decide it. They alone would put the line too low: it is scaled so that its predictions add up to the seconds
    that were spent."""
    amounts, seconds, shares = np.array(points).T
    lines = np.stack([np.ones_like(amounts), amounts], axis=1)
    tells = bool(np.ptp(shares) > LEAST_SHARED_RANGE)
    fits = []
    for interference in INTERFERENCES if tells else (0.0,):
        work = seconds * rate(shares, interference)
        fits.append((*_least_squares(lines / work[:, None]), interference))
    _, coefficients, interference = min(fits, key=lambda fit: fit[0])
    predicted_s = lines @ coefficients / rate(shares, interference)
    constant, slope = (float(coefficient) for coefficient in coefficients * seconds.sum() / predicted_s.sum())
    return Fit(constant, slope, interference, tells)


def _least_squares(columns: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
    """(error, coefficients >= 0) of `columns @ coefficients` against ones: of both columns, or of one of them alone."""
    found = []
    for used in ([0], [1], [0, 1]):
        coefficients = np.zeros(2)
        coefficients[used], _, rank, _ = np.linalg.lstsq(columns[:, used], np.ones(len(columns)))
        if rank == len(used) and coefficients.min() >= 0:
            found.append((float(np.mean((columns @ coefficients - 1) ** 2)), coefficients))
    return min(found, key=lambda one: one[0])
