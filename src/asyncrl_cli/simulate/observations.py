"""Extracts what a calibration needs from a run's metrics lines: usable lines, response lengths, times of
decode and train steps.

A straight line is fitted to such times, as they would have been with cores of their own: `Sharing` counts
how many processes computed at once on how many cores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from asyncrl_cli.observe.run_lines import Line, sampled_tokens, spent_s, trajectories
from asyncrl_cli.profile.arithmetic import ROLLOUT, TRAIN
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.workload import Drawn, Lengths, Turns

LEAST_RANGE = 0.1
"""Amounts that differ by less, relative to the largest, do not tell a line's constant from its slope."""
WARMING_STEPS = 4
LENGTHS_KEPT = 2000
LENGTHS_PER_STEP = 64
LEAST_BUSY = 0.05
NEEDED = {
    "trainer/idle_ratio",
    "rollouter/idle_ratio",
    "rollouter/tokens_per_s",
    "rollouter/decode_batch_mean",
    "response_tokens/mean",
    "response_tokens/quantiles",
    "staleness/histogram",
}
"""Keys that a line must have to be used. They are missing if an executor did not report in time."""


class Point(NamedTuple):
    """One measurement: `amount` of work in `seconds` > 0 on cores of its own."""

    amount: float
    seconds: float


class Fit(NamedTuple):
    """`tells_slope`: whether the points' amounts differ enough for the line's direction. `error`: the
    relative standard error of its height, from how much the points scatter around it."""

    constant: float
    slope: float
    error: float = 0.0
    tells_slope: bool = True


class Sharing(NamedTuple):
    """How many `processes` of each task computed on `places`, as many as can without slowing each other
    (`SharedMachine`). Those of one task are taken to compute at the same times. Short steps' busy times are
    only roughly known, so all lines count together."""

    processes: Mapping[str, int]
    places: float = math.inf

    def of(self, task: str, lines: Sequence[Line]) -> float:
        """The share of a core that each computing process of the task had, on average. When scorers compute
        beside others is not recorded, and taken to be chance."""
        trainer, rollout, both = _busy(lines)
        states = list[tuple[tuple[str, ...], float]]()
        states += [((TRAIN,), trainer - both), ((ROLLOUT,), rollout - both), ((TRAIN, ROLLOUT), both)]
        states += [((), 1 - trainer - rollout + both)]
        for scorer in (one for one in self.processes if one not in (TRAIN, ROLLOUT)):
            key = f"{scorer}/idle_ratio"
            measured = [line for line in lines if key in line]
            idle = _mean(measured, key) if measured else 1.0
            more = ((), idle), ((scorer,), 1 - idle)
            states = [((*busy, *besides), p * q) for busy, p in states for besides, q in more]
        own = [(sum(self.processes[one] for one in busy), p) for busy, p in states if task in busy]
        total = sum(p for _, p in own)
        return sum(min(1.0, self.places / number) * p for number, p in own) / total if total else 1.0


@np.errstate(divide="raise", over="raise", invalid="raise")
def fit_line(points: Sequence[Point]) -> Fit:
    """Fit the line of the module's docstring; both coefficients are >= 0. Uses least squares of relative
    errors, so that a few slow steps (of a disturbed machine) do not dominate. Such a line is too low, so it
    is scaled until its predictions add up to the seconds that were spent."""
    amounts, seconds = np.array(points).T
    lines = np.stack([np.ones_like(amounts), amounts], axis=1)
    columns, fits = lines / seconds[:, None], []
    for used in ([0], [1], [0, 1]):  # a constant, a slope, or both
        coefficients = np.zeros(2)
        coefficients[used], _, rank, _ = np.linalg.lstsq(columns[:, used], np.ones(len(columns)))
        if rank == len(used) and coefficients.min() >= 0:
            fits.append((float(np.mean((columns @ coefficients - 1) ** 2)), coefficients))
    _, coefficients = min(fits, key=lambda fit: fit[0])
    predicted_s = lines @ coefficients
    constant, slope = (float(coefficient) for coefficient in coefficients * seconds.sum() / predicted_s.sum())
    scatter = float(np.std(seconds / predicted_s, ddof=1)) if len(points) > 1 else 0.0
    tells_slope = bool(np.ptp(amounts) > LEAST_RANGE * amounts.max())
    return Fit(constant, slope, scatter / math.sqrt(len(points)), tells_slope)


