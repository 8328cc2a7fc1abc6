"""`plan --tune`: settings measured on the virtual clock, in parallel, and what the best of them comes to.

    workload + profile -> space_of -> search -> Tuned
                                        |
                                        +-> evaluate: one simulated run per setting, each in a process of the pool

All settings see the same groups with the same lengths (they come from the seed), so that differences are the settings' own.
Everything here is SIMULATED, and says so where it is printed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import asdict, dataclass, fields
from typing import Any

from asyncrl_cli.bench.measure import Edges, figures_of
from asyncrl_cli.bench.pool import simulators
from asyncrl_cli.bench.real import terminating_as_interrupt
from asyncrl_cli.bench.search import Evaluate, Found, Measured, Outcome, Row, front, planned_windows, search
from asyncrl_cli.bench.space import Setting, space_of
from asyncrl_cli.errors import ConfigError
from asyncrl_cli.job.stopping import blocked
from asyncrl_cli.plan.cluster import counted, usable_cores
from asyncrl_cli.plan.job_plan import JobPlan, compile_job
from asyncrl_cli.profile.arithmetic import Schedule, staleness_bound
from asyncrl_cli.profile.layers import set_layer
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.references import reference_sets
from asyncrl_cli.simulate.workload import Reference, Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import simulate, virtual_cluster

SCHEMA_VERSION = 1
SEED = 0
TRAJECTORIES = 2_000_000
"""Effort of one search of a large workload: some 130 CPU seconds."""
MOST_WINDOWS = 1_200
DEFAULT_PROFILE = "partial-rollout"
SPLIT_KEYS = ("placement.trainer_workers", "rollout.workers")
LIMITS = (
    "what staleness does to the accuracy of the trained model is not simulated: a faster row is better only if it learns as well",
    "memory is not simulated: slots are at most those the workload was measured with; "
    "`asyncrl plan --profile P` estimates what a split needs",
)
"""What no search on a clock can know."""

Progress = Callable[[int, int], None]
"""Called with (windows simulated so far, windows planned)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A finished search. Times are seconds per `window_groups` groups, W of the workload's own window; `known` is what was
    measured, or published, of the current setting."""

    workload: Workload
    profile: str
    sets: tuple[str, ...]
    window_groups: int
    n: int
    bound: int
    found: Found
    known: Reference | None

    @property
    def recommended_sets(self) -> tuple[str, ...]:
        """All that the recommended run is given: what the search was given, and above it what it found."""
        entries = (*self.sets, *self.found.best.setting.sets())
        return tuple({entry.partition("=")[0].strip(): entry for entry in entries}.values())

    @property
    def front(self) -> list[Row]:
        return front(self.found.rows)

    @property
    def speedup(self) -> float | None:
        current = self.found.current
        return None if current is None else current.measured.window_time_s / self.found.best.measured.window_time_s

    def to_json(self) -> dict[str, Any]:
        current, same_split, known = self.found.current, self.found.on_current_split, self.known
        undominated = self.front
        return {
            "schema_version": SCHEMA_VERSION,
            "simulated": True,
            "workload": self.workload.name,
            "profile": self.profile,
            "max_staleness": self.bound,
            "window_groups": self.window_groups,
            "seed": SEED,
            "rows": [_row_json(row) | {"is_on_front": row in undominated} for row in self.found.rows],
            "current": current and _row_json(current),
            "recommended": _row_json(self.found.best) | {"sets": list(self.recommended_sets)},
            "recommended_on_current_split": same_split and _row_json(same_split),
            "speedup": self.speedup,
            "current_known": known and {"window_time_s": known.window_time_s, "source": known.source},
            "num_settings": self.found.num_settings,
            "num_trajectories": self.found.windows * self.window_groups * self.n,
            "failed": [{"sets": setting.sets(), "reason": reason} for setting, reason in self.found.failed],
            "notes": self.workload.notes,
            "limits": list(LIMITS),
        }


def _row_json(row: Row) -> dict[str, Any]:
    return row.setting.to_json() | asdict(row.measured) | {"is_long": row.is_long}


def tune(
    workload: Workload, reference: str, sets: Sequence[str], *, gpus: int | None, bound: int | None, on_progress: Progress
) -> Tuned:
    """Search around the profile `reference` as the workload runs it; `bound` is S, by default the profile's own.

    Raises ConfigError where profile, workload and GPUs do not go together, AsyncrlError if no setting could be simulated.
    """
    base, profile, plan = _starting_point(workload, reference, tuple(sets), gpus)
    space = space_of(profile, plan, bound=staleness_bound(profile) if bound is None else bound)
    window_groups, n = Schedule.of(profile).window_groups, profile.rollout.n
    effort = min(TRAJECTORIES // (window_groups * n), MOST_WINDOWS)
    planned = planned_windows(space, effort)

    def profile_of(setting: Setting, windows: int) -> Profile:
        return profile_for(workload, reference, (*base, *setting.sets()), groups=windows * window_groups).profile

    with terminating_as_interrupt(), simulators(usable_cores()) as pool:
        evaluate = evaluator(pool, workload, window_groups, profile_of, lambda done: on_progress(done, max(planned, done)))
        found = search(space, evaluate, effort)
    return Tuned(
        workload=workload,
        profile=reference,
        sets=base,
        window_groups=window_groups,
        n=n,
        bound=space.bound,
        found=found,
        known=_known(workload, profile),
    )


def _starting_point(
    workload: Workload, reference: str, sets: tuple[str, ...], gpus: int | None
) -> tuple[tuple[str, ...], Profile, JobPlan]:
    """The `--set`s that the search starts from, the profile that they make, and its plan."""
    profile = tunable_profile(workload, reference, sets)
    if gpus is not None:
        sets = starting_sets(workload.name, profile, sets, gpus)
        profile = tunable_profile(workload, reference, sets)
    plan = compile_job(profile, virtual_cluster(profile))
    if gpus is not None:
        check_gpus(gpus, plan.gpus)
    return sets, profile, plan


def tunable_profile(workload: Workload, reference: str, sets: Sequence[str]) -> Profile:
    """As the workload runs it. Raises ConfigError if it has no split, or bounds no staleness."""
    profile = profile_for(workload, reference, sets).profile
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


def starting_sets(workload_name: str, profile: Profile, sets: Sequence[str], gpus: int) -> tuple[str, ...]:
    """The `--set`s of a search on `gpus` GPUs: the profile's own split in proportion, or the counts that the user set.

    Raises ConfigError for a workload on CPUs, and for too few GPUs to split.
    """
    each = profile.placement.gpus_per_rollout_worker
    if profile.placement.device == "cpu":
        raise ConfigError(
            f"{workload_name} runs on CPUs, where --gpus {gpus} means nothing",
            hint="leave --gpus out; --set placement.trainer_workers=2 --set rollout.workers=2 gives it more processes",
        )
    if gpus < 1 + each:
        own = profile.placement.gpus
        raise ConfigError(
            f"--gpus {gpus}: a trainer rank and a rollout worker of {counted(each, 'GPU')} need {1 + each}, so there is no split "
            "to search for",
            hint=f"--gpus {1 + each} or more, or no --gpus: then it is "
            + ("what the profile says" if own is None else f"the workload's own {own}"),
        )
    base = (*sets, f"placement.gpus={gpus}")
    if set_layer(sets).values.keys() & set(SPLIT_KEYS):
        return base
    left, right = (int(part) for part in profile.placement.ratio.split(":"))
    if profile.placement.trainer_workers is not None and profile.rollout.workers is not None:
        left, right = profile.placement.trainer_workers, profile.rollout.workers * each
    ranks = min(max(round(gpus * left / (left + right)), 1), gpus - each)
    ranks += (gpus - ranks) % each
    return (*base, f"placement.trainer_workers={ranks}", f"rollout.workers={(gpus - ranks) // each}")


def check_gpus(gpus: int, found: int) -> None:
    """Counts that the user set may come to fewer GPUs than `--gpus` says."""
    if found != gpus:
        raise ConfigError(
            f"--gpus {gpus}, but {' and '.join(SPLIT_KEYS)} come to {found}",
            hint=f"--gpus {found}, or leave the counts to the search",
        )


def _known(workload: Workload, profile: Profile) -> Reference | None:
    """The workload's reference row of this very profile, if it has one."""
    own = profile.model_dump(exclude={"run"})
    for row in workload.references:
        of_row = profile_for(workload, row.profile, reference_sets(row), groups=1).profile
        if of_row.model_dump(exclude={"run"}) == own:
            return row
    return None


