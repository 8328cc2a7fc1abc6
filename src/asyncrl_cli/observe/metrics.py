"""One line of metrics per train step, and the same values merged over longer periods.

    StepRecord --step_values--> typed values of a step --merge--> over the window, over the run --> the line
                                                       --merge--> over a period --> status

Every figure on the screen, in `asyncrl status` and in a run's summary covers one of these periods:

recent   the train steps that ended in the last minute: the values of their lines in metrics.jsonl, merged
step     the current train step, once it has taken longer than the recent ones together (or if none has ended)
run      all train steps, also those before a resume: used for a run that has ended
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.safe_files import Count
from asyncrl_cli.contracts.events import StepRecord
from asyncrl_cli.contracts.status import CoveredTime
from asyncrl_cli.measure.states import ExecutorReport
from asyncrl_cli.measure.values import Last, Scalar, Selection, Value, from_json, merge_into, shown, to_json
from asyncrl_cli.observe.format import clock, duration
from asyncrl_cli.observe.step_values import BIAS, PARTIAL, STALE, STATES, step_values, stretches, utilization

RECENT_S = 60.0
RECENT_STEPS = 120
"""Limit on the number of recent steps if they are very short: merging them takes time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Figures, merged over the train steps of `time` (0 of them: over a part of one)."""

    time: CoveredTime
    figures: Mapping[str, Scalar]

    @classmethod
    def of(cls, values: Mapping[str, Value], words: str, from_s: float, to_s: float, steps: int) -> Period:
        time = CoveredTime(words=words, from_s=from_s, to_s=to_s, steps=steps)
        return cls(time=time, figures=shown(values))


class MetricsState(TypedDict):
    """The part of `StepMetrics` that a checkpoint keeps; values as `values.to_json` writes them."""

    time_s: float
    window: Count | None
    in_window: dict[str, list[object]]
    run: dict[str, list[object]]


class StepMetrics:
    """Turns step records into lines and merges their values over steps. `started_s`: the driver's clock at
    time 0 of the run."""

    def __init__(self, *, trigger_parameter_sync_step: int, started_s: float) -> None:
        self._run: dict[str, Value] = {}
        self._window_steps = trigger_parameter_sync_step
        # The run's time minus the driver's clock. The run's time continues across resumes.
        self.ahead_s = -started_s
        self._time_s = 0.0
        self._reports: Mapping[str, ExecutorReport] = {}
        self._window: int | None = None
        self._in_window: dict[str, Value] = {}
        self._steps: deque[tuple[float, float, Mapping[str, Value]]] = deque(maxlen=RECENT_STEPS)
        self._recent: Period | None = None

    def update(self, record: StepRecord) -> dict[str, Scalar]:
        """The step's line. Call once per record, in order."""
        values = step_values(record, self._reports, self._window_steps)
        self._reports = dict(record.reports)
        if record.window != self._window:
            self._window, self._in_window = record.window, {}
        merge_into(self._in_window, {key: values[key] for key in values if key.startswith((PARTIAL, BIAS))})
        merge_into(self._run, values)
        to_s = record.ended_s + self.ahead_s
        # A step begins exactly where the previous line ended, so that periods have no gaps.
        self._steps.append((self._time_s if self._steps else to_s - record.timing_s["step"], to_s, values))
        while self._steps[0][1] <= to_s - RECENT_S:
            self._steps.popleft()
        self._time_s, self._recent = to_s, None
        line = values | {"time_s": Last(self._time_s)}
        line |= {key: value for key, value in self._in_window.items() if key.startswith((PARTIAL, BIAS))}
        line |= {
            key.replace(BIAS, f"{BIAS}run/"): value
            for key, value in self._run.items()
            if isinstance(value, Selection)
        }
        line |= {key: value for key, value in self._run.items() if key.startswith(STALE)}
        return _without_states(shown(line))

    def totals(self) -> dict[str, Scalar]:
        """The same keys over the whole run: each value is merged by its own rule (sum, mean, max, last)."""
        return _without_states(shown(self._run))

    def recent(self) -> Period | None:
        """The last steps of this attempt. Cached until the next step ends: a status is made every second, and
        merging every executor's values takes time."""
        if self._recent is None and self._steps:
            joined: dict[str, Value] = {}
            for _, _, values in self._steps:
                merge_into(joined, values)
            from_s, to_s, steps = self._steps[0][0], self._time_s, len(self._steps)
            words = f"{'last step' if steps == 1 else f'last {steps} steps'}, {_lasted(to_s - from_s)}"
            self._recent = Period.of(joined, words, from_s, to_s, steps)
        return self._recent

    def whole_run(self) -> Period | None:
        """All steps, also those before a resume; None until the first has ended."""
        if not self._run:
            return None
        step, to_s = cast(int, self._run["step"].value), self._time_s
        return Period.of(self._run, f"whole run, {step} steps, {clock(to_s)}", 0.0, to_s, step)

    def step_so_far(
        self, reports: Mapping[str, ExecutorReport], from_s: float, time_s: float
    ) -> Period | None:
        """The current step, begun at `from_s`, without values only known at a step's end; None if nothing was
        measured."""
        values = utilization(stretches(self._reports, reports))
        values.pop("trainer/tokens_per_s", None)
        words = f"this step so far, {_lasted(time_s - from_s)}"
        return Period.of(values, words, from_s, time_s, 0) if values else None

    def state(self) -> MetricsState:
        in_window, run = to_json(self._in_window), to_json(self._run)
        return {"time_s": self._time_s, "window": self._window, "in_window": in_window, "run": run}

    def restore(self, state: MetricsState) -> None:
        """Continue after the line at which `state` was taken. After a resume the executors' integrals start
        at 0 again."""
        self.ahead_s += state["time_s"] - self._time_s
        self._time_s = state["time_s"]
        self._window = state["window"]
        self._in_window = from_json(state["in_window"])
        self._run = from_json(state["run"])
        self._reports = {}


def _without_states(line: dict[str, Scalar]) -> dict[str, Scalar]:
    """Drop the times in states: they would be hundreds of keys, and timeline.jsonl has them."""
    return {key: value for key, value in line.items() if not key.startswith(STATES)}


def _lasted(seconds: float) -> str:
    """Like `duration`, but in seconds up to three minutes."""
    return f"{seconds:.0f} s" if 60 <= seconds < 180 else duration(seconds)
