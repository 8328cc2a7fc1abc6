"""Measures what this machine can do: each phase of a profile alone, with the resources of the profile's plan.

    generation alone   the plan's rollout workers: one actor each, all slots full             -> sampled tokens / s
    training alone     the plan's trainer ranks: one actor each, train steps back to back     -> trained tokens / s
    both at once       unless the profile is colocated: on shared cores each slows the other  -> the same two rates

All actors are started first, in one session of Ray. Then the profiles are measured in turns, repeat by repeat: if the machine's
speed drifts, all are affected alike. All other actors stand still during a measurement. The figure is the median of the repeats.
Profiles with the same resources and sizes are measured once.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl_cli.bench.entries import Entry
from asyncrl_cli.bench.measure import stretches
from asyncrl_cli.bench.real import Bars
from asyncrl_cli.bench.results import Run
from asyncrl_cli.job import preparing
from asyncrl_cli.job.alone import BATCHES, GenerationAlone, Phase, TrainingAlone, Work, Worked, endless_model
from asyncrl_cli.job.session import ray_session
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan, place_of
from asyncrl_cli.profile.rollout_sections import AsyncTrainingSection
from asyncrl_cli.profile.schema import Profile, RunSection
from asyncrl_cli.simulate.costs import Capacities
from asyncrl_cli.simulate.observed import lengths_of

REPEATS = 3
GENERATION_S = TRAINING_S = 2.0
"""Seconds of measurement per repeat. With starts and warm-ups a profile takes some 20 s on a laptop."""
PROMPTS = 512
FEW_SLOTS_USED = 0.9
LITTLE_CPU = 0.85
NO_GPU_BOUND = (
    "bound not measured: each phase alone is measured on CPUs only, where the actors of several profiles can wait side by side. "
    "Runs on CPUs and simulated runs are compared with their bound."
)

TURN = {
    "measuring generation alone": (True, False),
    "measuring training alone": (False, True),
    "measuring both phases at once": (True, True),
}
"""The measurements of one repeat: by their text, whether generation runs and whether training runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """All that a profile's capacities depend on: profiles with equal sides have equal capacities."""

    profile: Profile
    """Reduced to what the engine and the trainer see: profiles that differ elsewhere have equal sides."""
    plan: JobPlan
    model_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """Medians over the repeats, each repeat's tokens per second, and two figures that tell how reliable they are.

    `cpu_share`: CPU time over wall time of the process with the smallest ratio (see `CpuTime`); on CPUs far below 1 means that
    other programs used the machine. `slots_used`: the mean share of slots in use while generation was measured.
    """

    capacities: Capacities
    rollout_repeats: Sequence[float]
    trainer_repeats: Sequence[float]
    slots_used: float
    cpu_share: float


def with_capacities(
    entries: Sequence[Entry], runs: Sequence[Run], bars: Bars, share: float = 1.0
) -> tuple[list[Run], tuple[str, ...]]:
    """The runs with the speed of each of their phases alone, on responses of the same lengths, and reasons to doubt it.
    `share`: the part of `REPEATS` to make now."""
    if entries[0].plan.device == "cuda":
        return list(runs), (NO_GPU_BOUND,)

    task, model_dir = asyncio.run(preparing.prepare(entries[0].profile, bars.note))
    sides = {entry.name: side_of(entry.profile, entry.plan, model_dir) for entry in entries}
    repeats = math.ceil(REPEATS * share)
    measured = measure_all(sides, task.train, measured_lengths(entries, runs), repeats=repeats, progress=bars.note)
    return [replace(run, capacities=measured[run.profile].capacities) for run in runs], doubts_of(measured.values())


def measured_lengths(entries: Sequence[Entry], runs: Sequence[Run]) -> list[int]:
    """Lengths, in tokens, of all runs' responses in the measured stretch, shuffled.

    Responses grow or shrink while a model learns: unshuffled, a short measurement would see only the earliest lengths.
    """
    measured = stretches([run.lines for run in runs], max(entry.window_groups for entry in entries))
    lengths = list(lengths_of([line for stretch in measured for line in stretch.lines], entries[0].profile).response_tokens)
    random.Random(0).shuffle(lengths)
    return lengths


def doubts_of(measured: Collection[PhaseFigures]) -> tuple[str, ...]:
    """Reasons not to trust a bound computed from these."""
    doubts = []
    if min(one.cpu_share for one in measured) < LITTLE_CPU:
        doubts.append("The bound is uncertain: something else computed on this machine while each phase was measured alone.")
    if min(one.slots_used for one in measured) < FEW_SLOTS_USED:
        doubts.append("The bound is uncertain: the slots were not full while generation was measured alone.")
    return tuple(doubts)


