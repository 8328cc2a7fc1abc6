"""A profile's run on a virtual clock: the loop's own code, with workers and a trainer that a workload makes.

    profile --compile_job--> workers and ranks --costs--> simulated workers, trainer --Pipeline--> metrics lines

Nothing of a run is kept but its metrics lines (and, if asked, spans): a simulated run may be as long as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.errors import AsyncrlError
from asyncrl_cli.loop.attempts import Prompt
from asyncrl_cli.loop.board import World
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.watching import Observer, StepRecord
from asyncrl_cli.observe.metrics import StepMetrics
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.job_plan import compile_job
from asyncrl_cli.profile.arithmetic import LoopSettings, Schedule
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.clock import run_virtual
from asyncrl_cli.simulate.costs import Costs
from asyncrl_cli.simulate.simulated_trainer import SharedMachine, SimulatedTrainer
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from asyncrl_cli.simulate.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """`lines` are those of metrics.jsonl. `error`: what a run failed with; None if it ended well."""

    lines: list[dict[str, Any]]
    error: AsyncrlError | None
    costs: Costs


def simulate(
    profile: Profile,
    workload: Workload,
    *,
    seed: int = 0,
    observers: Sequence[Observer] = (),
    groups: int | None = None,
) -> SimulatedRun:
    """Run `profile` (from `profile_for`) with the costs of `workload`. `groups` overrides the profile's length, in whole steps.

    The prompts' response lengths depend on `seed` alone. Raises what is wrong with the profile, or what an observer raises; a run
    that fails is returned with its `error`.
    """
    job, settings = compile_job(profile, virtual_cluster(profile)), _settings(profile, seed, groups)
    costs = Costs(workload=workload, profile=profile, ranks=job.trainer_workers, workers=job.rollout_workers)
    recorder = _Recorder(settings.schedule.window_steps)

    async def run() -> AsyncrlError | None:
        trainer, workers = _team(costs, seed)
        costs.speeds = [worker.speed for worker in workers]
        world = World(feed=NumberedFeed(), trainer=trainer, workers=workers, observers=(recorder, *observers))
        try:
            await Pipeline(settings, world).run()
        except AsyncrlError as error:
            return error
        return None

    return SimulatedRun(error=run_virtual(run()), lines=recorder.lines, costs=costs)


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


def _team(costs: Costs, seed: int) -> tuple[SimulatedTrainer, list[SimulatedWorker]]:
    """Call inside the running loop."""
    workload, times, slots = costs.workload, costs.worker_times(), costs.profile.rollout.slots
    generation_ratio, training_ratio = workload.decoding.interference_ratio, workload.training.interference_ratio
    machine = SharedMachine(generation_ratio=generation_ratio, training_ratio=training_ratio)
    workers = [SimulatedWorker(f"rollout-{index}", slots, times, seed, machine) for index in range(costs.workers)]
    return SimulatedTrainer(costs.trainer_times(), machine=machine), workers


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

    def __init__(self, window_steps: int) -> None:
        self.lines: list[dict[str, Any]] = []
        self._metrics = StepMetrics(trigger_parameter_sync_step=window_steps, started_s=0.0)

    def step(self, record: StepRecord) -> None:
        self.lines.append(self._metrics.update(record))


class TrainedGroups(Observer):
    """Tells after every train step how many groups have been trained."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell

    def step(self, record: StepRecord) -> None:
        self._tell(record.ledger["trained"])
