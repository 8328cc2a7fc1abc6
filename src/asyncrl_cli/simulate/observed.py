"""What a run's metrics lines say: which of them count, how long decode and train steps took, how long responses were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl_cli.observe.lines import Line, sampled_tokens, spent_s, trajectories
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.fit import Fit, Point, rate
from asyncrl_cli.simulate.workload import Lengths

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
