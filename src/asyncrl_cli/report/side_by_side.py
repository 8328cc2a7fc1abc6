"""Recorded runs side by side: where their configurations differ, and their figures, rewards also at equal
samples and equal time.

A reward is the mean over a trailing window of trained samples (trajectories), equally wide for all runs,
however long their steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from asyncrl_cli.measure.intervals import Interval, MeanChange, paired_change, unpaired_change
from asyncrl_cli.observe.format import LEADING, NOTHING, clock, count, is_number, number, scored, share
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.run_lines import EventLine
from asyncrl_cli.profile.arithmetic import mode_of
from asyncrl_cli.profile.keys import PARAMS, entries_of

SMOOTHING = 0.1
"""Width of the trailing window, as a share of the samples that all runs have trained."""
NOT_COMPARED = ("run.name", PARAMS)
"""A key that differs between any two runs, and tables of parameters, whose entries are keys themselves."""


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
    """A row: a value per run (None: not known), as JSON and as text."""

    label: str
    values: Sequence[object]
    texts: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """`differences`: key -> a value per run. `samples`, `time_s`: what all runs have reached; `reward`: the
    target, for the time to reach it. They are None if a run has trained nothing. `replays`: the names of runs
    that only trained on what another one had sampled."""

    names: Sequence[str]
    differences: Mapping[str, Sequence[object]]
    figures: Sequence[Figure]
    samples: int | None = None
    time_s: float | None = None
    reward: float | None = None
    replays: Sequence[str] = ()

    @property
    def doubts(self) -> list[str]:
        doubts, keys = [], [key for key in self.differences if key.startswith(("task.", "env."))]
        if keys:
            doubts.append(f"the runs' tasks differ ({', '.join(keys)}): their rewards may not be comparable")
        if self.replays:
            what = (
                f"{', '.join(self.replays)}: a replay, which trains on trajectories that another run sampled"
            )
            doubts.append(f"{what}; its rewards are theirs, except those of its own evals")
        if not self.samples:
            doubts.append("a run has no train step with a reward yet: rewards are not compared")
        return doubts

    def to_json(self) -> dict[str, object]:
        at = {"samples": self.samples, "time_s": self.time_s, "reward": self.reward}
        figures = {figure.label: list(figure.values) for figure in self.figures}
        return {"runs": list(self.names), "differences": self.differences, "equal": at, "figures": figures}


def compare(runs: Sequence[Recorded], target: float | None = None) -> SideBySide:
    """Compare runs. `target`: a reward; by default the highest that all of them have reached.

    Raises RefusedError or ConfigError if a run's configuration or metrics cannot be read.
    """
    steps = [_steps(run) for run in runs]
    own = [at for at, run in enumerate(runs) if not run.replay_of] or range(len(runs))
    samples = min(steps[at][-1][0] for at in own) if all(steps) else None
    curves = [_curve(ended, SMOOTHING * (samples or 0)) for ended in steps]
    statuses = [run.status for run in runs]
    ends = [(one.samples[-1], one.time_s[-1]) if one.samples else (None, None) for one in curves]
    speeds = [trained / spent_s if trained and spent_s else None for trained, spent_s in ends]
    phases = [status and status.phase for status in statuses]
    figures = [
        _figure("state", phases, lambda phase: str(phase or NOTHING)),
        _figure("mode", [mode_of(run.loaded.profile) for run in runs], str),
        _figure("train steps", [status and status.progress.step for status in statuses], count),
        _figure("samples", [trained for trained, _ in ends], count),
        _figure("time", [spent_s for _, spent_s in ends], clock),
        _figure("samples/s", speeds, number),
    ]
    time_s = reward = None
    if samples is not None:
        sampled = [None if run.replay_of else curve for run, curve in zip(runs, curves, strict=True)]
        time_s = min(curves[at].time_s[-1] for at in own)
        reward = min(max(curves[at].reward) for at in own) if target is None else target
        at_samples = [curve and curve.reward_at(curve.samples, samples) for curve in sampled]
        at_time = [curve and curve.reward_at(curve.time_s, time_s) for curve in sampled]
        reached_s = [curve and curve.reached_at(reward, curve.time_s) for curve in sampled]
        reached_samples = [curve and curve.reached_at(reward, curve.samples) for curve in sampled]
        figures += [
            _figure(f"reward at {count(samples)} samples", at_samples, partial(number, digits=3)),
            _figure(f"reward at {clock(time_s)}", at_time, partial(number, digits=3)),
            _figure(f"time to reward {number(reward, 3)}", reached_s, clock),
            _figure("samples to it", reached_samples, count),
        ]
    return SideBySide(
        names=[run.name for run in runs],
        differences=differences(runs),
        figures=[*figures, *_totals(runs)],
        samples=samples,
        time_s=time_s,
        reward=reward,
        replays=[run.name for run in runs if run.replay_of],
    )


def differences(runs: Sequence[Recorded]) -> dict[str, list[object]]:
    """The keys whose values are not the same in all runs, in the order of the schema; None where a run does
    not have the key."""
    values = [{"profile": run.loaded.profile.name, **entries_of(run.loaded.profile)} for run in runs]
    keys = dict.fromkeys(key for entries in values for key in entries if key not in NOT_COMPARED)
    every = {key: [entries.get(key) for entries in values] for key in keys}
    return {key: found for key, found in every.items() if any(value != found[0] for value in found)}


def _steps(run: Recorded) -> list[tuple[int, float, float]]:
    """(samples so far, seconds so far, reward) of each train step that has a reward."""
    size = run.loaded.profile.rollout.n
    lines = (line for line in run.metrics() if "reward/mean" in line)
    return [(line["groups_trained"] * size, line["time_s"], float(line["reward/mean"])) for line in lines]


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


def _totals(runs: Sequence[Recorded]) -> Iterator[Figure]:
    """Figures of the whole runs, from their last status."""
    last: list[EventLine | None] = []
    for run in runs:  # their last evals on the held-out split
        evals = [event for event in run.events("eval") if not event.get("eval_set")]
        last.append(next((one for one in reversed(evals) if is_number(one.get("reward_mean"))), None))
    texts = [scored(point) if point else NOTHING for point in last]
    yield Figure(label="last eval", values=[point and point["reward_mean"] for point in last], texts=texts)
    changes = [change_of(last[0], point) if last[0] and point else None for point in last[1:]]
    if any(changes):
        values = [None, *(change and asdict(change) for change in changes)]
        texts = [NOTHING, *(change_text(change, doubt=True) if change else NOTHING for change in changes)]
        yield Figure(label=f"against {runs[0].name}", values=values, texts=texts)
    yield _figure("version of the last eval", [point and point.get("version") for point in last], count)
    rows: dict[str, tuple[str, Callable[[object], str]]] = {
        **LEADING,
        "trainer/tokens_per_s": ("tokens/s trainer", count),
        "staleness/mean": ("staleness mean", number),
        "staleness/max": ("staleness max", count),
        "fully_async/partial/partial_ratio": ("partial", share),
    }
    totals = [run.status.totals if run.status else {} for run in runs]
    for key, (label, form) in rows.items():
        yield _figure(label, [total.get(key) for total in totals], form)


def _figure(label: str, values: Sequence[object], form: Callable[[object], str]) -> Figure:
    return Figure(label=label, values=values, texts=[form(value) for value in values])


def change_of(before: EventLine, after: EventLine) -> MeanChange | None:
    """The change of the mean reward between two evals, of one run or of two: over the prompts that have a
    reward in both, if both evals had the same prompts. None if an older version recorded one of them, without
    an interval."""
    if "rewards" in before and "rewards" in after and before["prompts"] == after["prompts"]:
        both = zip(before["rewards"], after["rewards"], strict=False)  # as many, unless a file is damaged
        if pairs := [(old, new) for old, new in both if old is not None and new is not None]:
            return paired_change(*zip(*pairs, strict=True))
    means = _mean_of(before), _mean_of(after)
    if means[0] is None or means[1] is None:
        return None
    return unpaired_change(means[0], means[1], min(before["num_prompts"], after["num_prompts"]))


def _mean_of(event: EventLine) -> tuple[float, Interval] | None:
    mean = event.get("reward_mean")
    if mean is None or "reward_low" not in event or "reward_high" not in event:
        return None
    return mean, Interval(event["reward_low"], event["reward_high"])


def change_text(change: MeanChange, *, doubt: bool = False) -> str:
    """`+0.075 (95%: -0.21 to 0.40)`, with `doubt` also whether that is too uncertain to tell."""
    low, high = (number(end, 3) for end in change.interval)
    is_doubtful = doubt and not change.is_clear
    return f"{change.mean:+.3f} (95%: {low} to {high})" + (": too few prompts to tell" if is_doubtful else "")
