"""One line of metrics per train step: the formulas of docs/metrics.md, and nothing else.

    StepRecord --step_values--> typed values of this step --merge--> over the window, over the run --> the line
                                                          --merge--> over the last steps, over the run --> status (periods.py)

What was not measured is absent, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.loop.ports import GroupResult, StepRecord, TrajectoryMeta
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
from asyncrl_cli.observe.executors import STATES, overlap, stretches, utilization
from asyncrl_cli.observe.periods import Period, RecentSteps, step_so_far, whole_run
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
        self._started_s = started_s
        self._before_s = 0.0
        self._time_s = 0.0
        self._reports: Mapping[str, ExecutorReport] = {}
        self._window: int | None = None
        self._in_window: dict[str, Value] = {}
        self._recent = RecentSteps()

    def align(self, time_s: float, clock_s: float) -> None:
        """The run was `time_s` old when the driver's clock showed `clock_s`."""
        self._before_s, self._started_s = time_s, clock_s

    def update(self, record: StepRecord) -> dict[str, Scalar]:
        """The step's line. Call once per record, in order."""
        values = self._step_values(record)
        if record.window != self._window:
            self._window, self._in_window = record.window, {}
        merge_into(self._in_window, values)
        merge_into(self.run, values)
        self._time_s = self._before_s + record.ended_s - self._started_s
        self._recent.add(self._time_s - record.timing_s["step"], self._time_s, values)
        line = values | {"time_s": Last(self._time_s)}
        line |= {key: value for key, value in self._in_window.items() if key.startswith(PARTIAL)}
        line |= {key: value for key, value in self.run.items() if key.startswith(STALE)}
        return _without_states(shown(line))

    def totals(self) -> dict[str, Scalar]:
        """The same keys over the whole run: every value joined by its own rule."""
        return _without_states(shown(self.run))

    def recent(self) -> Period | None:
        """The last steps of this attempt; None before the first has ended."""
        return self._recent.period()

    def whole_run(self) -> Period | None:
        """All steps, over resumes too; None before the first has ended."""
        return whole_run(self._time_s, self.run["step"].value, self.run) if self.run else None

    def step_so_far(self, reports: Mapping[str, ExecutorReport], from_s: float, time_s: float) -> Period | None:
        """The step under way, begun at `from_s`, without what is counted when a step ends; None if nothing was measured."""
        values = utilization(stretches(self._reports, reports))
        values.pop("trainer/tokens_per_s", None)
        return step_so_far(from_s, time_s, values) if values else None

    def state(self) -> MetricsState:
        return {
            "time_s": self._time_s,
            "window": self._window,
            "in_window": to_json(self._in_window),
            "run": to_json(self.run),
        }

    def restore(self, state: MetricsState) -> None:
        """Continue after the line that `state` was taken at. Executors start their integrals anew after a resume."""
        self._before_s = self._time_s = state["time_s"]
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
        values |= reward_values(trajectories) | eval_values(record)
        values |= {f"timing/{part}_s": Sum(seconds) for part, seconds in record.timing_s.items()}
        values |= utilization(measured)
        values["overlap_ratio"] = overlap(record.spans, {name: report.role for name, report in record.reports.items()})
        values |= staleness_values(record.window, trajectories)
        values |= step_staleness_values(record.step - 1, self._window_steps, trajectories)
        values |= stale_counts(record.window, record.groups) | partial_values(trajectories)
        values |= sync_values(record)
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


def eval_values(record: StepRecord) -> dict[str, Value]:
    """The last eval that ended since the previous line."""
    if not record.evals:
        return {}
    ended = record.evals[-1]
    return {
        "eval/reward_mean": Last(ended.reward_mean),
        "eval/version": Last(ended.version),
        "eval/num_prompts": Last(ended.num_prompts),
        "eval/num_failed": Last(ended.num_failed),
        "eval/response_tokens_median": Last(ended.response_tokens_median),
    }


def staleness_values(window: int, trajectories: Sequence[TrajectoryMeta]) -> dict[str, Value]:
    """In versions. The mean runs over all sampled tokens of the step; oldest and newest over its trajectories."""
    sampled = [trajectory for trajectory in trajectories if trajectory.version_tokens]
    tokens = [(window - version, count) for t in sampled for version, count in t.version_tokens]
    oldest = [window - trajectory.oldest for trajectory in sampled]
    return {
        "staleness/mean": Ratio(sum(age * count for age, count in tokens), sum(count for _, count in tokens)),
        "staleness/max": Max(max(oldest, default=None)),
        "staleness/oldest_mean": Ratio(sum(oldest), len(oldest)),
        "staleness/newest_mean": Ratio(sum(window - trajectory.newest for trajectory in sampled), len(sampled)),
        "staleness/histogram": Histogram(tuple(oldest.count(age) for age in range(max(oldest, default=-1) + 1))),
    }


def step_staleness_values(step_index: int, window_steps: int, trajectories: Sequence[TrajectoryMeta]) -> dict[str, Value]:
    """In train steps: version v was made by step v * K (counted from 0), so a token of it is `step - v * K` old."""
    tokens = [(step_index - version * window_steps, n) for t in trajectories for version, n in t.version_tokens]
    return {
        "staleness/steps_mean": Ratio(sum(age * count for age, count in tokens), sum(count for _, count in tokens)),
        "staleness/steps_max": Max(max((age for age, _ in tokens), default=None)),
    }


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


def sync_values(record: StepRecord) -> dict[str, Value]:
    """Of the last version that every worker loaded or skipped."""
    sync = record.sync
    if sync is None:
        return {}
    return {
        "sync/version": Last(sync.version),
        "sync/gather_s": Last(sync.gather_s),
        "sync/send_s": Last(sync.send_s),
        "sync/load_s": Last(sync.load_s),
        "sync/pause_s": Last(sync.pause_s),
        "sync/logprob_abs_diff": Last(sync.logprob_abs_diff),
        "sync/loaded_share": Last(sync.loaded_share),
        "sync/unclear_loads": Last(sync.unclear_loads),
    }
