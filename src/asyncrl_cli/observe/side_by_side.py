"""Recorded runs side by side: where their configurations differ, and their figures, rewards also at equal
samples and equal time.

A reward is the mean over a trailing window of trained samples (trajectories), equally wide for all runs,
however long their steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from asyncrl_cli.measure.intervals import Change
from asyncrl_cli.observe.eval_changes import change_of, change_text
from asyncrl_cli.observe.format import LEADING, NOTHING, clock, count, is_number, number, scored, share
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.profile.arithmetic import mode_of
from asyncrl_cli.profile.keys import PARAMS, entries_of

SMOOTHING = 0.1
"""Width of the trailing window, as a share of the samples that all runs have trained."""
_reward = partial(number, digits=3)
LEFT_OUT = ("run.name", PARAMS)
"""Not compared: a key that differs between any two runs, and tables of parameters, whose entries are keys
themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A run's reward after each train step: samples trained so far, time so far, and mean reward of the
    window that ends there."""

    samples: Sequence[int]
    time_s: Sequence[float]
    reward: Sequence[float]

    def reward_at(self, axis: Sequence[float], limit: float) -> float | None:
        """The reward when `axis` (`samples` or `time_s`) was at most `limit`; None if no step had ended by
        then."""
        ended = bisect_right(axis, limit)
        return self.reward[ended - 1] if ended else None

    def reached_at(self, reward: float, axis: Sequence[float]) -> float | None:
        """What `axis` (`samples` or `time_s`) was after the first step whose reward was at least `reward`;
        None without one."""
        return next((at for at, reached in zip(axis, self.reward, strict=True) if reached >= reward), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A row: a value per run (None: not known), as a number and as text."""

    label: str
    values: Sequence[Any]
    texts: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """`differences`: key -> a value per run. `samples`, `time_s`: what all runs have reached; `reward`: the
    target, for the time to reach it. They are None if a run has trained nothing."""

    names: Sequence[str]
    differences: dict[str, list[Any]]
    figures: Sequence[Figure]
    samples: int | None
    time_s: float | None
    reward: float | None

    def to_json(self) -> dict[str, Any]:
        at = {"samples": self.samples, "time_s": self.time_s, "reward": self.reward}
        figures = {figure.label: list(figure.values) for figure in self.figures}
        return {"runs": list(self.names), "differences": self.differences, "equal": at, "figures": figures}


def side_by_side(runs: Sequence[Recorded], target: float | None = None) -> SideBySide:
    """Compare runs. `target`: a reward; by default the highest that all of them have reached.

    Raises RefusedError or ConfigError if a run's configuration or metrics cannot be read.
    """
    steps = [_steps(run) for run in runs]
    samples = min((ended[-1][0] for ended in steps if ended), default=None) if all(steps) else None
    curves = [_curve(ended, SMOOTHING * (samples or 0)) for ended in steps]
    time_s = None if samples is None else min(curve.time_s[-1] for curve in curves)
    if target is None and samples is not None:
        target = min(max(curve.reward) for curve in curves)
    rewards = (
        []
        if samples is None or time_s is None or target is None
        else list(_rewards(curves, samples, time_s, target))
    )
    return SideBySide(
        names=[run.name for run in runs],
        differences=differences(runs),
        figures=[*_extents(runs, curves), *rewards, *_totals(runs)],
        samples=samples,
        time_s=time_s,
        reward=target,
    )


def differences(runs: Sequence[Recorded]) -> dict[str, list[Any]]:
    """The keys whose values are not the same in all runs, in the order of the schema; None where a run does
    not have the key."""
    values = [{"profile": run.loaded.profile.name, **entries_of(run.loaded.profile)} for run in runs]
    keys = dict.fromkeys(key for of_run in values for key in of_run if key not in LEFT_OUT)
    every = {key: [of_run.get(key) for of_run in values] for key in keys}
    return {key: found for key, found in every.items() if any(value != found[0] for value in found)}


def _steps(run: Recorded) -> list[tuple[int, float, float]]:
    """(samples so far, seconds so far, reward) of each train step that has a reward."""
    size = run.loaded.profile.rollout.n
    return [
        (line["groups_trained"] * size, line["time_s"], float(line["reward/mean"]))
        for line in run.metrics()
        if "reward/mean" in line
    ]