def side_of(profile: Profile, plan: JobPlan, model_dir: Path) -> Side:
    """What the job's own workers would be started with, except that the learning rate is 0, so that the weights stay finite.

    Without a second forward pass (`old_logprobs = "rollout"`) all steps of a window cost the same, so K is set to 1.
    """
    training, has_prox_pass = profile.async_training, profile.algorithm.old_logprobs == "recompute"
    schedule = AsyncTrainingSection(
        require_batches=training.require_batches,
        trigger_parameter_sync_step=training.trigger_parameter_sync_step if has_prox_pass else 1,
    )
    names = ("model", "algorithm", "rollout", "weights", "placement", "eval")
    return Side(
        profile=Profile(
            run=RunSection(seed=profile.run.seed),
            trainer=profile.trainer.model_copy(update={"lr": 0.0}),
            async_training=schedule,
            **{name: getattr(profile, name) for name in names},
        ),
        plan=replace(plan, warnings=()),
        model_dir=model_dir,
    )


def measure_all(
    sides: Mapping[str, Side],
    items: Sequence[Mapping[str, Any]],
    response_tokens: Sequence[int],
    *,
    repeats: int = REPEATS,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> dict[str, PhaseFigures]:
    """Figures of each side, on prompts of `items` and responses of these lengths. `progress(what is done, done, of how many)`.

    Raises ExecutorFailed with the error of an actor that failed.
    """
    every = list(sides.values())
    unique = [side for index, side in enumerate(every) if side not in every[:index]]
    progress("starting each phase alone", 0, 0)
    with tempfile.TemporaryDirectory(prefix="asyncrl-phases-") as directory, ray_session(every[0].profile):
        given = partial(Work, items=items[:PROMPTS], response_tokens=response_tokens)
        pairs = [_Pair(side, given, Path(directory) / str(index)) for index, side in enumerate(unique)]
        for pair in pairs:
            pair.ready()
        for pair in pairs:
            pair.warm_up()
        turn = [
            (text, pair, phases) for text, phases in TURN.items() for pair in pairs if not (all(phases) and pair.side.plan.colocate)
        ]
        total = len(turn) * repeats + 1
        for done, (text, pair, phases) in enumerate(turn * repeats, 1):
            progress(text, done, total)
            pair.measure(*phases)
        progress("each phase was measured alone", total, total)
    return {name: pairs[unique.index(side)].figures() for name, side in sides.items()}


class _Pair:
    """The actors of both phases of one side, and their measurements."""

    def __init__(self, side: Side, given: Callable[..., Work], directory: Path) -> None:
        given = partial(given, profile=side.profile, directory=directory)
        endless = endless_model(side.model_dir, directory / "model")
        self.side = side
        self._generation = Phase("generation", GenerationAlone, given(place=place_of(side.plan, ROLLOUT, endless)))
        self._training = Phase("training", TrainingAlone, given(place=place_of(side.plan, TRAINER, side.model_dir)))
        self._num_steps = 0
        self._turns: list[tuple[list[Worked], list[Worked]]] = []
        """Per measurement: what each actor generated and trained. Empty for a phase that stood still."""

    def ready(self) -> None:
        self._generation.ready()
        self._training.ready()

    def warm_up(self) -> None:
        """Train a little, and find how many train steps take about `TRAINING_S`: whole windows, whose steps may differ."""
        few = BATCHES * self.side.profile.async_training.trigger_parameter_sync_step
        self._training.ask("measure", few)
        warm = self._training.ask("measure", few)
        self._num_steps = few * max(round(TRAINING_S / max(one.seconds for one in warm)), 1)

    def measure(self, generate: bool, train: bool) -> None:
        """Measure one phase alone, or both at the same time."""
        trained: list[Worked] = []
        if generate:
            self._generation.ask("begin")
        if train:
            trained = self._training.ask("measure", self._num_steps)
        else:
            time.sleep(GENERATION_S)
        generated = self._generation.ask("end") if generate else []
        self._turns.append((generated, trained))

    def figures(self) -> PhaseFigures:
        generated = [generated for generated, trained in self._turns if not trained]
        trained = [trained for generated, trained in self._turns if not generated]
        both = [turn for turn in self._turns if all(turn)]
        rollout, trainer = list(map(_rollout_rate, generated)), list(map(_trainer_rate, trained))
        return PhaseFigures(
            capacities=Capacities(
                rollout_tokens_per_s=statistics.median(rollout),
                trainer_tokens_per_s=statistics.median(trainer),
                colocated=self.side.plan.colocate,
                rollout_beside_tokens_per_s=statistics.median(_rollout_rate(generated) for generated, _ in both) if both else None,
                trainer_beside_tokens_per_s=statistics.median(_trainer_rate(trained) for _, trained in both) if both else None,
            ),
            rollout_repeats=rollout,
            trainer_repeats=trainer,
            slots_used=statistics.fmean(one.running_mean for one in chain(*generated)) / self.side.profile.rollout.slots,
            cpu_share=min(one.cpu_s / one.seconds for one in chain(*generated, *trained)),
        )


def _rollout_rate(generated: Sequence[Worked]) -> float:
    return sum(one.tokens / one.seconds for one in generated)


def _trainer_rate(trained: Sequence[Worked]) -> float:
    """Each rank reports the tokens of all ranks, and a step ends with the slowest rank."""
    return trained[0].tokens / max(one.seconds for one in trained)
