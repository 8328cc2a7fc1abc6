"""What this machine can do: each phase of a profile alone, with the resources that the profile's plan gives it. No Ray.

    generation alone   the plan's rollout workers: one process each, all slots full           -> sampled tokens / s
    training alone     the plan's trainer ranks: one process each, train steps back to back   -> trained tokens / s
    both at once       where they do not take turns: each slows the other on shared cores     -> the same two

All processes are started first. Then the profiles are measured in turns, repeat by repeat: if the machine's speed drifts, all are
affected alike. While one phase is measured the others stand still. The figure is the median of the repeats. Profiles with the same
resources and sizes are measured once.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl_cli.bench.children import Children, Make
from asyncrl_cli.bench.entries import Entry
from asyncrl_cli.bench.measure import stretches
from asyncrl_cli.bench.real import Bars
from asyncrl_cli.bench.results import Run
from asyncrl_cli.job import preparing
from asyncrl_cli.job.alone import BATCHES, GenerationAlone, TrainingAlone, Work, Worked, endless_model
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan, place_of
from asyncrl_cli.profile.rollout_sections import AsyncTrainingSection
from asyncrl_cli.profile.schema import Place, Profile, RunSection
from asyncrl_cli.simulate.costs import Capacities
from asyncrl_cli.simulate.observed import lengths_of

REPEATS = 3
GENERATION_S = TRAINING_S = 2.0
"""Per repeat. With starts and warm-ups a profile takes some 20 s on a laptop."""
PROMPTS = 512
FEW_SLOTS_USED = 0.9
LITTLE_CPU = 0.85
NO_GPU_BOUND = (
    "bound not measured: each phase alone is measured on CPUs only, in processes without Ray, which is what assigns GPUs. "
    "Runs on CPUs and simulated runs are held against their bound."
)

TURN = {
    "measuring generation alone": (True, False),
    "measuring training alone": (False, True),
    "measuring both phases at once": (True, True),
}
"""One repeat: whether generation works, and whether training does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """All that a profile's capacities depend on: profiles with equal sides have equal ones."""

    profile: Profile
    """What of it the engine and the trainer see."""
    rollout: Place
    trainer: Place
    colocated: bool
    """The two phases take turns and never work at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """Medians over the repeats, each repeat's tokens per second, and how far to believe them.

    `cpu_share` is the smallest share of its wall time that a process of a phase computed (its busiest thread): far below 1 on
    CPUs means that others used the machine. `slots_used` is the mean share of slots that were full while generation was measured.
    """

    capacities: Capacities
    rollout_repeats: Sequence[float]
    trainer_repeats: Sequence[float]
    slots_used: float
    cpu_share: float


def with_capacities(
    entries: Sequence[Entry], runs: Sequence[Run], bars: Bars, share: float = 1.0
) -> tuple[list[Run], tuple[str, ...]]:
    """The runs with what each phase of their profiles does alone, on responses as long as theirs were, and why that may be
    doubtful. `share`: of the usual number of measurements."""
    if entries[0].plan.device == "cuda":
        return list(runs), (NO_GPU_BOUND,)

    task, model_dir = asyncio.run(preparing.prepare(entries[0].profile, bars.note))
    sides = {entry.name: side_of(entry.profile, entry.plan, model_dir) for entry in entries}
    repeats = math.ceil(REPEATS * share)
    measured = measure_all(sides, task.train, measured_lengths(entries, runs), repeats=repeats, progress=bars.note)
    return [replace(run, capacities=measured[run.profile].capacities) for run in runs], doubts_of(measured.values())


def measured_lengths(entries: Sequence[Entry], runs: Sequence[Run]) -> list[int]:
    """Lengths of all runs' responses in the stretch that is measured, shuffled.

    A model's responses grow or shrink while it learns: in the order of the runs, a short measurement would see the first ones only.
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
    """What the job's own workers would be started with. But the learning rate is 0, so that numbers stay in range.

    Without a second forward pass (`old_logprobs = "rollout"`) all steps of a window are alike, however many it has.
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
        rollout=place_of(plan, ROLLOUT, model_dir),
        trainer=place_of(plan, TRAINER, model_dir),
        colocated=plan.colocate,
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

    Raises ExecutorFailed with the error of a process that failed.
    """
    every = list(sides.values())
    unique = [side for index, side in enumerate(every) if side not in every[:index]]
    progress("starting each phase alone", 0, 0)
    with tempfile.TemporaryDirectory(prefix="asyncrl-phases-") as directory, ExitStack() as processes:
        given = partial(Work, items=items[:PROMPTS], response_tokens=response_tokens)
        pairs = [_Pair(side, given, Path(directory) / str(index), processes) for index, side in enumerate(unique)]
        for pair in pairs:
            pair.ready()
        for pair in pairs:
            pair.warm_up()
        turn = [
            (text, pair, phases) for text, phases in TURN.items() for pair in pairs if not (all(phases) and pair.side.colocated)
        ]
        total = len(turn) * repeats + 1
        for done, (text, pair, phases) in enumerate(turn * repeats, 1):
            progress(text, done, total)
            pair.measure(*phases)
        progress("each phase was measured alone", total, total)
    return {name: pairs[unique.index(side)].figures() for name, side in sides.items()}


class _Pair:
    """One side's processes of either phase, and what was measured of them."""

    def __init__(self, side: Side, given: Callable[..., Work], directory: Path, processes: ExitStack) -> None:
        def start(name: str, make: Make, place: Place) -> Children:
            work = given(profile=side.profile, place=place, meeting=directory / "meeting")
            children = Children(name, make, work, count=place.workers, threads=place.threads, log_dir=directory)
            return processes.enter_context(children)

        self.side = side
        endless = endless_model(Path(side.rollout.model_dir), directory / "model")
        self._generation = start("generation", GenerationAlone, replace(side.rollout, model_dir=str(endless)))
        self._training = start("training", TrainingAlone, side.trainer)
        self._num_steps = 0
        self._turns: list[tuple[list[Worked], list[Worked]]] = []
        """What was generated and trained in each, process by process; nothing by a phase that stood still."""

    def ready(self) -> None:
        self._generation.ready()
        self._training.ready()

    def warm_up(self) -> None:
        """And find the number of train steps that take about `TRAINING_S`: whole windows, where the steps of one differ."""
        few = BATCHES * self.side.profile.async_training.trigger_parameter_sync_step
        self._training.ask("measure", few)
        warm: list[Worked] = self._training.ask("measure", few)
        self._num_steps = few * max(round(TRAINING_S / max(one.seconds for one in warm)), 1)

    def measure(self, generate: bool, train: bool) -> None:
        """One phase, or both over the same time."""
        trained: list[Worked] = []
        if generate:
            self._generation.ask("begin")
        if train:
            trained = self._training.ask("measure", self._num_steps)
        else:
            time.sleep(GENERATION_S)
        generated: list[Worked] = self._generation.ask("end") if generate else []
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
                colocated=self.side.colocated,
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
    """Each rank reports the tokens of all, and a step ends with the slowest."""
    return trained[0].tokens / max(one.seconds for one in trained)
