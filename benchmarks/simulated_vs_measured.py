"""Compares real runs with the simulator: calibrates a workload from one of them, predicts the others, prints
both.

    asyncrl bench --compare colocate --profile stale-samples --profile partial-rollout --out BENCH_DIR
    python benchmarks/simulated_vs_measured.py BENCH_DIR [--calibrate-on stale-samples] [--repeat 0]
                                               [--calibrated-in OTHER_BENCH_DIR]

The measured and the simulated groups are the same: those of the comparison, without warm-up and run-out. Each
prediction is compared with the median of the profile's repeats, also for another number of rollout workers
than the calibrated run had (`--calibrated-in`). As a policy learns, its responses grow or
shrink, differently in each profile (`--set trainer.lr=1e-9` keeps them as they are). So predictions are made
with the lengths of the calibrated run, and again with those of the profile's own repeats. Exits with 1 if one
of the latter is off by more than `--within`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.bench.figures import Edges, common_edges, figures_of, stretch_of
from asyncrl_cli.observe.recorded import read_metrics
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.simulate.calibration import calibrate
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import simulate

Lines = Sequence[Mapping[str, Any]]
HOW = """Seconds per train step. tokens: mean length of a profile's responses, which is a matter of what the
model has learnt by then, and no simulation tells. SIMULATED*: with these lengths; all else is from the one
calibrated run. stale: mean versions per token, measured and SIMULATED*."""
SEEDS = 3
"""Simulated runs per profile; the median counts."""


def measured_runs(bench_dir: Path) -> dict[str, list[Lines]]:
    """Metrics lines of every repeat, by profile."""
    found: dict[str, list[Lines]] = {}
    for directory in sorted((bench_dir / "runs").glob("*-r[0-9]*")):
        if directory.is_dir():
            found.setdefault(directory.name.rpartition("-r")[0], []).append(
                read_metrics(directory / "metrics.jsonl")
            )
    return found


def predicted_runs(workload: Workload, name: str, groups: int, sets: Sequence[str]) -> list[Lines]:
    profile = profile_for(workload, name, sets, groups=groups, environ={}).profile
    runs = [simulate(profile, workload, seed=seed) for seed in range(SEEDS)]
    for run in runs:
        if run.error is not None:
            raise run.error
    return [run.lines for run in runs]


def step_s(runs: Sequence[Lines], edges: Edges, window_groups: int, figure: str = "step_s_mean") -> float:
    """Median over the runs of the mean step, or of another figure."""
    return statistics.median(figures_of(stretch_of(lines, edges), window_groups)[figure] for lines in runs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bench_dir", type=Path)
    parser.add_argument("--calibrate-on", default="partial-rollout", metavar="PROFILE")
    parser.add_argument("--repeat", type=int, default=0, help="the repeat to calibrate on")
    parser.add_argument("--calibrated-in", type=Path, metavar="BENCH_DIR")
    parser.add_argument("--within", type=float, default=0.2, metavar="SHARE")
    options = parser.parse_args()
    runs = measured_runs(options.bench_dir)
    calibrated_in = options.calibrated_in or options.bench_dir
    if options.calibrate_on not in measured_runs(calibrated_in):
        parser.error(
            f"{calibrated_in} has no runs of {options.calibrate_on}: {', '.join(runs) or 'none at all'}"
        )
    try:
        workloads = {
            name: [
                calibrate(options.bench_dir / "runs" / f"{name}-r{repeat}") for repeat in range(len(repeats))
            ]
            for name, repeats in runs.items()
        }
        workload = calibrate(calibrated_in / "runs" / f"{options.calibrate_on}-r{options.repeat}")
    except ConfigError as error:
        parser.error(str(error))
    workers = next(iter(workloads.values()))[0].profile["rollout"]["workers"]
    sets = [f"rollout.workers={workers}"]
    groups = int(next(iter(runs.values()))[0][-1]["groups_trained"])
    windows = [
        Schedule.of(profile_for(workload, name, sets, groups=groups, environ={}).profile).window_groups
        for name in runs
    ]
    edges = common_edges([lines for repeats in runs.values() for lines in repeats], max(windows))
    print(
        f"SIMULATED from repeat {options.repeat} of {options.calibrate_on}: "
        f"{workload.decoding}\n{workload.training}\n"
    )
    heads = ("measured", 10), ("(least-most)", 14), ("SIMULATED", 11), ("off by", 8), ("tokens", 8)
    heads += ("SIMULATED*", 12), ("off by", 8), ("stale", 7), ("SIMULATED*", 11)
    print(" " * 20 + "".join(f"{head:>{width}}" for head, width in heads))
    worst = worst_own = 0.0
    for name, repeats in runs.items():
        repeat_s = [step_s([lines], edges, max(windows)) for lines in repeats]
        measured_s = statistics.median(repeat_s)
        own_runs = [
            predicted_runs(workload.model_copy(update={"lengths": repeat.lengths}), name, groups, sets)
            for repeat in workloads[name]
        ]
        plain_s = step_s(predicted_runs(workload, name, groups, sets), edges, max(windows))
        own_s = statistics.median(step_s(runs_of_one, edges, max(windows)) for runs_of_one in own_runs)
        both = repeats, [run for runs_of_one in own_runs for run in runs_of_one]
        stale = [step_s(some, edges, max(windows), "staleness_mean") for some in both]
        if name != options.calibrate_on or options.calibrated_in:
            worst = max(worst, abs(plain_s / measured_s - 1))
            worst_own = max(worst_own, abs(own_s / measured_s - 1))
        tokens = statistics.fmean(length for own in workloads[name] for length in own.lengths.response_tokens)
        print(
            f"{name:<20}{measured_s:>10.3f}{f'{min(repeat_s):.3f}-{max(repeat_s):.3f}':>14}{plain_s:>11.3f}"
            f"{plain_s / measured_s - 1:>+8.1%}{tokens:>8.1f}{own_s:>12.3f}{own_s / measured_s - 1:>+8.1%}"
            f"{stale[0]:>7.2f}{stale[1]:>11.2f}"
        )
    print(f"\n{HOW}\nlargest difference of a prediction {worst:.1%}; with own lengths* {worst_own:.1%}")
    print(f"that is {'within' if worst_own <= options.within else 'NOT within'} {options.within:.0%}")
    return int(worst_own > options.within)


if __name__ == "__main__":
    sys.exit(main())
