"""What this machine can do: each phase of a profile alone, with the resources that the profile's plan gives it. No Ray.

    generation alone   the plan's rollout workers: one process each, all slots full           -> sampled tokens / s
    training alone     the plan's trainer ranks: one process each, train steps back to back   -> trained tokens / s
    both at once       where they do not take turns: what they share is what they lose        -> the same two

All processes are started first; the profiles are then measured in turns, repeat by repeat, so that whatever drifts on the machine
hits all alike, and while one phase is measured the others stand still. The figure is the median of the repeats. Profiles
with the same resources and sizes are measured once.

Capacities depend on how long responses are (a short one is prefill and padding), and a model's responses change while it
learns: give the lengths of the run that the figures are held against (`lengths_of` its metrics lines).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncrl_cli.bench.phase_figures import PhaseFigures, Repeats, phase_figures
from asyncrl_cli.bench.phase_generation import GenerationOrder, endless_model, make_generation
from asyncrl_cli.bench.phase_processes import Processes
from asyncrl_cli.bench.phase_training import Trained, TrainingOrder, make_training
from asyncrl_cli.job.settings import RolloutSettings
from asyncrl_cli.plan.cluster import ClusterResources, local_cluster
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan, compile_job
from asyncrl_cli.profile.place import Place
from asyncrl_cli.profile.schema import AsyncTrainingSection, Profile, RolloutSection
from asyncrl_cli.tasks.task import Task

REPEATS = 3
GENERATION_S = 2.0
TRAINING_S = 2.0
"""Per repeat. With starts and warm-ups a profile takes some 20 s on a laptop."""
BESIDE_TIMES = 3.0
"""What goes on beside a measured phase lasts so many times as long as that took alone: at once, either is slower."""
PROMPTS = 512
BATCHES = 2

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done so far, of how many)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """All that a profile's capacities depend on: profiles with equal sides have equal ones."""

    rollout: RolloutSettings
    rollout_workers: int
    n: int
    training: Profile
    trainer: Place
    step_groups: int
    num_minibatches: int
    normalize: bool
    takes_turns: bool
    """Colocated: the two phases never work at once."""


def measure_all(
    profiles: Mapping[str, Profile],
    model_dir: Path,
    task: Task,
    *,
    response_tokens: Sequence[int] = (),
    cluster: ClusterResources | None = None,
    repeats: int = REPEATS,
    seconds: float = GENERATION_S,
    at_once: bool = True,
    progress: Progress = lambda text, done, total: None,
) -> dict[str, PhaseFigures]:
    """Figures of each profile, measured in turns. `response_tokens`: lengths of responses; the model's own if not given.
    `at_once`: also both phases of a profile at the same time, where they do not take turns.

    Raises:
        ConfigError, PreflightError: the profile's numbers do not go together, or the machine has too little.
        ExecutorFailed: a process failed; carries its error.
    """
    plans = {name: compile_job(profile, cluster or local_cluster()) for name, profile in profiles.items()}
    sides = {name: side_of(profile, plans[name], model_dir, task) for name, profile in profiles.items()}
    every = list(sides.values())
    with tempfile.TemporaryDirectory(prefix="asyncrl-phases-") as directory, ExitStack() as processes:
        unique = [side for index, side in enumerate(every) if side not in every[:index]]
        bench = _Bench(
            sides=unique, task=task, response_tokens=tuple(response_tokens), directory=Path(directory), processes=processes
        )
        measured = bench.run(repeats, seconds, at_once, progress)
    return {name: phase_figures(side, plans[name].colocate, measured[unique.index(side)]) for name, side in sides.items()}


def side_of(profile: Profile, plan: JobPlan, model_dir: Path, task: Task) -> Side:
    """What the job's own workers would be started with. The trainer's learning rate is 0: see phase_training.py."""
    trainer = plan.role(TRAINER)
    return Side(
        rollout=RolloutSettings.from_profile(profile, plan, model_dir=model_dir.absolute(), reward=task.reward, version=0),
        rollout_workers=plan.role(ROLLOUT).workers,
        n=profile.rollout.n,
        training=_same_work(profile),
        trainer=Place(model_dir=str(model_dir.absolute()), device=plan.device, threads=trainer.threads, workers=trainer.workers),
        step_groups=profile.async_training.require_batches * profile.trainer.ppo_mini_batch_size,
        num_minibatches=profile.async_training.require_batches,
        normalize=profile.algorithm.normalize_advantages,
        takes_turns=plan.colocate,
    )


def lengths_of(lines: Iterable[Mapping[str, Any]]) -> list[int]:
    """Lengths of a run's responses, from its metrics lines' quantiles: as many of each step, evenly over its distribution."""
    points = [line["response_tokens/quantiles"] for line in lines if line.get("response_tokens/quantiles")]
    return [max(1, round((low + high) / 2)) for step in points for low, high in pairwise(step)]


