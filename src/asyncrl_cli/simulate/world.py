"""A profile's run on a virtual clock: the loop's own code, with workers and a trainer that a workload makes.

    profile --compile_job--> workers and ranks --costs--> simulated workers, trainer --Pipeline--> metrics lines

Nothing of a run is kept but its metrics lines (and, if asked, spans): a simulated run may be as long as it likes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.errors import AsyncrlError
from asyncrl_cli.loop.attempts import Prompt
from asyncrl_cli.loop.board import World
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.settings import LoopSettings
from asyncrl_cli.loop.watching import Event, Observer, StepRecord
from asyncrl_cli.observe.metrics import StepMetrics
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan, compile_job
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.clock import run_virtual
from asyncrl_cli.simulate.costs import Alone, TrainCosts, trainer_times, worker_times
from asyncrl_cli.simulate.machine import SharedMachine
from asyncrl_cli.simulate.simulated_trainer import SimulatedTrainer
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from asyncrl_cli.simulate.workload import Workload

Progress = Callable[[int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """`lines` are those of metrics.jsonl; `events` counts the loop's events by name.

    `error`: what a run failed with; None if it ended well.
    """

    lines: list[dict[str, Any]]
    events: Mapping[str, int]
    virtual_s: float
    error: AsyncrlError | None
    alone: Alone


def simulate(
    profile: Profile,
    workload: Workload,
    *,
    seed: int = 0,
    observers: Sequence[Observer] = (),
    groups: int | None = None,
    on_progress: Progress | None = None,
) -> SimulatedRun:
    """Run `profile` (from `profile_for`) with the costs of `workload`. `groups` overrides the profile's length, in whole steps.

    The prompts' response lengths depend on `seed` alone. Raises what is wrong with the profile, or what an observer or
    `on_progress(groups_trained, virtual_s)` raises; a failed run is returned with its `error`.
    """
    job = compile_job(profile, virtual_cluster(profile))
    settings = _settings(profile, seed, groups)
    costs = TrainCosts(workload.training, profile, job.role(TRAINER).workers)
    recorder = _Recorder(settings.schedule.window_steps, on_progress)
    speeds: list[float] = []

    async def run() -> tuple[float, AsyncrlError | None]:
        trainer, workers = _team(profile, workload, job, costs, seed)
        speeds.extend(worker.speed for worker in workers)
        world = World(feed=NumberedFeed(), trainer=trainer, workers=workers, observers=(recorder, *observers))
        error: AsyncrlError | None = None
        try:
            await Pipeline(settings, world).run()
        except AsyncrlError as raised:
            error = raised
        return asyncio.get_running_loop().time(), error

    virtual_s, error = run_virtual(run())
    return SimulatedRun(
        lines=recorder.lines,
        events=recorder.events,
        virtual_s=virtual_s,
        error=error,
        alone=Alone(workload=workload, profile=profile, speeds=tuple(speeds), spent=costs.spent),
    )


def virtual_cluster(profile: Profile) -> ClusterResources:
    """One node with what the profile's placement asks for: a simulated job is never short of anything."""
    placement, on_cpu = profile.placement, profile.placement.device == "cpu"
    gpus = 0 if on_cpu else placement.gpus or _asked_gpus(profile)
    return ClusterResources(nodes=(NodeResources(name="simulated", cpus=1, gpus=gpus),), elastic_cpus=True)


def _asked_gpus(profile: Profile) -> int:
    ranks, workers = profile.placement.trainer_workers or 0, profile.rollout.workers or 0
    return max(ranks, workers) if profile.placement.colocate else ranks + workers * profile.placement.gpus_per_rollout_worker


def _settings(profile: Profile, seed: int, groups: int | None) -> LoopSettings:
    length = {} if groups is None else {"train_steps": -(-groups // Schedule.of(profile).step_groups), "total_rollout_steps": None}
    sections = {
        "run": profile.run.model_copy(update={"seed": seed, **length}),
        "eval": profile.eval.model_copy(update={"every_versions": 0}),
        "checkpoint": profile.checkpoint.model_copy(update={"every_steps": 0}),
    }
    return LoopSettings.of(profile.model_copy(update=sections))


def _team(
    profile: Profile, workload: Workload, job: JobPlan, costs: TrainCosts, seed: int
) -> tuple[SimulatedTrainer, list[SimulatedWorker]]:
    """Call inside the running loop."""
    interference = workload.decoding.interference_ratio, workload.training.interference_ratio
    machine = SharedMachine(generation_ratio=interference[0], training_ratio=interference[1])
    names = [f"rollout-{index}" for index in range(job.role(ROLLOUT).workers)]
    times = worker_times(workload, profile, len(names))
    workers = [SimulatedWorker(name, profile.rollout.slots, times, seed, machine) for name in names]
    return SimulatedTrainer(trainer_times(workload, profile, costs), machine=machine), workers


class NumberedFeed:
    """Implements `loop.ports.Feed` with prompts p0, p1, ...; which one comes next is all its state."""

    def __init__(self) -> None:
        self._given = 0

    def next(self) -> Prompt:
        self._given += 1
        return self.find(f"p{self._given - 1}", 0)

    def find(self, uid: str, epoch: int) -> Prompt:
        return Prompt(uid=uid, epoch=epoch, item={"prompt": uid[1:]})

    def state(self) -> dict[str, Any]:
        return {"given": self._given}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._given = state["given"]


class _Recorder(Observer):
    """Keeps lines and forgets the rest."""

    def __init__(self, window_steps: int, on_progress: Progress | None) -> None:
        self.lines: list[dict[str, Any]] = []
        self.events: Counter[str] = Counter()
        self._metrics = StepMetrics(trigger_parameter_sync_step=window_steps, started_s=0.0)
        self._on_progress = on_progress

    def event(self, event: Event) -> None:
        self.events[event.name] += 1

    def step(self, record: StepRecord) -> None:
        self.lines.append(self._metrics.update(record))
        if self._on_progress is not None:
            self._on_progress(record.groups_trained, record.ended_s)
