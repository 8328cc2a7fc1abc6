"""What a run's metrics lines say: which of them count, how long responses were, how long decode and train steps took, and the line
through such times, where what was timed shared its machine for part of the time:

    seconds = (constant + slope * amount) / (1 - shared * i / (1 + i))

`shared` is the part of those seconds in which the other side computed too, and i the interference ratio (`SharedMachine`): work is
done at the rate 1 alone and at 1 / (1 + i) beside the other, on average 1 - shared * i / (1 + i).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncrl_cli.observe.lines import Line, sampled_tokens, spent_s, trajectories
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.workload import Lengths

INTERFERENCES = tuple(step / 100 for step in range(201))
"""Those that are tried where the points can tell it."""
LEAST_SHARED_RANGE = 0.05
"""Where `shared` varies less, interference cannot be told from slower work."""
WARMING_STEPS = 4
LENGTHS_KEPT = 2000
LENGTHS_PER_STEP = 64
LEAST_BUSY = 0.05
NEEDED = (
    "trainer/idle_ratio",
    "rollouter/idle_ratio",
    "rollouter/tokens_per_s",
    "rollouter/decode_batch_mean",
    "response_tokens/mean",
    "response_tokens/quantiles",
    "staleness/histogram",
)
"""Keys that a line has unless some executor did not report in time: then it says too little."""


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


def undisturbed(lines: Sequence[Line]) -> list[Line]:
    """Train steps beside which nothing else was done, from the fifth one on and without the last."""
    return [line for line in lines[WARMING_STEPS:-1] if _is_whole(line)]


def _is_whole(line: Line) -> bool:
    """Nothing but the loop's own work, and every executor has reported in time."""
    beside_s = spent_s(line, "eval") + spent_s(line, "checkpoint")
    return beside_s < 0.02 * spent_s(line, "step") and all(key in line for key in NEEDED)


def _busy(line: Line) -> tuple[float, float, float]:
    """Shares of the step's time: trainer busy, rollout busy, both."""
    trainer, rollout = 1 - line["trainer/idle_ratio"], 1 - line["rollouter/idle_ratio"]
    return trainer, rollout, line.get("overlap_ratio", 0.0) * min(trainer, rollout)


def decode_points(lines: Sequence[Line], workers: int) -> list[Point]:
    """Mean seconds of a decode step against its mean batch, of lines with enough decoding. What is linear is so on average, too."""
    points = []
    for line in lines:
        _, busy, both = _busy(line)
        batch, tokens_per_s = line["rollouter/decode_batch_mean"], line["rollouter/tokens_per_s"]
        if busy < LEAST_BUSY or batch <= 0 or tokens_per_s <= 0:
            continue
        points.append(Point(amount=batch, seconds=batch * workers * busy / tokens_per_s, shared=min(1.0, both / busy)))
    return points


def train_points(lines: Sequence[Line]) -> list[Point]:
    return [
        Point(amount=sampled_tokens(line), seconds=spent_s(line, "train"), shared=_shared_by_trainer(line))
        for line in lines
        if sampled_tokens(line) > 0 and spent_s(line, "train") > 0
    ]


def _shared_by_trainer(line: Line) -> float:
    """Of the train call itself: the trainer is busy in it alone."""
    trainer, _, both = _busy(line)
    return min(1.0, both / trainer) if trainer > 0 else 0.0


def old_logprob_s_per_token(lines: Sequence[Line], fit: Fit) -> float | None:
    """Seconds per scored token on a machine of its own; None if nothing was scored."""
    scored = sum(line.get("train/old_logprob_tokens", 0.0) for line in lines)
    seconds = sum(spent_s(line, "old_logprob") * rate(_shared_by_trainer(line), fit.interference) for line in lines)
    return seconds / scored if scored else None


def lengths_of(lines: Sequence[Line], profile: Profile) -> Lengths:
    """Observed lengths: LENGTHS_PER_STEP of each step, of all these LENGTHS_KEPT at even distances."""
    cap = profile.rollout.max_response_tokens
    drawn = sorted(tokens for line in lines for tokens in _step_lengths(line, cap))
    kept = min(LENGTHS_KEPT, len(drawn))
    picked = [drawn[int((index + 0.5) / kept * len(drawn))] for index in range(kept)]
    return Lengths(prompt_tokens=0, distribution="list", response_tokens=tuple(picked))


def _step_lengths(line: Line, cap: int) -> list[int]:
    """A line's quantiles run from its shortest response to its longest; each response, also these two, is 1 / count of them."""
    shares = (np.arange(LENGTHS_PER_STEP) + 0.5) / LENGTHS_PER_STEP
    points, count = line["response_tokens/quantiles"], trajectories(line)
    places = np.clip((shares * count - 0.5) / max(count - 1, 1), 0.0, 1.0)
    return [max(1, min(round(length), cap)) for length in np.quantile(points, places).tolist()]
