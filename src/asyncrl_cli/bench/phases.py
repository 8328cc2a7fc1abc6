"""Measures what this machine can do: each phase of a profile alone, with the resources of the profile's plan.

    generation alone   the plan's rollout workers: one actor each, all slots full             -> sampled tokens / s
    training alone     the plan's trainer ranks: one actor each, train steps back to back     -> trained tokens / s
    both at once       unless the profile is colocated: on shared cores each slows the other  -> the same two rates

All actors are started first, in one session of Ray. Then the profiles are measured in turns, repeat by
repeat: if the machine's speed drifts, all are affected alike. All other actors stand still during a
measurement. The figure is the median of the repeats. Profiles with the same resources and sizes are measured
once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.bench.bars import Bars
from asyncrl_cli.bench.entries import Entry
from asyncrl_cli.bench.measure import stretches
from asyncrl_cli.bench.results import FinishedRun
from asyncrl_cli.job import preparing
from asyncrl_cli.job.process import logged_to
from asyncrl_cli.job.session import ray_session
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.profile.rollout_sections import AsyncTrainingSection
from asyncrl_cli.profile.schema import Profile, RunSection
from asyncrl_cli.simulate.capacities import Capacities
from asyncrl_cli.simulate.observed import lengths_of

if TYPE_CHECKING:
    from asyncrl_cli.job.alone import Alone

REPEATS = 3
MEASURED_S = 2.0
"""Seconds of measurement per repeat. With starts and warm-ups a profile takes some 20 s on a laptop."""
PROMPTS = 512
FEW_SLOTS_USED = 0.9
LITTLE_CPU = 0.85
NO_GPU_BOUND = (
    "bound not measured: each phase alone is measured on CPUs only, where the actors of several profiles can "
    "wait side by side. "
    "Runs on CPUs and simulated runs are compared with their bound."
)
NO_CLUSTER_BOUND = (
    "bound not measured: each phase alone is measured on this machine, and the runs were on a cluster."
)

TURN = {
    "measuring generation alone": (True, False),
    "measuring training alone": (False, True),
    "measuring both phases at once": (True, True),
}
"""The measurements of one repeat: by their text, whether generation runs and whether training runs."""


Side = tuple[Profile, JobPlan]
"""All that a profile's capacities depend on. The profile is reduced to what the engine and the trainer
see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """Medians over the repeats, and two figures that tell how reliable they are: `Alone.cpu_shares`' least,
    and the mean share of slots in use while generation was measured alone."""

    capacities: Capacities
    slots_used: float
    cpu_share: float


def with_capacities(
    entries: Sequence[Entry], runs: Sequence[FinishedRun], bars: Bars, repeats: int = REPEATS
) -> tuple[list[FinishedRun], tuple[str, ...]]:
    """The runs with the speed of each of their phases alone, on responses of the same lengths, and reasons to
    doubt it."""
    if entries[0].plan.device == "cuda":
        return list(runs), (NO_GPU_BOUND,)

    task, model_dir, _ = asyncio.run(preparing.prepare(entries[0].profile, bars.note))
    sides = {entry.name: side_of(entry.profile, entry.plan) for entry in entries}
    measured = measure_all(
        sides, model_dir, task.train, measured_lengths(entries, runs), repeats=repeats, progress=bars.note
    )
    return [replace(run, capacities=measured[run.profile].capacities) for run in runs], doubts_of(
        measured.values()
    )


def measured_lengths(entries: Sequence[Entry], runs: Sequence[FinishedRun]) -> list[int]:
    """Lengths, in tokens, of all runs' responses in the measured stretch, shuffled.

    Responses grow or shrink while a model learns: unshuffled, a short measurement would see only the earliest
    lengths.
    """
    measured = stretches([run.lines for run in runs], max(entry.window_groups for entry in entries))
    lengths = list(
        lengths_of(
            [line for stretch in measured for line in stretch.lines], entries[0].profile
        ).response_tokens
    )
    random.Random(0).shuffle(lengths)
    return lengths


