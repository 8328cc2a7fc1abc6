"""One line of metrics per train step: the formulas of docs/metrics.md, and nothing else.

    StepRecord --step_values--> typed values of this step --merge--> over the window, over the run --> the line
                                                          --merge--> over the last steps, over the run --> status (periods.py)

What was not measured is absent, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.loop.attempts import GroupResult, TrajectoryMeta
from asyncrl_cli.loop.states import ExecutorReport
from asyncrl_cli.loop.values import (
    Histogram,
    Last,
    Max,
    Quantiles,
    Ratio,
    Scalar,
    Spread,
    Sum,
    Value,
    from_json,
    merge_into,
    shown,
    to_json,
)
from asyncrl_cli.loop.watching import StepRecord
from asyncrl_cli.observe.executors import STATES, overlap, stretches, utilization
from asyncrl_cli.observe.format import clock
from asyncrl_cli.observe.periods import Period, RecentSteps, lasted
from asyncrl_cli.safe_files import Count

PARTIAL = "fully_async/partial/"
STALE = "fully_async/count/"


class MetricsState(TypedDict):
    """As a checkpoint has it; values as `values.to_json` writes them."""

    time_s: float
    window: Count | None
    in_window: dict[str, list[Any]]
    run: dict[str, list[Any]]


class StepMetrics:
    """Turns records into lines; keeps what must be joined over steps. `started_s`: the driver's clock at time 0."""

    def __init__(self, *, trigger_parameter_sync_step: int, started_s: float) -> None:
        self.run: dict[str, Value] = {}
        self._window_steps = trigger_parameter_sync_step
        # What the run's time, which goes on over resumes, is ahead of the driver's clock.
        self.ahead_s = -started_s
        self._time_s = 0.0
        self._reports: Mapping[str, ExecutorReport] = {}
        self._window: int | None = None
        self._in_window: dict[str, Value] = {}
        self.recent = RecentSteps()
        """The last steps of this attempt."""

    def update(self, record: StepRecord) -> dict[str, Scalar]:
        """The step's line. Call once per record, in order."""
        values = self._step_values(record)
        if record.window != self._window:
            self._window, self._in_window = record.window, {}
        merge_into(self._in_window, values)
        merge_into(self.run, values)
        self._time_s = record.ended_s + self.ahead_s
        self.recent.add(self._time_s - record.timing_s["step"], self._time_s, values)
        line = values | {"time_s": Last(self._time_s)}
        line |= {key: value for key, value in self._in_window.items() if key.startswith(PARTIAL)}
        line |= {key: value for key, value in self.run.items() if key.startswith(STALE)}
        return _without_states(shown(line))

    def totals(self) -> dict[str, Scalar]:
        """The same keys over the whole run: every value joined by its own rule."""
        return _without_states(shown(self.run))

    def whole_run(self) -> Period | None:
        """All steps, over resumes too; None before the first has ended."""
        if not self.run:
            return None
        figures, to_s = shown(self.run), self._time_s
        words = f"whole run, {figures['step']} steps, {clock(to_s)}"
        return Period(words=words, from_s=0.0, to_s=to_s, steps=figures["step"], figures=figures)

    def step_so_far(self, reports: Mapping[str, ExecutorReport], from_s: float, time_s: float) -> Period | None:
        """The step under way, begun at `from_s`, without what is counted when a step ends; None if nothing was measured."""
        values = utilization(stretches(self._reports, reports))
        values.pop("trainer/tokens_per_s", None)
        words = f"this step so far, {lasted(time_s - from_s)}"
        return Period(words=words, from_s=from_s, to_s=time_s, steps=0, figures=shown(values)) if values else None

    def state(self) -> MetricsState:
        in_window, run = to_json(self._in_window), to_json(self.run)
        return {"time_s": self._time_s, "window": self._window, "in_window": in_window, "run": run}

    def restore(self, state: MetricsState) -> None:
        """Continue after the line that `state` was taken at. Executors start their integrals anew after a resume."""
        self.ahead_s += state["time_s"] - self._time_s
        self._time_s = state["time_s"]
        self._window = state["window"]
        self._in_window = from_json(state["in_window"])
        self.run = from_json(state["run"])
        self._reports = {}

    def _step_values(self, record: StepRecord) -> dict[str, Value]:
        measured = stretches(self._reports, record.reports)
        self._reports = dict(record.reports)
        trajectories = [trajectory for group in record.groups for trajectory in group.trajectories]
        values: dict[str, Value] = {
            "step": Last(record.step),
            "version": Last(record.version),
            "window": Last(record.window),
            "time_s": Last(None),
            "groups_trained": Last(record.groups_trained),
            "tokens_trained": Last(record.tokens_trained),
        }
        values |= reward_values(trajectories)
        if record.evals:  # the last one that ended since the previous line
            values |= {f"eval/{name}": Last(figure) for name, figure in asdict(record.evals[-1]).items() if name != "eval_s"}
        values |= {f"timing/{part}_s": Sum(seconds) for part, seconds in record.timing_s.items()}
        values |= utilization(measured)
        values["overlap_ratio"] = overlap(record.spans, {name: report.role for name, report in record.reports.items()})
        values |= staleness_values(record, self._window_steps, trajectories)
        values |= stale_counts(record.window, record.groups) | partial_values(trajectories)
        if record.sync is not None:
            values |= {f"sync/{name}": Last(figure) for name, figure in asdict(record.sync).items()}
        values["rollouter/restarts"] = Last(record.restarts)
        values["waste/tokens_discarded"] = Last(record.tokens_discarded)
        values |= record.train.metrics
        values |= {f"ledger/{account}": Last(number) for account, number in record.ledger.items()}
        return values


