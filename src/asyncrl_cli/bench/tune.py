"""`plan --tune`: settings measured on the virtual clock, in parallel, and what the best of them comes to.

    workload + profile -> space_of -> search -> Tuned
                                        |
                                        +-> evaluate: one simulated run per setting, each in a process of the pool

All settings see the same groups with the same lengths (they come from the seed), so that differences are the settings' own.
Everything here is SIMULATED, and says so where it is printed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from asyncrl_cli.bench.measure import figures_of
from asyncrl_cli.bench.pareto import Measured, Row, front, recommended
from asyncrl_cli.bench.search import Effort, Evaluate, Found, search
from asyncrl_cli.bench.settings import Setting, space_of
from asyncrl_cli.errors import AsyncrlError, ConfigError
from asyncrl_cli.job.cluster import usable_cores
from asyncrl_cli.job.plan import compile_job
from asyncrl_cli.profile.arithmetic import Schedule, staleness_bound
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workloads import profile_for
from asyncrl_cli.simulate.world import simulate, virtual_cluster

SCHEMA_VERSION = 1
TRAJECTORIES = 850_000
"""Effort of one search of a large workload: some 100 CPU seconds."""
MOST_WINDOWS = 1_200
DEFAULT_PROFILE = "partial-rollout"
LIMITS = (
    "what staleness does to the accuracy of the trained model is not simulated: a faster row is better only if it learns as well",
    "memory is not simulated: slots are at most those the workload was measured with; "
    "`asyncrl plan --profile P` estimates what a split needs",
)
"""What no search on a clock can know."""

Progress = Callable[[int, int], None]
"""Called with (windows simulated so far, windows planned)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One simulated run. Picklable: it goes to a process of the pool."""

    workload: Workload
    profile: str
    sets: tuple[str, ...]
    groups: int
    window_groups: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A finished search. Times are seconds per `window_groups` groups, W of the workload's own window."""

    workload: Workload
    profile: str
    window_groups: int
    n: int
    bound: int
    seed: int
    found: Found
    best: Row

    @property
    def front(self) -> list[Row]:
        return front(self.found.rows)

    @property
    def speedup(self) -> float | None:
        current = self.found.current
        return None if current is None else current.measured.window_time_s / self.best.measured.window_time_s

    def to_json(self) -> dict[str, Any]:
        current = self.found.current
        undominated = self.front
        return {
            "schema_version": SCHEMA_VERSION,
            "simulated": True,
            "workload": self.workload.name,
            "profile": self.profile,
            "max_staleness": self.bound,
            "window_groups": self.window_groups,
            "seed": self.seed,
            "rows": [self._row(row) | {"is_on_front": row in undominated} for row in self.found.rows],
            "current": None if current is None else self._row(current),
            "recommended": self._row(self.best),
            "speedup": self.speedup,
            "num_settings": self.found.num_settings,
            "num_trajectories": self.found.windows * self.window_groups * self.n,
            "failed": [setting.sets() for setting in self.found.failed],
            "notes": self.workload.notes,
            "limits": list(LIMITS),
        }

    def _row(self, row: Row) -> dict[str, Any]:
        setting, measured = row.setting, row.measured
        return {
            "split": setting.split,
            "trainer_workers": setting.trainer_workers,
            "rollout_workers": setting.rollout_workers,
            "trigger_parameter_sync_step": setting.window_steps,
            "require_batches": setting.require_batches,
            "staleness_threshold": float(setting.eta),
            "max_staleness": setting.max_staleness,
            "partial_rollout": setting.partial_rollout,
            "slots": setting.slots,
            "window_time_s": measured.window_time_s,
            "staleness_mean": measured.staleness_mean,
            "staleness_max": measured.staleness_max,
            "trainer_idle_ratio": measured.trainer_idle_ratio,
            "rollouter_idle_ratio": measured.rollouter_idle_ratio,
            "sets": setting.sets(),
        }


