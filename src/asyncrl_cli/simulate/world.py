"""Runs a profile on a virtual clock: the loop's own code, with simulated workers and a simulated trainer
timed by a workload.

    profile --compile_job--> workers, ranks --costs--> simulated workers, trainer --Pipeline--> metrics lines

The clock is an asyncio event loop that never blocks: `time()` jumps to the next timer. Only a run's metrics
lines are kept, so that long runs fit in memory.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.contracts.events import Observer, StepRecord
from asyncrl_cli.contracts.prompt_group import GroupResult, Prompt
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import World
from asyncrl_cli.observe.metrics import StepMetrics
from asyncrl_cli.observe.run_lines import Line
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.compiler import asked_gpus, compile_job
from asyncrl_cli.profile.arithmetic import LoopSettings, Schedule, asked_ranks
from asyncrl_cli.profile.keys import with_values
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.costs import Costs
from asyncrl_cli.simulate.simulated_trainer import SharedMachine, SimulatedScorer, SimulatedTrainer
from asyncrl_cli.simulate.simulated_worker import SimulatedStore, SimulatedWorker
from asyncrl_cli.simulate.workload import Workload

T = TypeVar("T")
MOST_CANCELS = 5
"""How often a task that remains after a deadlock is cancelled, at most. Each endless wait in its clean-up
needs one more cancel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """`lines` are those of metrics.jsonl. `error`: the error with which the run failed, or None."""

    lines: list[Line]
    error: AsyncrlError | None
    costs: Costs


