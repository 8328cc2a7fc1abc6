"""The capacities that real runs are held against: each phase of their profiles alone, on responses as long as theirs were."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from asyncrl_cli.bench.entries import Entry
from asyncrl_cli.bench.measure import common_edges, stretch_of
from asyncrl_cli.bench.results import RunKey, RunLines
from asyncrl_cli.observe.bound import Capacities

if TYPE_CHECKING:
    from asyncrl_cli.bench.compare import Watcher
    from asyncrl_cli.bench.phase_figures import PhaseFigures

FEW_SLOTS_USED = 0.9
LITTLE_CPU = 0.85
LENGTHS_SEED = 0
NO_GPU_BOUND = (
    "bound not measured: each phase alone is measured on CPUs only, because nobody but Ray gives its processes GPUs of their own. "
    "Runs on CPUs and simulated runs are held against their bound."
)


def real_capacities(
    entries: Sequence[Entry], runs: Sequence[RunLines], watcher: Watcher, share: float = 1.0
) -> tuple[dict[RunKey, Capacities], tuple[str, ...]]:
    """Each phase alone, on responses as long as those of the runs' measured stretch: once per profile, for all of its seeds.

    `share`: of the usual number of measurements.
    """
    from asyncrl_cli.bench.phases import REPEATS, measure_all
    from asyncrl_cli.job.preparing import prepare

    if entries[0].plan.device == "cuda":
        return {}, (NO_GPU_BOUND,)

    def say(text: str, done: int = 0, total: int = 0) -> None:
        watcher.note(text, done, total)

    prepared = asyncio.run(prepare(entries[0].profile, say))
    profiles = {entry.name: entry.profile for entry in entries}
    lengths = measured_lengths(runs, max(entry.window_groups for entry in entries))
    repeats = math.ceil(REPEATS * share)
    measured = measure_all(
        profiles, prepared.model_dir, prepared.task, response_tokens=lengths, repeats=repeats, progress=watcher.note
    )
    return {(run.profile, run.seed): measured[run.profile].capacities() for run in runs}, doubts_of(measured.values())


def measured_lengths(runs: Sequence[RunLines], window_groups: int) -> list[int]:
    """Lengths of all runs' responses in the stretch that is measured, in an order that tells nothing of when they were made.

    A model's responses grow or shrink while it learns: in the order of the runs, a short measurement would see the first ones only.
    """
    from asyncrl_cli.bench.phases import lengths_of

    edges = common_edges([run.lines for run in runs], window_groups)
    lengths = [length for run in runs for length in lengths_of(stretch_of(run.lines, edges).lines)]
    random.Random(LENGTHS_SEED).shuffle(lengths)
    return lengths


def doubts_of(measured: Collection[PhaseFigures]) -> tuple[str, ...]:
    """Why a bound that rests on these may not be one."""
    doubts = []
    if min(one.cpu_share for one in measured) < LITTLE_CPU:
        doubts.append("The bound is uncertain: something else computed on this machine while each phase was measured alone.")
    if min(one.slots_used for one in measured) < FEW_SLOTS_USED:
        doubts.append("The bound is uncertain: the slots were not full while generation was measured alone.")
    return tuple(doubts)