def tune(
    workload: Workload,
    profile_reference: str,
    sets: Sequence[str] = (),
    *,
    gpus: int | None = None,
    bound: int | None = None,
    seed: int = 0,
    trajectories: int | None = None,
    processes: int | None = None,
    on_progress: Progress = lambda done, planned: None,
) -> Tuned:
    """Search around the profile as the workload runs it; `bound` is S, by default the profile's own; `trajectories` is the effort.

    Raises ConfigError where profile, workload and GPUs do not go together, AsyncrlError if no setting could be simulated.
    """
    base = [*sets, *([] if gpus is None else [f"placement.gpus={gpus}"])]
    profile = _profile(workload, profile_reference, base)
    space = space_of(
        profile, compile_job(profile, virtual_cluster(profile)), bound=staleness_bound(profile) if bound is None else bound
    )
    window_groups = Schedule.of(profile).window_groups
    effort = Effort(windows=min((trajectories or TRAJECTORIES) // (window_groups * profile.rollout.n), MOST_WINDOWS))
    request = Request(
        workload=workload, profile=profile_reference, sets=tuple(base), groups=0, window_groups=window_groups, seed=seed
    )
    with _pool(processes or usable_cores()) as pool:
        found = search(space, evaluator(pool, request, effort.planned_windows, on_progress), effort)
    if not found.rows:
        raise AsyncrlError(
            f"no setting of {workload.name} with at most {space.bound} versions of staleness could be simulated",
            hint=f"asyncrl bench --compare colocate --simulate {workload.name} shows why",
        )
    return Tuned(
        workload=workload,
        profile=profile_reference,
        window_groups=window_groups,
        n=profile.rollout.n,
        bound=space.bound,
        seed=seed,
        found=found,
        best=recommended(found.rows),
    )


def evaluator(pool: ProcessPoolExecutor, request: Request, planned_windows: int, on_progress: Progress) -> Evaluate:
    """Runs of one call go on side by side; their results keep the settings' order."""
    done_windows = 0

    def evaluate(settings: Sequence[Setting], windows: int) -> list[Measured | None]:
        nonlocal done_windows
        asked: list[Future[Measured | None]] = [pool.submit(measure, run) for run in _requests(request, settings, windows)]
        for _ in as_completed(asked):
            done_windows += windows
            on_progress(done_windows, planned_windows)
        return [future.result() for future in asked]

    return evaluate


def measure(request: Request) -> Measured | None:
    """One simulated run, in a process of the pool; None if it failed."""
    profile = _profile(request.workload, request.profile, request.sets, groups=request.groups)
    run = simulate(profile, request.workload, seed=request.seed)
    if run.error is not None:
        return None
    figures = figures_of(settled(run.lines, request.window_groups), window_groups=request.window_groups)
    return Measured(
        window_time_s=figures["window_time_s"],
        staleness_mean=figures.get("staleness_mean", 0.0),
        staleness_max=figures.get("staleness_max", 0.0),
        trainer_idle_ratio=figures["trainer_idle_ratio"],
        rollouter_idle_ratio=figures["rollouter_idle_ratio"],
    )


def settled(lines: Sequence[dict[str, Any]], window_groups: int) -> list[dict[str, Any]]:
    """From the window on that ends the first W groups: short windows are measured no earlier than long ones."""
    first = next(line["window"] for line in lines if line["groups_trained"] >= window_groups)
    return [line for line in lines if line["window"] >= first]


def _profile(workload: Workload, reference: str, sets: Sequence[str], groups: int | None = None) -> Profile:
    profile = profile_for(workload, reference, sets, groups=groups).profile
    if profile.placement.colocate:
        raise ConfigError(
            f"{reference} is colocated: trainer and rollout share all GPUs, so there is no split to tune",
            hint=f"--profile {DEFAULT_PROFILE}",
        )
    return profile


def _requests(request: Request, settings: Sequence[Setting], windows: int) -> Iterator[Request]:
    for setting in settings:
        yield replace(request, sets=(*request.sets, *setting.sets()), groups=windows * request.window_groups)


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes: the command's own has threads (its progress bar). An interrupt drops what has not begun."""
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
