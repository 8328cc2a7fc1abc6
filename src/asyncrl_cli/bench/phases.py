"""What this machine can do: each phase of a profile alone, with the resources that the profile's plan gives it. No Ray.

    generation alone   the plan's rollout workers: one process each, all slots full           -> sampled tokens / s
    training alone     the plan's trainer ranks: one process each, train steps back to back   -> trained tokens / s
    both at once       where they do not take turns: what they share is what they lose        -> the same two

All processes are started first; the profiles are then measured in turns, repeat by repeat, so that whatever drifts on the machine
hits all alike, and while one phase is measured the others stand still. The figure is the median of the repeats. Profiles
with the same resources and sizes are measured once.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl_cli.bench.children import Children, Make, Worked
from asyncrl_cli.bench.phase_generation import GenerationAlone, endless_model
from asyncrl_cli.bench.phase_training import BATCHES, TrainingAlone
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan, place_of
from asyncrl_cli.profile.place import Place
from asyncrl_cli.profile.schema import AsyncTrainingSection, Profile, RunSection
from asyncrl_cli.simulate.bound import Capacities

REPEATS = 3
GENERATION_S = TRAINING_S = 2.0
"""Per repeat. With starts and warm-ups a profile takes some 20 s on a laptop."""
PROMPTS = 512

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done so far, of how many)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """All that a profile's capacities depend on: profiles with equal sides have equal ones."""

    profile: Profile
    """What of it the engine and the trainer see."""
    rollout: Place
    trainer: Place
    colocated: bool
    """The two phases take turns and never work at once."""

    @property
    def step_groups(self) -> int:
        return self.profile.async_training.require_batches * self.profile.trainer.ppo_mini_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the processes of a side work on. `response_tokens`: the lengths of responses, taken in turns; `meeting`: a file for the
    ranks."""

    side: Side
    items: Sequence[Mapping[str, Any]]
    response_tokens: Sequence[int]
    meeting: Path

    def length(self, number: int) -> int:
        return min(self.response_tokens[number % len(self.response_tokens)], self.side.profile.rollout.max_response_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """Medians over the repeats, each repeat's tokens per second, and how far to believe them.

    `cpu_share` is the smallest share of its wall time that a process of a phase computed (its busiest thread): far below 1 on
    CPUs means that others used the machine. `slots_used` is the mean share of slots that were full while generation was measured.
    """

    capacities: Capacities
    rollout_repeats: tuple[float, ...]
    trainer_repeats: tuple[float, ...]
    slots_used: float
    cpu_share: float


def side_of(profile: Profile, plan: JobPlan, model_dir: Path) -> Side:
    """What the job's own workers would be started with, but for the learning rate, which is 0.

    Without a second forward pass (`old_logprobs = "rollout"`) all steps of a window are alike, however many it has.
    """
    has_prox_pass = profile.algorithm.old_logprobs == "recompute"
    schedule = AsyncTrainingSection(
        require_batches=profile.async_training.require_batches,
        trigger_parameter_sync_step=profile.async_training.trigger_parameter_sync_step if has_prox_pass else 1,
    )
    return Side(
        profile=Profile(
            run=RunSection(seed=profile.run.seed),
            model=profile.model,
            algorithm=profile.algorithm,
            trainer=profile.trainer.model_copy(update={"lr": 0.0}),
            rollout=profile.rollout,
            async_training=schedule,
            weights=profile.weights,
            placement=profile.placement,
            eval=profile.eval,
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
    progress: Progress = lambda text, done, total: None,
) -> dict[str, PhaseFigures]:
    """Figures of each side, measured in turns, on prompts of `items` and responses of these lengths.

    Raises ExecutorFailed with the error of a process that failed.
    """
    every = list(sides.values())
    unique = [side for index, side in enumerate(every) if side not in every[:index]]
    progress("starting each phase alone", 0, 0)
    with tempfile.TemporaryDirectory(prefix="asyncrl-phases-") as directory, ExitStack() as processes:
        pairs: list[_Pair] = []
        for index, side in enumerate(unique):
            place = Path(directory) / str(index)
            order = Order(side=side, items=items[:PROMPTS], response_tokens=response_tokens, meeting=place / "meeting")
            pairs.append(_Pair(order, place, processes))
        for pair in pairs:
            pair.ready()
        for pair in pairs:
            pair.warm_up()
        turn = [
            *(("measuring generation alone", pair.generate) for pair in pairs),
            *(("measuring training alone", pair.train) for pair in pairs),
            *(("measuring both phases at once", pair.work_at_once) for pair in pairs if not pair.side.colocated),
        ]
        for done, (text, work) in enumerate(turn * repeats, 1):
            progress(text, done, len(turn) * repeats + 1)
            work()
        progress("each phase was measured alone", len(turn) * repeats + 1, len(turn) * repeats + 1)
    return {name: pairs[unique.index(side)].figures() for name, side in sides.items()}


class _Pair:
    """One side's processes of either phase, and what was measured of them."""

    def __init__(self, order: Order, directory: Path, processes: ExitStack) -> None:
        side = self.side = order.side

        def start(name: str, make: Make, given: Order, place: Place) -> Children:
            children = Children(name, make, given, count=place.workers, threads=place.threads, log_dir=directory)
            return processes.enter_context(children)

        endless = endless_model(Path(side.rollout.model_dir), directory / "model")
        generating = replace(order, side=replace(side, rollout=replace(side.rollout, model_dir=str(endless))))
        self._generation = start("generation", GenerationAlone, generating, side.rollout)
        self._training = start("training", TrainingAlone, order, side.trainer)
        self._generated: dict[bool, list[list[Worked]]] = {False: [], True: []}
        self._trained: dict[bool, list[list[Worked]]] = {False: [], True: []}
        """By whether the other phase worked, too: repeat by repeat, and process by process."""
        self._num_steps = 0

    def ready(self) -> None:
        self._generation.ready()
        self._training.ready()

    def warm_up(self) -> None:
        """And find the number of train steps that take about `TRAINING_S`: whole windows, where the steps of one differ."""
        few = BATCHES * self.side.profile.async_training.trigger_parameter_sync_step
        self._training.ask("measure", few)
        warm: list[Worked] = self._training.ask("measure", few)
        self._num_steps = few * max(round(TRAINING_S / max(one.seconds for one in warm)), 1)

    def generate(self) -> None:
        self._generate_during(lambda: time.sleep(GENERATION_S), at_once=False)

    def train(self, *, at_once: bool = False) -> None:
        self._trained[at_once].append(self._training.ask("measure", self._num_steps))

    def work_at_once(self) -> None:
        """Both are measured over the same time."""
        self._generate_during(lambda: self.train(at_once=True), at_once=True)

    def _generate_during(self, work: Callable[[], None], *, at_once: bool) -> None:
        self._generation.ask("fill")
        self._generation.ask("begin")
        work()
        self._generated[at_once].append(self._generation.ask("end"))

    def figures(self) -> PhaseFigures:
        generated, trained = (list(chain(*repeats[False])) for repeats in (self._generated, self._trained))
        rollout, trainer = _rollout_rates(self._generated[False]), _trainer_rates(self._trained[False])
        return PhaseFigures(
            capacities=Capacities(
                rollout_tokens_per_s=statistics.median(rollout),
                trainer_tokens_per_s=statistics.median(trainer),
                colocated=self.side.colocated,
                rollout_beside_tokens_per_s=_median_or_none(_rollout_rates(self._generated[True])),
                trainer_beside_tokens_per_s=_median_or_none(_trainer_rates(self._trained[True])),
            ),
            rollout_repeats=rollout,
            trainer_repeats=trainer,
            slots_used=statistics.fmean(one.running_mean for one in generated) / self.side.profile.rollout.slots,
            cpu_share=min(one.cpu_s / one.seconds for one in (*generated, *trained)),
        )


def _rollout_rates(repeats: Sequence[Sequence[Worked]]) -> tuple[float, ...]:
    return tuple(sum(one.tokens / one.seconds for one in repeat) for repeat in repeats)


def _trainer_rates(repeats: Sequence[Sequence[Worked]]) -> tuple[float, ...]:
    """Each rank reports the tokens of all, and a step ends with the slowest."""
    return tuple(repeat[0].tokens / max(one.seconds for one in repeat) for repeat in repeats)


def _median_or_none(rates: Sequence[float]) -> float | None:
    return statistics.median(rates) if rates else None