def evaluator(
    pool: Executor,
    workload: Workload,
    window_groups: int,
    profile_of: Callable[[Setting, int], Profile],
    on_windows: Callable[[int], None],
) -> Evaluate:
    """Runs of one call go on side by side; their results keep the settings' order. `on_windows(simulated so far)`."""
    done_windows = 0

    def evaluate(settings: Sequence[Setting], windows: int) -> list[Outcome]:
        nonlocal done_windows
        profiles = [profile_of(setting, windows) for setting in settings]
        with blocked(signal.SIGINT):
            running = [pool.submit(measure, profile, workload, window_groups) for profile in profiles]
        for _ in as_completed(running):
            done_windows += windows
            on_windows(done_windows)
        return [future.result() for future in running]

    return evaluate


def measure(profile: Profile, workload: Workload, window_groups: int) -> Outcome:
    """One simulated run, in a process of the pool. Measured are the same groups whatever the setting's own windows."""
    run = simulate(profile, workload, seed=SEED)
    if run.error is not None:
        return str(run.error)
    groups = int(run.lines[-1]["groups_trained"])
    edges = Edges(begin_groups=window_groups, end_groups=groups - window_groups)
    figures = figures_of(run.lines, window_groups=window_groups, edges=edges)
    return Measured(**{field.name: figures.get(field.name, 0.0) for field in fields(Measured)})
