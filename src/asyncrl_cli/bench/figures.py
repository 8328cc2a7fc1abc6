"""Computes a run's figures from its metrics lines, by the same code for real and for simulated runs.

    groups   0 ... W        2W ... n-W          ... n
             warm-up        the measured stretch    run-out

The warm-up is the first window (workers start empty, caches are cold) and any further one until version 0 is
scored, because evals take slots. The run-out is the last window, if others are left (nothing is generated
ahead any more, and the final eval runs in it). All rates and ratios are of the stretch between; reward,
discarded tokens and the maxima are of the whole run. In a comparison W is the longest of all profiles, and
the stretch is the same groups, with the same prompts, in every run (`common_edges`). What a run did not
measure is absent from its figures, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncrl_cli.base.errors import AsyncrlError, counted
from asyncrl_cli.observe.line_figures import Totals, spent_s, trajectories
from asyncrl_cli.observe.line_types import Line

PARTS = {
    "wait": ("wait_scores", "wait_data"),
    "old_logprob": ("old_logprob",),
    "train": ("ref", "critic", "train"),
    "sync": ("gather",),
    "other": ("checkpoint", "other"),
}
"""Parts of a step as the bench shows them; each is a sum of parts of `timing/*_s`."""
PARTIAL = "fully_async/partial/"
RATIOS = {
    "trainer_idle_ratio": "trainer/idle_ratio",
    "rollouter_idle_ratio": "rollouter/idle_ratio",
    "slot_utilization": "rollouter/slot_utilization",
}


class Edges(NamedTuple):
    """The measured train steps are those that end after `begin_groups` trained groups, up to and including
    `end_groups`."""

    begin_groups: int
    end_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The measured `lines` of a `run`, and the line `before` them."""

    run: Sequence[Line]
    before: Line
    lines: tuple[Line, ...]

    @property
    def seconds(self) -> float:
        """Time of the stretch without evals."""
        return float(self.lines[-1]["time_s"] - self.before["time_s"]) - sum(
            spent_s(line, "eval") for line in self.lines
        )

    @property
    def begin_groups(self) -> int:
        return int(self.before["groups_trained"])

    @property
    def end_groups(self) -> int:
        return int(self.lines[-1]["groups_trained"])

    @property
    def groups(self) -> int:
        return self.end_groups - self.begin_groups

    @property
    def tokens(self) -> int:
        """Tokens trained in the stretch."""
        return int(self.lines[-1]["tokens_trained"] - self.before["tokens_trained"])


def stretches(runs: Sequence[Sequence[Line]], window_groups: int) -> list[Stretch]:
    """The measured stretch of each run, all of the same groups. `window_groups`: the longest W of all
    profiles."""
    edges = common_edges(runs, window_groups)
    return [stretch_of(lines, edges) for lines in runs]


def common_edges(runs: Sequence[Sequence[Line]], window_groups: int) -> Edges:
    """Edges for all runs of a comparison. Warm-up and run-out have `window_groups` groups (the longest W);
    the warm-up lasts longer if a run scores version 0 later. Raises AsyncrlError if nothing is left
    between."""
    total, scored = min(int(lines[-1]["groups_trained"]) for lines in runs), 0
    for lines in runs:
        # groups trained at the end of the window in which version 0 was scored
        windows = [line["window"] for line in lines if line.get("eval/version") == 0]
        within = max(windows, default=lines[0]["window"])
        scored = max(scored, *(int(line["groups_trained"]) for line in lines if line["window"] == within))
    begin = max(-(-scored // window_groups), 1) * window_groups
    if begin >= total:
        begin = window_groups
    if begin >= total:
        raise _too_short(1)
    end = (total - window_groups) // window_groups * window_groups
    return Edges(begin, end if end > begin else total)


def stretch_of(lines: Sequence[Line], edges: Edges | None = None) -> Stretch:
    """`edges`: by default from the run's own windows. Raises AsyncrlError for a run that is no longer than
    its warm-up."""
    if edges is None:
        first = [line for line in lines if line["window"] == lines[0]["window"]]
        edges = common_edges([lines], int(first[-1]["groups_trained"]))
    before = [line for line in lines if line["groups_trained"] <= edges.begin_groups]
    inside = tuple(line for line in lines if edges.begin_groups < line["groups_trained"] <= edges.end_groups)
    if not before or not inside:
        raise _too_short(len({line["window"] for line in lines}))
    return Stretch(run=lines, before=before[-1], lines=inside)


def _too_short(windows: int) -> AsyncrlError:
    return AsyncrlError(
        f"a run of {counted(windows, 'window')} cannot be measured: the first one is warm-up",
        hint="more --groups, or --windows 3",
    )


def figures_of(stretch: Stretch, window_groups: int) -> dict[str, float]:
    """Figures by name. `window_groups` is W of the baseline."""
    steps_s = [spent_s(line, "step") - spent_s(line, "eval") for line in stretch.lines]
    seconds, windows, num_steps = stretch.seconds, stretch.groups / window_groups, len(stretch.lines)
    totals, run, last = Totals(stretch.lines), Totals(stretch.run), stretch.run[-1]
    # An eval keeps workers busy: steps beside one say nothing about idleness.
    alone = Totals(line for line in stretch.lines if spent_s(line, "eval") == 0.0)
    figures: dict[str, float | None] = {
        "wall_s": last["time_s"],
        "measured_s": seconds,
        "measured_groups": stretch.groups,
        "groups_per_s": stretch.groups / seconds,
        "window_time_s": seconds / windows,
        "step_s_mean": sum(steps_s) / num_steps,
        "step_s_p95": float(np.quantile(steps_s, 0.95)),
    }
    parts_s = {name: part_s for name, keys in PARTS.items() if (part_s := totals.seconds(*keys)) is not None}
    figures |= {f"step_{name}_s": part_s / num_steps for name, part_s in parts_s.items()}
    figures |= {f"window_{name}_s": part_s / windows for name, part_s in parts_s.items()}
    figures |= {
        "tokens_per_s": stretch.tokens / seconds,
        "tokens_per_group": stretch.tokens / stretch.groups,
        **{name: alone.mean(key) for name, key in RATIOS.items()},
        "staleness_mean": totals.mean("staleness/mean"),
    }
    # Partial trajectories over all trained ones. A window's count is in its last line.
    key, trained = f"{PARTIAL}total_partial_num", sum(trajectories(line) for line in stretch.lines)
    window_ends = {line["window"]: line for line in stretch.lines}.values()
    counts = [line[key] for line in window_ends if key in line]
    figures["partial_ratio"] = sum(counts) / trained if counts and trained else None
    # Of the whole run: a maximum or a final value has no stretch.
    figures |= {
        "staleness_max": run.most("staleness/max"),
        "max_span": run.most(f"{PARTIAL}max_partial_span"),
        "tokens_discarded": last.get("waste/tokens_discarded"),
    }
    if "eval/reward_mean" in last and last["eval/version"] == last["version"]:
        names = {"final_reward": "mean", "final_reward_low": "low", "final_reward_high": "high"}
        figures |= {name: last.get(f"eval/reward_{key}") for name, key in names.items()}
    return {name: value for name, value in figures.items() if value is not None}