def _curve(steps: Iterable[tuple[int, float, float]], window: float) -> Curve:
    recent: deque[tuple[int, int, float]] = deque()
    before, weight, total = 0, 0, 0.0
    samples, times_s, rewards = [], [], []
    for so_far, time_s, reward in steps:
        trained = max(1, so_far - before)
        recent.append((so_far, trained, reward))
        weight, total, before = weight + trained, total + trained * reward, so_far
        while recent[0][0] <= so_far - window and len(recent) > 1:
            _, old, old_reward = recent.popleft()
            weight, total = weight - old, total - old * old_reward
        samples.append(so_far)
        times_s.append(time_s)
        rewards.append(total / weight)
    return Curve(samples=samples, time_s=times_s, reward=rewards)


def _extents(runs: Sequence[Recorded], curves: Sequence[Curve]) -> Iterable[Figure]:
    progress = [run.status.get("progress", {}) for run in runs]
    yield _figure("state", [run.status.get("phase") for run in runs], lambda phase: str(phase or NOTHING))
    yield _figure("mode", [mode_of(run.loaded.profile) for run in runs], str)
    yield _figure("train steps", [one.get("step") for one in progress], count)
    yield _figure("samples", [curve.samples[-1] if curve.samples else None for curve in curves], count)
    yield _figure("time", [curve.time_s[-1] if curve.time_s else None for curve in curves], clock)
    yield _figure("samples/s", [_per_s(curve) for curve in curves], number)


def _per_s(curve: Curve) -> float | None:
    return curve.samples[-1] / curve.time_s[-1] if curve.samples and curve.time_s[-1] > 0 else None


def _rewards(curves: Sequence[Curve], samples: int, time_s: float, target: float) -> Iterable[Figure]:
    yield _figure(
        f"reward at {count(samples)} samples",
        [curve.reward_at(curve.samples, samples) for curve in curves],
        _reward,
    )
    yield _figure(
        f"reward at {clock(time_s)}", [curve.reward_at(curve.time_s, time_s) for curve in curves], _reward
    )
    yield _figure(
        f"time to reward {number(target, 3)}",
        [curve.reached_at(target, curve.time_s) for curve in curves],
        clock,
    )
    yield _figure("samples to it", [curve.reached_at(target, curve.samples) for curve in curves], count)


def _totals(runs: Sequence[Recorded]) -> Iterable[Figure]:
    """Figures of the whole runs, from their last status."""
    totals = [run.status.get("totals", {}) for run in runs]
    last = [_last_eval(run) for run in runs]
    rewards = [point and point["reward_mean"] for point in last]
    yield Figure(
        label="last eval", values=rewards, texts=[scored(point) if point else NOTHING for point in last]
    )
    changes = [change_of(last[0], point) if last[0] and point else None for point in last[1:]]
    if any(changes):
        values = [None, *(change and asdict(change) for change in changes)]
        yield Figure(label=f"against {runs[0].name}", values=values, texts=[NOTHING, *map(_against, changes)])
    yield _figure("version of the last eval", [point and point.get("version") for point in last], count)
    for key, (label, form) in LEADING.items():
        label = "tokens/s trainer" if key == "trainer/tokens_per_s" else label
        yield _figure(label, [total.get(key) for total in totals], form)
    yield _figure("staleness mean", [total.get("staleness/mean") for total in totals], number)
    yield _figure("staleness max", [total.get("staleness/max") for total in totals], count)
    yield _figure("partial", [total.get("fully_async/partial/partial_ratio") for total in totals], share)


def _last_eval(run: Recorded) -> Mapping[str, Any] | None:
    """On the held-out split."""
    found = [
        event
        for event in run.events("eval")
        if not event.get("eval_set") and is_number(event.get("reward_mean"))
    ]
    return found[-1] if found else None


def _against(change: Change | None) -> str:
    if change is None:
        return NOTHING
    return change_text(change) + ("" if change.is_clear else ": too few prompts to tell")


def _figure(label: str, values: Sequence[Any], form: Any) -> Figure:
    return Figure(label=label, values=values, texts=[form(value) for value in values])
