"""What lending the trainer's devices gains (`placement.lend`), against published figures, SIMULATED.

    python -m benchmarks.lending [--windows 12] [--seeds 3]

verl lends idle trainer GPUs, too, and has published three comparisons of Qwen3.5-35B-A3B. The workload
`verl-35b-a3b-math` is fitted to rows without lending; everything here is a prediction of it, on the virtual
clock, with the strict bound of staleness. Settings are trainer:rollout GPUs. `H20`: its data sheet, and the
arithmetic's share that `verl-30b-a3b-math` was fitted with; verl published no times of that comparison.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence

from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import load_workload, profile_for
from asyncrl_cli.simulate.world import simulate

WORKLOAD, PROFILE, SPARED_WINDOWS = "verl-35b-a3b-math", "partial-rollout", 1
H20 = {
    "physics.gpu_flop_per_s": 148e12,
    "physics.gpu_bytes_per_s": 4.0e12,
    "physics.train_mfu": 0.3152,
    "physics.logprob_mfu": 0.2897,
}
LEND = "placement.lend=true"


def split(trainer: int, rollout: int, *more: str) -> list[str]:
    return [
        f"placement.gpus={trainer + rollout}",
        f'placement.ratio="{trainer}:{rollout}"',
        *more,
    ]


ROWS: Sequence[tuple[str, str, Mapping[str, float], Sequence[str], Sequence[str]]] = (
    ("16:8 H100, lent against not", "-10.3%", {}, split(16, 8), split(16, 8, LEND)),
    ("16:16 H100, lent against not", "", {}, split(16, 16), split(16, 16, LEND)),
    ("24:8 H20 lent against 16:16", "about -12%", H20, split(16, 16), split(24, 8, LEND)),
    ("24:8 H100 lent against 16:16", "", {}, split(16, 16), split(24, 8, LEND)),
)
"""What is compared, the published change of the time, other figures of the workload, and both settings."""


def window_s(workload: Workload, sets: Sequence[str], windows: int, seed: int) -> tuple[float, float]:
    """Mean seconds of a window, and of these for which devices were lent."""
    profile = profile_for(workload, PROFILE, sets, environ={}).profile
    schedule = Schedule.of(profile)
    ran = simulate(profile, workload, groups=windows * schedule.window_groups, seed=seed)
    if ran.error is not None:
        raise ran.error
    lines = ran.lines[SPARED_WINDOWS * schedule.window_steps :]
    names = ("timing/step_s", "placement/lent_s")
    step_s, lent_s = (sum(line.get(name, 0.0) for line in lines) for name in names)
    return step_s / (windows - SPARED_WINDOWS), lent_s / (windows - SPARED_WINDOWS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    print("| | published | SIMULATED | seeds | seconds per window: before, after, of these lent |")
    print("|---|---:|---:|---|---|", flush=True)
    for name, published, figures, before, after in ROWS:
        workload = load_workload(WORKLOAD)
        assert workload.physics is not None
        changed = {key.partition(".")[2]: value for key, value in figures.items()}
        workload = workload.model_copy(update={"physics": workload.physics.model_copy(update=changed)})
        runs = [
            [window_s(workload, sets, options.windows, seed) for sets in (before, after)]
            for seed in range(options.seeds)
        ]
        changes = [second[0] / first[0] - 1 for first, second in runs]
        seconds = [statistics.fmean(one) for one in zip(*((a[0], b[0], b[1]) for a, b in runs), strict=True)]
        shown = ", ".join(f"{one:.0f}" for one in seconds)
        each = " ".join(f"{change:+.1%}" for change in changes)
        print(f"| {name} | {published} | {statistics.fmean(changes):+.1%} | {each} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