def _without_states(line: dict[str, Scalar]) -> dict[str, Scalar]:
    """Every executor's time in states is in timeline.jsonl; as keys they would be hundreds."""
    return {key: value for key, value in line.items() if not key.startswith(STATES)}


def reward_values(trajectories: Sequence[TrajectoryMeta]) -> dict[str, Value]:
    """Over the step's trajectories; the deviation is the population's."""
    rewards = [trajectory.reward for trajectory in trajectories]
    lengths = sorted(trajectory.response_tokens for trajectory in trajectories)
    values: dict[str, Value] = {
        "reward/mean": Ratio(sum(rewards), len(rewards)),
        "reward/std": Spread(len(rewards), sum(rewards), sum(reward * reward for reward in rewards)),
        "response_tokens/mean": Ratio(sum(lengths), len(lengths)),
        "response_tokens/max": Max(lengths[-1] if lengths else None),
    }
    if lengths:
        values["response_tokens/median"] = Last((lengths[(len(lengths) - 1) // 2] + lengths[len(lengths) // 2]) / 2)
        values["response_tokens/quantiles"] = Quantiles.of(lengths)
    return values


def staleness_values(record: StepRecord, window_steps: int, trajectories: Sequence[TrajectoryMeta]) -> dict[str, Value]:
    """In versions, and in train steps: version v was made by step v * K (counted from 0), so a token of it is `step - v * K` old.

    Means run over all sampled tokens of the step; oldest and newest over its trajectories.
    """
    sampled = [trajectory for trajectory in trajectories if trajectory.version_tokens]
    counts = [(version, count) for trajectory in sampled for version, count in trajectory.version_tokens]
    in_versions = [(record.window - version, count) for version, count in counts]
    in_steps = [(record.step - 1 - version * window_steps, count) for version, count in counts]
    oldest = [record.window - trajectory.oldest for trajectory in sampled]
    return {
        "staleness/mean": _weighted_mean(in_versions),
        "staleness/max": Max(max(oldest, default=None)),
        "staleness/oldest_mean": Ratio(sum(oldest), len(oldest)),
        "staleness/newest_mean": Ratio(sum(record.window - trajectory.newest for trajectory in sampled), len(sampled)),
        "staleness/histogram": Histogram(tuple(oldest.count(age) for age in range(max(oldest, default=-1) + 1))),
        "staleness/steps_mean": _weighted_mean(in_steps),
        "staleness/steps_max": Max(max((age for age, _ in in_steps), default=None)),
    }


def _weighted_mean(figures: Sequence[tuple[int, int]]) -> Ratio:
    return Ratio(sum(figure * count for figure, count in figures), sum(count for _, count in figures))


def stale_counts(window: int, groups: Sequence[GroupResult]) -> dict[str, Value]:
    """Groups with a trajectory whose oldest token is stale, and such trajectories; the line shows them so far."""
    stale = [[t for t in group.trajectories if t.version_tokens and window - t.oldest >= 1] for group in groups]
    return {
        f"{STALE}stale_samples_processed": Sum(sum(1 for trajectories in stale if trajectories)),
        f"{STALE}stale_trajectory_processed": Sum(sum(len(trajectories) for trajectories in stale)),
    }


def partial_values(trajectories: Sequence[TrajectoryMeta]) -> dict[str, Value]:
    """Trajectories sampled by more than one version; the line shows them over the window so far."""
    spans = [trajectory.span for trajectory in trajectories if trajectory.version_tokens]
    partial = sum(1 for span in spans if span > 0)
    return {
        f"{PARTIAL}total_partial_num": Sum(partial),
        f"{PARTIAL}partial_ratio": Ratio(partial, len(trajectories)),
        f"{PARTIAL}max_partial_span": Max(max(spans, default=None)),
    }