def _same_work(profile: Profile) -> Profile:
    """What the trainer's work depends on. Without a second forward pass (`old_logprobs = "rollout"`), the place of a step in its
    window changes nothing."""
    has_prox_pass = profile.algorithm.old_logprobs == "recompute"
    window_steps = profile.async_training.trigger_parameter_sync_step if has_prox_pass else 1
    return Profile(
        model=profile.model,
        algorithm=profile.algorithm,
        trainer=profile.trainer.model_copy(update={"lr": 0.0}),
        rollout=RolloutSection(temperature=profile.rollout.temperature, call_timeout_s=profile.rollout.call_timeout_s),
        async_training=AsyncTrainingSection(trigger_parameter_sync_step=window_steps),
        weights=profile.weights,
    )


class _Pair:
    """One side's two phases, and what was measured of them."""

    def __init__(self, generation: Processes, training: Processes, num_steps: int) -> None:
        self.result = Repeats()
        self._generation = generation
        self._training = training
        self._num_steps = num_steps
        self._generation_s = self._training_s = 0.0
        """The last measurement of each alone, warm-up and all."""

    def generate(self, seconds: float) -> None:
        began_s = time.monotonic()
        self.result.generated.append(self._generation.ask("measure", seconds))
        self._generation_s = time.monotonic() - began_s

    def train(self) -> None:
        began_s = time.monotonic()
        self.result.trained.append(self._training.ask("measure", self._num_steps))
        self._training_s = time.monotonic() - began_s

    def work_at_once(self, seconds: float) -> None:
        """Each phase while the other one works for longer."""
        long_steps = math.ceil(BESIDE_TIMES * self._generation_s / self._training_s * self._num_steps)
        with self._training.doing("measure", long_steps):
            self.result.generated_beside.append(self._generation.ask("measure", seconds))
        with self._generation.doing("measure", BESIDE_TIMES * self._training_s):
            self.result.trained_beside.append(self._training.ask("measure", self._num_steps))


class _Bench:
    """All processes of a measurement, and the order in which they work."""

    def __init__(
        self, *, sides: Sequence[Side], task: Task, response_tokens: Sequence[int], directory: Path, processes: ExitStack
    ) -> None:
        self._sides = sides
        self._items = task.train[:PROMPTS]
        self._lengths = response_tokens
        self._directory = directory
        self._processes = processes

    def run(self, repeats: int, seconds: float, at_once: bool, progress: Progress) -> list[Repeats]:
        apart = [index for index, side in enumerate(self._sides) if at_once and not side.takes_turns]
        total, done = 1 + 2 * repeats * (len(self._sides) + len(apart)), 0
        progress("starting each phase alone", done, total)
        pairs = self._started()
        for _ in range(repeats):
            for pair in pairs:
                done += 1
                progress("measuring generation alone", done, total)
                pair.generate(seconds)
            for pair in pairs:
                done += 1
                progress("measuring training alone", done, total)
                pair.train()
            for index in apart:
                done += 2
                progress("measuring both phases at once", done, total)
                pairs[index].work_at_once(seconds)
        progress("each phase was measured alone", total, total)
        return [pair.result for pair in pairs]

    def _started(self) -> list[_Pair]:
        generations = [self._start_generation(index, side) for index, side in enumerate(self._sides)]
        for processes in generations:
            processes.ready()
        trainings = [self._start_training(index, side, generations[index]) for index, side in enumerate(self._sides)]
        for processes in trainings:
            processes.ready()
        sides = zip(self._sides, generations, trainings, strict=True)
        return [_Pair(generation, training, _steps_of(side, training)) for side, generation, training in sides]

    def _start_generation(self, index: int, side: Side) -> Processes:
        settings = side.rollout
        if self._lengths:
            endless = endless_model(Path(settings.model_dir), self._directory / f"model-{index}")
            settings = replace(settings, model_dir=str(endless))
        order = GenerationOrder(settings=settings, items=self._items, n=side.n, response_tokens=self._lengths)
        return self._start(f"generation-{index}", side.rollout_workers, make_generation, order, settings.threads)

    def _start_training(self, index: int, side: Side, generation: Processes) -> Processes:
        """The batches are made by the side's own rollout workers, one of which is as good as all."""
        groups = generation.ask("groups", BATCHES * side.step_groups)[0]
        order = TrainingOrder(
            profile=side.training,
            place=side.trainer,
            init_method=f"file://{self._directory}/meeting-{index}",
            batches=[groups[start : start + side.step_groups] for start in range(0, len(groups), side.step_groups)],
            num_minibatches=side.num_minibatches,
            normalize=side.normalize,
        )
        return self._start(f"training-{index}", side.trainer.workers, make_training, order, side.trainer.threads)

    def _start(self, name: str, count: int, make: Callable[[int, Any], Any], order: Any, threads: int) -> Processes:
        return self._processes.enter_context(Processes(name, count, make, order, threads=threads, log_dir=self._directory))


def _steps_of(side: Side, training: Processes) -> int:
    """Train steps that take about `TRAINING_S`: whole windows where they differ by their place in it. Warms up, too."""
    window_steps = side.training.async_training.trigger_parameter_sync_step
    training.ask("measure", BATCHES * window_steps)
    warm: list[Trained] = training.ask("measure", BATCHES * window_steps)
    rounds = round(TRAINING_S / max(one.seconds for one in warm))
    return max(rounds, 1) * BATCHES * window_steps