def reasons_against(lines: Sequence[Line]) -> list[str]:
    """Why each line cannot be used; "" if it can. The warm-up is WARMING_STEPS, or a quarter of a short
    run."""
    warm_up, reasons = min(WARMING_STEPS, len(lines) // 4), []
    for place, line in enumerate(lines):
        least_s = 0.02 * spent_s(line, "step")
        holds = {
            "warm-up": place < warm_up,
            "the last": place == len(lines) - 1,
            "beside an eval": spent_s(line, "eval") >= least_s,
            "beside a checkpoint": spent_s(line, "checkpoint") >= least_s,
            "without a report of each side (steps far below a second)": not line.keys() >= NEEDED,
        }
        reasons.append(next((reason for reason, is_so in holds.items() if is_so), ""))
    return reasons


def _mean(lines: Sequence[Line], key: str) -> float:
    """Over these steps' time."""
    values, step_s = [line.get(key, 0.0) for line in lines], [spent_s(line, "step") for line in lines]
    return float(np.average(values, weights=step_s))


def _busy(lines: Sequence[Line]) -> tuple[float, float, float]:
    """Shares of these steps' time: trainer busy, rollout busy, both."""
    trainer, rollout = (1 - _mean(lines, f"{side}/idle_ratio") for side in ("trainer", "rollouter"))
    # of a step that is shorter than the reports' interval the overlap may be unknown
    both = max(_mean(lines, "overlap_ratio") * min(trainer, rollout), trainer + rollout - 1)
    return trainer, rollout, both


def decode_points(lines: Sequence[Line], sharing: Sharing) -> list[Point]:
    """Mean seconds of a decode step against its mean batch, for lines with enough decoding. Means of linear
    costs are linear."""
    points, share = [], sharing.of(ROLLOUT, lines)
    for line in lines:
        busy = 1 - line["rollouter/idle_ratio"]
        batch, tokens_per_s = line["rollouter/decode_batch_mean"], line["rollouter/tokens_per_s"]
        if busy >= LEAST_BUSY and batch > 0 and tokens_per_s > 0:
            # a line's tokens are those of all workers, and its time is that of one
            points.append(Point(batch, batch * sharing.processes[ROLLOUT] * busy / tokens_per_s * share))
    return points


def train_points(lines: Sequence[Line], sharing: Sharing) -> list[Point]:
    share = sharing.of(TRAIN, lines)
    spent = ((sampled_tokens(line), spent_s(line, "train")) for line in lines)
    return [Point(tokens, seconds * share) for tokens, seconds in spent if tokens > 0 and seconds > 0]


def old_logprob_s_per_token(lines: Sequence[Line], sharing: Sharing) -> float | None:
    """Seconds per scored token on cores of its own; None if nothing was scored."""
    scored = sum(line.get("train/old_logprob_tokens", 0.0) for line in lines)
    spent = sum(spent_s(line, "old_logprob") for line in lines)
    return spent * sharing.of(TRAIN, lines) / scored if scored else None


def scorer_s_per_token(lines: Sequence[Line], task: str, sharing: Sharing) -> float | None:
    """Seconds per sampled token of a scorer, in its own processes or (`ref`, `critic`) in the trainer. None
    if there is none."""
    if spent := sum(spent_s(line, task) for line in lines):
        return spent * sharing.of(TRAIN, lines) / sum(sampled_tokens(line) for line in lines)
    scored_lines = [line for line in lines if f"{task}/tokens_per_s" in line]
    scored = sum(line[f"{task}/tokens_per_s"] * spent_s(line, "step") for line in scored_lines)
    busy_s = sum((1 - line[f"{task}/idle_ratio"]) * spent_s(line, "step") for line in scored_lines)
    return busy_s * sharing.of(task, scored_lines) / scored if scored else None


def lengths_of(lines: Sequence[Line], profile: Profile) -> Lengths:
    """Observed lengths of a turn: LENGTHS_PER_STEP from each step, thinned to at most LENGTHS_KEPT, evenly
    spaced when sorted.

    A run records the lengths of whole trajectories; they are divided by the mean number of turns.
    """
    cap, turns, drawn = profile.rollout.max_response_tokens, num_turns(lines), list[int]()
    shares = (np.arange(LENGTHS_PER_STEP) + 0.5) / LENGTHS_PER_STEP
    for line in lines:
        # interpolated from the line's quantiles, which range from its shortest to its longest response
        points, count = line["response_tokens/quantiles"], trajectories(line)
        places = np.clip((shares * count - 0.5) / max(count - 1, 1), 0.0, 1.0)
        lengths = np.quantile(points, places).tolist()
        drawn += [max(1, min(round(length / turns), cap)) for length in lengths]
    drawn.sort()
    kept = min(LENGTHS_KEPT, len(drawn))
    picked = [drawn[int((index + 0.5) / kept * len(drawn))] for index in range(kept)]
    return Lengths(prompt_tokens=0, distribution="list", response_tokens=tuple(picked))


def num_turns(lines: Sequence[Line]) -> int:
    """The mean number of turns of the run's trajectories, rounded; 1 if the run does not record turns."""
    return round(fmean(line.get("env/turns_mean", 1.0) for line in lines))


def turns_of(lines: Sequence[Line]) -> Turns | None:
    """Turns and tools, each as the run's mean. None if trajectories have a single turn."""
    number = num_turns(lines)
    if number == 1:
        return None
    tool_s = fmean(line.get("env/tool_s", 0.0) for line in lines) / (number - 1)
    return Turns(
        number=Drawn(values=(number,)), tool_s=Drawn(values=(tool_s,)), result_tokens=Drawn(values=(0.0,))
    )