def simulate(
    profile: Profile,
    workload: Workload,
    *,
    seed: int = 0,
    observers: Sequence[Observer] = (),
    groups: int | None = None,
    factors: Mapping[str, float] | None = None,
    scale: int = 1,
    machines: bool = False,
) -> SimulatedRun:
    """Run `profile` (from `profile_for`) with the costs of `workload`. `groups` overrides the profile's
    length, in whole steps; `factors` multiply figures of the workload. `scale`: of a miniature
    (`workload_files.miniature`). `machines`: workers report those of their processes, for a run whose files
    are kept.

    Response lengths depend on `seed` alone. Raises AsyncrlError for an invalid profile, and whatever an
    observer raises. If the run fails, its error is returned in `error`.
    """
    job = compile_job(profile, virtual_cluster(profile))
    workload, num_workers = workload.on(profile.placement).with_times(factors or {}), job.rollout_workers
    num_lent = job.trainer_workers // workload.worker_gpus(profile.placement) if job.lend else 0
    if profile.placement.colocate:  # the job has one per GPU
        num_workers = -(-num_workers // workload.worker_gpus(profile.placement))
    costs = Costs(
        workload=workload,
        profile=profile,
        ranks=job.trainer_workers,
        workers=num_workers,
        scorers=job.scorers,
        scale=scale,
    )
    changed: dict[str, int | None] = {"run.seed": seed, "checkpoint.every_steps": 0}
    if groups is not None:
        changed |= length_of(profile, groups)
    settings = LoopSettings.of(with_values(profile, changed))
    recorder = _Recorder(settings.schedule.window_steps)

    async def run() -> AsyncrlError | None:
        # made inside the running loop, whose clock they read
        times, slots = replace(costs.worker_times(), reports_machines=machines), profile.rollout.slots
        machine = SharedMachine(costs.places)
        store = SimulatedStore()
        workers = [
            SimulatedWorker(
                f"rollout-{index}", slots, times, seed, machine, store, is_lent=index >= costs.workers
            )
            for index in range(costs.workers + num_lent)
        ]
        costs.speeds = [worker.speed for worker in workers]
        world = World(
            feed=NumberedFeed(),
            eval_sets={"": [{"uid": f"eval-{number}"} for number in range(profile.eval.prompts)]},
            trainer=SimulatedTrainer(costs.trainer_times(), machine),
            workers=workers,
            lent=[worker.name for worker in workers[costs.workers :]],
            scorers=[SimulatedScorer(task, costs.scorer_times(task), machine) for task in costs.scorers],
            observers=(recorder, *observers),  # the recorder first: others may raise
            data=store,
        )
        try:
            await Pipeline(settings, world).run()
        except AsyncrlError as error:
            return error
        return None

    return SimulatedRun(error=run_virtual(run()), lines=recorder.lines, costs=costs)


def length_of(profile: Profile, groups: int) -> dict[str, int | None]:
    """The keys that make a run train so many groups, rounded up to whole train steps."""
    steps = -(-groups // Schedule.of(profile).step_groups)
    return {"run.train_steps": steps, "run.total_rollout_steps": None}


def virtual_cluster(profile: Profile) -> ClusterResources:
    """One node with all resources that the profile's placement needs, so that a simulated job is never short
    of any. On CPUs by `placement.device`, or if it is "auto" and only the rollout workers have a number:
    with GPUs the trainer would have none."""
    placement = profile.placement
    has_trainer = placement.colocate or placement.gpus or placement.ratios or asked_ranks(profile)
    on_cpus = placement.device == "cpu" or (placement.device == "auto" and not has_trainer)
    gpus = 0 if on_cpus else asked_gpus(profile)
    return ClusterResources(nodes=(NodeResources(name="simulated", cpus=1, gpus=gpus),), elastic_cpus=True)


class NumberedFeed:
    """Implements `contracts.ports.Feed` with prompts p0, p1, ... Its only state is the next number."""

    def __init__(self) -> None:
        self._given = 0

    def next(self) -> Prompt:
        self._given += 1
        return self.find(f"p{self._given - 1}", 0)

    def find(self, uid: str, epoch: int) -> Prompt:
        return Prompt(uid=uid, epoch=epoch, item={"prompt": uid[1:]})

    def state(self) -> dict[str, int]:
        return {"given": self._given}

    def restore(self, state: Mapping[str, int]) -> None:
        self._given = state["given"]

    def ended(self, group: GroupResult) -> None:
        """Every prompt is another one."""

    def figures(self) -> dict[str, float]:
        return {}


class _Recorder(Observer):
    """Keeps the metrics lines of a run."""

    def __init__(self, window_steps: int) -> None:
        self.lines: list[Line] = []
        self._metrics = StepMetrics(trigger_parameter_sync_step=window_steps, started_s=0.0)

    def step(self, record: StepRecord) -> None:
        self.lines.append(self._metrics.update(record))


class DeadlockError(RuntimeError):
    """Nothing is ready, no timer is left, and the work is not done."""


class _JumpingSelector(selectors.SelectSelector):
    """A selector that calls `wait(timeout)` instead of waiting."""

    def __init__(self, wait: Callable[[float | None], None]) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._wait(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer. Single-threaded: no sockets, executors or
    `call_soon_threadsafe`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self._wait))

    def time(self) -> float:
        return self._now_s

    def _wait(self, timeout: float | None) -> None:
        if timeout is None:
            raise DeadlockError(f"at {self._now_s:g} s nothing is scheduled and the work is not done")
        if timeout:
            self._now_s += timeout
            # in long runs the default, 1 ns, is below a float's resolution
            self._clock_resolution = math.ulp(self._now_s)


def run_virtual(
    work: Coroutine[Any, Any, T], *, loop_factory: Callable[[], VirtualTimeLoop] = VirtualTimeLoop
) -> T:
    """Run `work` to its end on a fresh virtual clock. Raises DeadlockError if it cannot end."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return runner.run(work)
        except DeadlockError:
            # The tasks that remain are cancelled, and again if a clean-up also waits forever.
            loop = runner.get_loop()
            for _ in range(MOST_CANCELS):
                if tasks := asyncio.all_tasks(loop):
                    for task in tasks:
                        task.cancel()
                    with suppress(DeadlockError):
                        loop.run_until_complete(asyncio.wait(tasks))
            raise
