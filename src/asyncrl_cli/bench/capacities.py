"""The capacities that real runs are held against: each phase of their profiles alone, on responses as long as theirs were."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from asyncrl_cli.bench import phases
from asyncrl_cli.bench.bars import Bars
from asyncrl_cli.bench.entries import Entry
from asyncrl_cli.bench.measure import common_edges, stretch_of
from asyncrl_cli.bench.results import Run
from asyncrl_cli.job import preparing
from asyncrl_cli.simulate.observed import lengths_of

FEW_SLOTS_USED = 0.9
LITTLE_CPU = 0.85
LENGTHS_SEED = 0
NO_GPU_BOUND = (
    "bound not measured: each phase alone is measured on CPUs only, in processes without Ray, which is what assigns GPUs. "
    "Runs on CPUs and simulated runs are held against their bound."
)


def with_capacities(
    entries: Sequence[Entry], runs: Sequence[Run], bars: Bars, share: float = 1.0
) -> tuple[list[Run], tuple[str, ...]]:
    """The runs with what each phase of their profiles does alone, and why that may be doubtful. `share`: of the usual number of
    measurements."""
    if entries[0].plan.device == "cuda":
        return list(runs), (NO_GPU_BOUND,)

    task, model_dir = asyncio.run(preparing.prepare(entries[0].profile, bars.note))
    sides = {entry.name: phases.side_of(entry.profile, entry.plan, model_dir) for entry in entries}
    lengths = measured_lengths(entries, runs)
    repeats = math.ceil(phases.REPEATS * share)
    measured = phases.measure_all(sides, task.train, lengths, repeats=repeats, progress=bars.note)
    return [replace(run, capacities=measured[run.profile].capacities) for run in runs], doubts_of(measured.values())


def measured_lengths(entries: Sequence[Entry], runs: Sequence[Run]) -> list[int]:
    """Lengths of all runs' responses in the stretch that is measured, shuffled.

    A model's responses grow or shrink while it learns: in the order of the runs, a short measurement would see the first ones only.
    """
    edges = common_edges([run.lines for run in runs], max(entry.window_groups for entry in entries))
    lines = [line for run in runs for line in stretch_of(run.lines, edges).lines]
    lengths = list(lengths_of(lines, entries[0].profile).response_tokens)
    random.Random(LENGTHS_SEED).shuffle(lengths)
    return lengths


def doubts_of(measured: Collection[phases.PhaseFigures]) -> tuple[str, ...]:
    """Reasons not to trust a bound computed from these."""
    doubts = []
    if min(one.cpu_share for one in measured) < LITTLE_CPU:
        doubts.append("The bound is uncertain: something else computed on this machine while each phase was measured alone.")
    if min(one.slots_used for one in measured) < FEW_SLOTS_USED:
        doubts.append("The bound is uncertain: the slots were not full while generation was measured alone.")
    return tuple(doubts)
