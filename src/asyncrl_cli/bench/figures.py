"""Computes a run's figures and its bound from its metrics lines.

The figures come from the same code for real and for simulated runs:

    groups   0 ... W        2W ... n-W          ... n
             warm-up        the measured stretch    run-out

The warm-up is the first window (workers start empty, caches are cold) and any further one until version 0 is
scored, because evals take slots. The run-out is the last window, if others are left (nothing is generated
ahead any more, and the final eval runs in it). All rates and ratios are of the stretch between; reward,
discarded tokens and the maxima are of the whole run. In a comparison W is the longest of all profiles, and
the stretch is the same groups, with the same prompts, in every run (`common_edges`). What a run did not
measure is absent from its figures, never 0.

The bound is the time that the run's work would take without any waits. `% of the bound` is ideal time over
measured time, both per window.

    apart       ideal = max(generation, training)
    colocated   ideal = generation + training
    lent        ideal = max(training, (1 - l) * generation + l * training), l: lent devices' share of rollout,
                in simulated runs only

Simulated runs know what work costs. Generation and training are the seconds that each phase would take alone,
in full batches, for the very groups that are measured. The ideal leaves out weight syncs, the long tail of a
batch, rewards and waits, because a schedule can reduce these. No schedule passes this bound.

Real runs know what they spent. Generation and training are the seconds for which the rollout workers (on
average) and the trainer computed, as their own state clocks integrated it. So the ideal is the time of this
very run if the side that computed longer had never waited, and no limit of the machine: a worker that decodes
the last sequence of a batch is as busy as a full one. Close to 100% says that no waits are left, and nothing
about the speed: compare seconds between profiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncrl_cli.base.errors import AsyncrlError, counted
from asyncrl_cli.observe.run_lines import Line, Totals, sampled_tokens, spent_s, trajectories
from asyncrl_cli.simulate.costs import Capacities

PARTS = {
    "wait": ("wait_scores", "wait_data"),
    "old_logprob": ("old_logprob",),
    "train": ("ref", "teacher", "critic", "train"),
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
        whole_s = float(self.lines[-1]["time_s"] - self.before["time_s"])
        return whole_s - sum(spent_s(line, "eval") for line in self.lines)

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

    def without_evals(self) -> Totals:
        """Of the steps without an eval. It keeps workers busy, so steps beside one do not show idleness."""
        return Totals(line for line in self.lines if spent_s(line, "eval") == 0.0)


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
        hint="more --groups",
    )


def figures_of(stretch: Stretch, window_groups: int) -> dict[str, float]:
    """Figures by name. `window_groups` is W of the baseline."""
    steps_s = [spent_s(line, "step") - spent_s(line, "eval") for line in stretch.lines]
    seconds, windows, num_steps = stretch.seconds, stretch.groups / window_groups, len(stretch.lines)
    totals, run, last = Totals(stretch.lines), Totals(stretch.run), stretch.run[-1]
    without_evals = stretch.without_evals()
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
        **{name: without_evals.mean(key) for name, key in RATIOS.items()},
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


def bound_of_costs(stretch: Stretch, windows: float, capacities: Capacities) -> dict[str, float]:
    """The bound of a simulated run, and the rates that it rests on, per window."""
    generation_s = tokens_made(stretch) / capacities.rollout_tokens_per_s
    training_s = stretch.tokens / capacities.trainer_tokens_per_s
    ideal_s = (1 - capacities.lent_share) * generation_s + capacities.lent_share * training_s
    ideal_s = generation_s + training_s if capacities.colocated else max(ideal_s, training_s)
    return _bound(generation_s, training_s, ideal_s, stretch, windows) | {
        "rollout_tokens_per_s": capacities.rollout_tokens_per_s,
        "trainer_tokens_per_s": capacities.trainer_tokens_per_s,
    }


def bound_of_states(stretch: Stretch, windows: float, *, is_colocated: bool) -> dict[str, float]:
    """The bound of a real run. Empty if it did not measure for how long each side was idle."""
    totals = stretch.without_evals()
    rollout_idle, trainer_idle = totals.mean("rollouter/idle_ratio"), totals.mean("trainer/idle_ratio")
    if rollout_idle is None or trainer_idle is None:
        return {}
    generation_s, training_s = (1 - rollout_idle) * stretch.seconds, (1 - trainer_idle) * stretch.seconds
    ideal_s = generation_s + training_s if is_colocated else max(generation_s, training_s)
    return _bound(generation_s, training_s, ideal_s, stretch, windows)


def _bound(
    generation_s: float, training_s: float, ideal_s: float, stretch: Stretch, windows: float
) -> dict[str, float]:
    """Of the seconds that the work of the whole stretch takes."""
    times = {"generation_s": generation_s, "training_s": training_s, "ideal_s": ideal_s}
    return {name: seconds / windows for name, seconds in times.items()} | {
        "bound_ratio": ideal_s / stretch.seconds
    }


def tokens_made(stretch: Stretch) -> float:
    """Tokens that generation made: those sampled for the trained groups, but at most those that workers
    sampled in the stretch. The stretch may begin with more groups ahead than it ends with, and those were
    generated before it."""
    trained = sum(map(sampled_tokens, stretch.lines))
    steps_s = sum(spent_s(line, "step") for line in stretch.lines)  # evals too: the rate counts their tokens
    rate = Totals(stretch.lines).mean("rollouter/tokens_per_s")
    return trained if rate is None else min(trained, rate * steps_s)
