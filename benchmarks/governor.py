"""What steering eta to a KL costs: `async_training.target_kl` against the best fixed settings, SIMULATED.

    python -m benchmarks.governor [WORKLOAD ...] [--windows 24] [--target-kl 0.02]

Per workload of a published experiment, on the virtual clock, in miniature (as many GPUs and prompts, divided
by the same number):

    default    profile partial-rollout as it is: eta 0.5
    best       the fastest of fixed settings whose KL is at most the target: eta from 0.25 up, each with the
               smallest bound of staleness and with the governed one's, then the best of these with half the
               slots
    governed   target_kl, with the largest of these eta as `staleness_threshold`: nothing was searched

KL follows from the ages of trained tokens by the workload's `[drift]`, an assumption. The first quarter of
the windows, in which the governor searches, does not count.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from math import ceil
from typing import NamedTuple

from asyncrl_cli.contracts.events import Observer, StepRecord
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.simulate.simulated_trainer import mean_kl
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import load_workload, miniature, profile_for
from asyncrl_cli.simulate.world import simulate

PROFILE, MOST = "partial-rollout", 4
ETA = "async_training.staleness_threshold"
ETAS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, MOST)
WORKLOADS = (
    "areal-1.5b-math",
    "areal-7b-math",
    "nemo-rl-235b-h100",
    "nemo-rl-30b-a3b-gb200",
    "nemo-rl-30b-a3b-h100",
    "nemo-rl-32b-h100",
    "pipeline-moe-16b",
    "trl-1.5b-lora",
    "verl-7b-math",
    "vime-4b-math",
)


class Figures(NamedTuple):
    """Windows per hour, and nats per token."""

    speed: float
    kl: float


class Measured(Observer):
    """Seconds and KL of the steps of the windows that count."""

    def __init__(self, workload: Workload, begin: int, end: int) -> None:
        self._workload, self._windows = workload, range(begin, end)
        self._sums = Counter[str]()

    def step(self, record: StepRecord) -> None:
        if record.window in self._windows:
            kl = mean_kl(record.groups, record.window, self._workload.drift.kl)
            self._sums.update(seconds=record.timing_s["step"], kl=kl.part, tokens=kl.whole)

    def figures(self) -> Figures:
        sums = self._sums
        return Figures(len(self._windows) * 3600 / sums["seconds"], sums["kl"] / sums["tokens"])


def run(workload: Workload, sets: Sequence[str], windows: int) -> Figures:
    """The profile with some keys, for that many windows."""
    profile, scale = miniature(workload, profile_for(workload, PROFILE, sets, environ={}).profile)
    measured = Measured(workload, windows // 4, windows - 1)
    groups = windows * Schedule.of(profile).window_groups
    ran = simulate(profile, workload, groups=groups, observers=[measured], scale=scale)
    if ran.error is not None:
        raise ran.error
    return measured.figures()


def best_fixed(workload: Workload, windows: int, target_kl: float) -> tuple[Figures, str]:
    """The fastest fixed setting within the target, and which one it is. KL grows with eta, so the first one
    above the target ends the search."""
    found = []
    for is_strict in (True, False):
        for eta in ETAS:
            bound = ceil(eta) if is_strict else MOST
            sets = (f"{ETA}={eta}", f"async_training.max_staleness={bound}")
            figures = run(workload, sets, windows)
            if figures.kl > target_kl:
                break
            found.append((figures, sets))
    best, sets = max(found)
    rollout = profile_for(workload, PROFILE, environ={}).profile.rollout
    halved = (*sets, f"rollout.slots={max(rollout.n, rollout.slots // 2)}")
    found.append((run(workload, halved, windows), halved))
    best, sets = max((figures, sets) for figures, sets in found if figures.kl <= target_kl)
    return best, ", ".join(one.partition(".")[2] for one in sets)


def row(job: tuple[str, int, float]) -> str:
    name, windows, target_kl = job
    workload = load_workload(name)
    default = run(workload, (), windows)
    best, how = best_fixed(workload, windows, target_kl)
    governed = run(workload, (f"{ETA}={MOST}", f"async_training.target_kl={target_kl}"), windows)
    columns = [f"{one.speed:.3g} | {one.kl:.4f}" for one in (default, best, governed)]
    ratios = f"{governed.speed / best.speed:.3f} | {governed.speed / default.speed:.3f}"
    return f"| `{name}` | {' | '.join(columns)} | {ratios} | {how} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--target-kl", type=float, default=0.02)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    each = "windows/h | KL"
    columns = f"default: {each} | best fixed: {each} | governed: {each} | of best | of default | best"
    print(f"| workload | {columns} |")
    print(f"|---|{'---:|' * 8}---|", flush=True)
    with ProcessPoolExecutor(options.processes) as pool:
        for line in pool.map(row, [(name, options.windows, options.target_kl) for name in options.workloads]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
