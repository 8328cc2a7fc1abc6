"""`plan --tune`: settings measured on the virtual clock, in parallel, and what the best of them comes to.

    workload + profile -> space_of -> search -> Tuned
                                        |
                                        +-> evaluate: one simulated run per setting, each in a process of the pool

All settings see the same groups with the same lengths (they come from the seed), so that differences are the settings' own.
Everything here is SIMULATED, and says so where it is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass, replace
from typing import Any

from asyncrl_cli.bench.measure import Edges, figures_of
from asyncrl_cli.bench.pareto import Failed, Measured, Row, front, recommended
from asyncrl_cli.bench.pool import interrupts_later, simulators
from asyncrl_cli.bench.real import terminating_as_interrupt
from asyncrl_cli.bench.search import Effort, Evaluate, Found, search
from asyncrl_cli.bench.settings import Setting, on_split_of, space_of
from asyncrl_cli.bench.tune_start import check_gpus, starting_sets
from asyncrl_cli.errors import AsyncrlError, ConfigError
from asyncrl_cli.plan.cluster import usable_cores
from asyncrl_cli.plan.job_plan import compile_job
from asyncrl_cli.profile.arithmetic import Schedule, staleness_bound
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.references import reference_sets
from asyncrl_cli.simulate.workload import Reference, Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import simulate, virtual_cluster

SCHEMA_VERSION = 1
TRAJECTORIES = 2_000_000
"""Effort of one search of a large workload: some 130 CPU seconds."""
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
    sets: tuple[str, ...]
    window_groups: int
    n: int
    bound: int
    seed: int
    found: Found
    best: Row
    known: Reference | None = None
    """What was measured, or published, of the current setting."""

    @property
    def recommended_sets(self) -> tuple[str, ...]:
        """All that the recommended run is given: what the search was given, and above it what it found."""
        entries = (*self.sets, *self.best.setting.sets())
        return tuple({entry.partition("=")[0].strip(): entry for entry in entries}.values())

    @property
    def front(self) -> list[Row]:
        return front(self.found.rows)

    @property
    def speedup(self) -> float | None:
        current = self.found.current
        return None if current is None else current.measured.window_time_s / self.best.measured.window_time_s

    @property
    def on_current_split(self) -> Row | None:
        """The recommended setting in all but the split: what it is faster by is the doing of its windows, eta and slots."""
        current = self.found.current
        if current is None or self.best.setting.split == current.setting.split:
            return None
        setting = on_split_of(current.setting, self.best.setting)
        return next((row for row in self.found.long_rows if row.setting == setting), None)

    def to_json(self) -> dict[str, Any]:
        current, same_split = self.found.current, self.on_current_split
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
            "recommended": self._row(self.best) | {"sets": list(self.recommended_sets)},
            "recommended_on_current_split": None if same_split is None else self._row(same_split),
            "speedup": self.speedup,
            "current_known": None
            if self.known is None
            else {"window_time_s": self.known.window_time_s, "source": self.known.source},
            "num_settings": self.found.num_settings,
            "num_trajectories": self.found.windows * self.window_groups * self.n,
            "failed": [{"sets": setting.sets(), "reason": reason} for setting, reason in self.found.failed],
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
            "is_long": row.is_long,
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
    profile = _profile(workload, profile_reference, sets)
    base = tuple(sets) if gpus is None else starting_sets(workload.name, profile, sets, gpus)
    profile = _profile(workload, profile_reference, base)
    plan = compile_job(profile, virtual_cluster(profile))
    if gpus is not None:
        check_gpus(gpus, plan.gpus)
    space = space_of(profile, plan, bound=staleness_bound(profile) if bound is None else bound)
    window_groups = Schedule.of(profile).window_groups
    effort = Effort(windows=min((trajectories or TRAJECTORIES) // (window_groups * profile.rollout.n), MOST_WINDOWS))
    request = Request(workload=workload, profile=profile_reference, sets=base, groups=0, window_groups=window_groups, seed=seed)
    with terminating_as_interrupt(), simulators(processes or usable_cores()) as pool:
        found = search(space, evaluator(pool, request, effort.planned_windows, on_progress), effort)
    if not found.long_rows:
        raise _nothing_found(found, request, space.bound)
    return Tuned(
        workload=workload,
        profile=profile_reference,
        sets=base,
        window_groups=window_groups,
        n=profile.rollout.n,
        bound=space.bound,
        seed=seed,
        found=found,
        best=recommended(found.long_rows),
        known=_known(workload, profile),
    )


def _known(workload: Workload, profile: Profile) -> Reference | None:
    """The workload's reference row of this very profile, if it has one."""
    own = profile.model_dump(exclude={"run"})
    for row in workload.references:
        of_row = profile_for(workload, row.profile, reference_sets(row), groups=1).profile
        if of_row.model_dump(exclude={"run"}) == own:
            return row
    return None


def _nothing_found(found: Found, request: Request, bound: int) -> AsyncrlError:
    reasons = "; ".join(dict.fromkeys(reason for _, reason in found.failed))
    return AsyncrlError(
        f"no setting of {request.workload.name} with at most {bound} versions of staleness could be simulated: {reasons}",
        hint=f"asyncrl bench --compare {request.profile} --simulate {request.workload.name} runs the current setting",
    )


def evaluator(pool: Executor, request: Request, planned_windows: int, on_progress: Progress) -> Evaluate:
    """Runs of one call go on side by side; their results keep the settings' order."""
    done_windows = 0

    def evaluate(settings: Sequence[Setting], windows: int) -> list[Measured | Failed]:
        nonlocal done_windows
        with interrupts_later():
            asked: list[Future[Measured | Failed]] = [pool.submit(measure, run) for run in _requests(request, settings, windows)]
        for _ in as_completed(asked):
            done_windows += windows
            on_progress(done_windows, max(planned_windows, done_windows))
        return [future.result() for future in asked]

    return evaluate


def measure(request: Request) -> Measured | Failed:
    """One simulated run, in a process of the pool. Measured are the same groups whatever the setting's own windows."""
    profile = _profile(request.workload, request.profile, request.sets, groups=request.groups)
    run = simulate(profile, request.workload, seed=request.seed)
    if run.error is not None:
        return Failed(reason=str(run.error))
    edges = Edges(begin_groups=request.window_groups, end_groups=request.groups - request.window_groups)
    figures = figures_of(run.lines, window_groups=request.window_groups, edges=edges)
    return Measured(
        window_time_s=figures["window_time_s"],
        staleness_mean=figures.get("staleness_mean", 0.0),
        staleness_max=figures.get("staleness_max", 0.0),
        trainer_idle_ratio=figures["trainer_idle_ratio"],
        rollouter_idle_ratio=figures["rollouter_idle_ratio"],
    )


def _profile(workload: Workload, reference: str, sets: Sequence[str], groups: int | None = None) -> Profile:
    profile = profile_for(workload, reference, sets, groups=groups).profile
    if profile.placement.colocate:
        raise ConfigError(
            f"{reference} is colocated: trainer and rollout share all GPUs, so there is no split to tune",
            hint=f"--profile {DEFAULT_PROFILE}",
        )
    if (on_stale := profile.async_training.on_stale) != "wait":
        raise ConfigError(
            f'async_training.on_stale = "{on_stale}" bounds no staleness, and a search needs a bound',
            hint="--set async_training.on_stale=wait",
        )
    return profile


def _requests(request: Request, settings: Sequence[Setting], windows: int) -> Iterator[Request]:
    for setting in settings:
        yield replace(request, sets=(*request.sets, *setting.sets()), groups=windows * request.window_groups)
