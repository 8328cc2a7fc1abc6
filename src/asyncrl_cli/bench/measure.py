"""One run's figures from its metrics lines: the same code for real and for simulated runs.

    window   0          1 2 3 ... n-2          n-1
             warm-up    the measured stretch   run-out

Left out are the first window (workers start empty, caches are cold, version 0 is scored) and, of three or more, the last
one (nothing is generated ahead any more, and the final eval runs in it). All rates and ratios are of the stretch between;
reward, discarded tokens and the maxima are of the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.bench.bound import Work
from asyncrl_cli.errors import AsyncrlError

Line = Mapping[str, Any]

PARTS = {
    "wait": ("wait_data",),
    "old_logprob": ("old_logprob",),
    "train": ("train",),
    "sync": ("gather",),
    "other": ("checkpoint", "other"),
}
"""Parts of a step as the bench shows them, from the parts of `timing/*_s`."""
PARTIAL = "fully_async/partial/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The measured lines. Their time begins at `begin_s` and ends at `end_s` of the run."""

    lines: tuple[Line, ...]
    begin_s: float
    end_s: float
    groups: int
    windows: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def stretch_of(lines: Sequence[Line]) -> Stretch:
    """Raises AsyncrlError for a run with fewer than two windows: warm-up would be all there is."""
    windows = sorted({int(line["window"]) for line in lines})
    if len(windows) < 2:
        raise AsyncrlError(
            f"a run of {len(windows)} window cannot be measured: the first one is warm-up", hint="more --groups, or --windows 3"
        )
    measured = windows[1:-1] if len(windows) > 2 else windows[1:]
    before = [line for line in lines if line["window"] < measured[0]][-1]
    inside = tuple(line for line in lines if measured[0] <= line["window"] <= measured[-1])
    return Stretch(
        lines=inside,
        begin_s=before["time_s"],
        end_s=inside[-1]["time_s"] - eval_s(inside[-1]),
        groups=inside[-1]["groups_trained"] - before["groups_trained"],
        windows=len(measured),
    )


def work_of(lines: Sequence[Line], stretch: Stretch) -> Work:
    before = [line for line in lines if line["time_s"] <= stretch.begin_s][-1]
    return Work(
        sampled_tokens=sum(sampled_tokens(line) for line in stretch.lines),
        trained_tokens=stretch.lines[-1]["tokens_trained"] - before["tokens_trained"],
    )


def figures_of(lines: Sequence[Line], *, window_groups: int) -> dict[str, float]:
    """Figures by name; what a run did not measure is absent. `window_groups` is W of the baseline."""
    stretch = stretch_of(lines)
    steps_s = sorted(step_s(line) for line in stretch.lines)
    seconds, num_steps = stretch.seconds, len(stretch.lines)
    work = work_of(lines, stretch)
    parts = {name: sum(_timing(line, keys) for line in stretch.lines) for name, keys in PARTS.items()}
    figures = {
        "wall_s": lines[-1]["time_s"],
        "measured_s": seconds,
        "measured_groups": stretch.groups,
        "groups_per_s": stretch.groups / seconds,
        "window_time_s": seconds / stretch.groups * window_groups,
        "step_s_mean": sum(steps_s) / num_steps,
        "step_s_p95": quantile(steps_s, 0.95),
        **{f"step_{name}_s": total / num_steps for name, total in parts.items()},
        **{f"window_{name}_s": total / stretch.groups * window_groups for name, total in parts.items()},
        "tokens_per_s": work.trained_tokens / seconds,
    }
    return figures | _ratios(stretch) | _staleness(lines, stretch) | _ends(lines)


def step_s(line: Line) -> float:
    """A step without what an eval added to it."""
    return float(line["timing/step_s"] - eval_s(line))


def eval_s(line: Line) -> float:
    return float(line.get("timing/eval_s", 0.0))


def sampled_tokens(line: Line) -> float:
    """Sampled tokens that the step trained: mean response length times trajectories."""
    return float(line.get("response_tokens/mean", 0.0) * _trajectories(line))


def quantile(ascending: Sequence[float], share: float) -> float:
    """Between neighbours in proportion (as numpy's default)."""
    place = share * (len(ascending) - 1)
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (place - low)


def _ratios(stretch: Stretch) -> dict[str, float]:
    """Ratios of steps without an eval, weighted by how long they took: an eval keeps workers busy with other things."""
    keys = {
        "trainer_idle_ratio": "trainer/idle_ratio",
        "rollouter_idle_ratio": "rollouter/idle_ratio",
        "slot_utilization": "rollouter/slot_utilization",
    }
    lines = [line for line in stretch.lines if eval_s(line) == 0.0]
    return _means({name: [(line[key], step_s(line)) for line in lines if key in line] for name, key in keys.items()})


def _staleness(lines: Sequence[Line], stretch: Stretch) -> dict[str, float]:
    means = _means(
        {"staleness_mean": [(line["staleness/mean"], sampled_tokens(line)) for line in stretch.lines if "staleness/mean" in line]}
    )
    last_of_windows = {line["window"]: line for line in stretch.lines}.values()
    partial = sum(line.get(f"{PARTIAL}total_partial_num", 0) for line in last_of_windows)
    trajectories = sum(_trajectories(line) for line in stretch.lines)
    return means | {
        "staleness_max": max(line.get("staleness/max", 0) for line in lines),
        "partial_ratio": partial / trajectories if trajectories else 0.0,
        "max_span": max(line.get(f"{PARTIAL}max_partial_span", 0) for line in lines),
    }


def _ends(lines: Sequence[Line]) -> dict[str, float]:
    last = lines[-1]
    ends = {"tokens_discarded": float(last.get("waste/tokens_discarded", 0))}
    if "eval/reward_mean" in last and last["eval/version"] == last["version"]:
        ends["final_reward"] = float(last["eval/reward_mean"])
    return ends


def _means(pairs: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Weighted means; absent where there is no weight."""
    weights = {name: sum(weight for _, weight in values) for name, values in pairs.items()}
    return {name: sum(v * w for v, w in values) / weights[name] for name, values in pairs.items() if weights[name] > 0}


def _timing(line: Line, keys: Sequence[str]) -> float:
    return float(sum(line.get(f"timing/{key}_s", 0.0) for key in keys))


def _trajectories(line: Line) -> int:
    return sum(line.get("staleness/histogram", ()))