def doubts_of(measured: Collection[PhaseFigures]) -> tuple[str, ...]:
    """Reasons not to trust a bound computed from these."""
    doubts = []
    if min(one.cpu_share for one in measured) < LITTLE_CPU:
        doubts.append(
            "The bound is uncertain: something else computed on this machine while each phase was "
            "measured alone."
        )
    if min(one.slots_used for one in measured) < FEW_SLOTS_USED:
        doubts.append("The bound is uncertain: the slots were not full while generation was measured alone.")
    return tuple(doubts)


def side_of(profile: Profile, plan: JobPlan) -> Side:
    """What the job's own actors would be started with, except that the trainer does what scorers would, and
    that the learning rate is 0, so that the weights stay finite.

    Without a second forward pass (`old_logprobs = "rollout"`) all steps of a window cost the same, so K is
    set to 1.
    """
    training, has_prox_pass = profile.async_training, profile.algorithm.old_logprobs == "recompute"
    schedule = AsyncTrainingSection(
        require_batches=training.require_batches,
        trigger_parameter_sync_step=training.trigger_parameter_sync_step if has_prox_pass else 1,
    )
    reduced = Profile(
        run=RunSection(seed=profile.run.seed, train_steps=1),
        trainer=profile.trainer.model_copy(update={"lr": 0.0}),
        placement=profile.placement.model_copy(update={"tasks": None, "ratios": None}),
        async_training=schedule,
        **{name: getattr(profile, name) for name in ("model", "algorithm", "rollout", "weights", "eval")},
    )
    return reduced, replace(plan, warnings=())


def measure_all(
    sides: Mapping[str, Side],
    model_dir: Path,
    items: Sequence[Mapping[str, Any]],
    response_tokens: Sequence[int],
    *,
    repeats: int = REPEATS,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> dict[str, PhaseFigures]:
    """Figures of each side, on prompts of `items` and responses of these lengths. `progress(what is done,
    done, of how many)`.

    Raises ExecutorFailed with the error of an actor that failed.
    """
    from asyncrl_cli.envs.chat import load_tokenizer, render_prompts
    from asyncrl_cli.job.alone import Alone, Work

    every = list(sides.values())
    unique, first = [side for index, side in enumerate(every) if side not in every[:index]], every[0][0]
    progress("starting each phase alone", 0, 0)
    tokenizer = load_tokenizer(model_dir, trust_remote_code=first.model.trust_remote_code)
    work = partial(Work, prompts=render_prompts(tokenizer, items[:PROMPTS]), response_tokens=response_tokens)
    with (
        tempfile.TemporaryDirectory(prefix="asyncrl-phases-") as name,
        logged_to((directory := Path(name)) / "driver.log"),
        ray_session(first),
    ):
        jobs = [
            Alone(work(profile=profile), plan, model_dir, directory / str(index))
            for index, (profile, plan) in enumerate(unique)
        ]
        asyncio.run(_measure(jobs, repeats, progress))
    return {name: _figures(jobs[unique.index(side)]) for name, side in sides.items()}


async def _measure(jobs: Sequence[Alone], repeats: int, progress: Callable[[str, int, int], None]) -> None:
    from asyncrl_cli.job.calls import all_of

    num_started, steps = itertools.count(1), 2 * len(jobs)

    async def start(job: Alone) -> None:
        await job.start()
        progress("starting each phase alone", next(num_started), steps)

    progress("starting each phase alone", 0, steps)
    await all_of(map(start, jobs))
    for done, job in enumerate(jobs, len(jobs)):
        progress("warming up each phase alone", done, steps)
        await job.train()
    turn = [
        (text, job, phases)
        for text, phases in TURN.items()
        for job in jobs
        if not (all(phases) and job.plan.colocate)
    ]
    total = len(turn) * repeats + 1
    for done, (text, job, phases) in enumerate(turn * repeats, 1):
        progress(text, done, total)
        await job.measure(MEASURED_S, *phases)
    progress("each phase was measured alone", total, total)


def _figures(job: Alone) -> PhaseFigures:
    medians = {name: statistics.median(rates) for name, rates in job.tokens_per_s.items()}
    return PhaseFigures(
        capacities=Capacities(colocated=job.plan.colocate, **medians),
        slots_used=statistics.fmean(job.slots_used),
        cpu_share=min(job.cpu_shares),
    )
