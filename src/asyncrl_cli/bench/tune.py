"""`plan --tune`: settings measured on the virtual clock, in parallel, and what the best of them comes to.

    workload + profile -> Space -> search -> Tuned
                                     |
                                     +-> one simulated run per setting, each in a process of the pool

All settings see the same groups with the same lengths (they come from the seed), so that differences are the settings' own.
Everything here is SIMULATED, and says so where it is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.bench.children import simulators
from asyncrl_cli.bench.measure import Edges, figures_of, stretch_of
from asyncrl_cli.bench.search import FIGURES, LONG_RUNS, Evaluate, Found, Outcome, Row, front, planned_windows, search
from asyncrl_cli.bench.space import Setting, Space
from asyncrl_cli.errors import ConfigError
from asyncrl_cli.plan.cluster import counted, usable_cores
from asyncrl_cli.plan.job_plan import JobPlan, compile_job
from asyncrl_cli.profile.arithmetic import Schedule, staleness_bound
from asyncrl_cli.profile.loaded import set_layer
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.references import reference_sets
from asyncrl_cli.simulate.workload import Reference, Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import simulate, virtual_cluster

SCHEMA_VERSION = 1
SEED = 0
TRAJECTORIES = 450_000
"""Simulated in all long runs of a large workload: some 30 CPU seconds."""
FEWEST_LONG_WINDOWS, MOST_LONG_WINDOWS = 6, 24
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
    """A finished search from `profile` with the keys in `sets`. Times are seconds per `window_groups` groups, W of the workload's
    own window. `known`: what was measured, or published, of the current setting."""

    workload: Workload
    profile: str
    sets: tuple[str, ...]
    window_groups: int
    n: int
    found: Found
    known: Reference | None

    @property
    def bound(self) -> str:
        """In words."""
        return f"at most {counted(self.found.space.bound, 'version')} of staleness"

    @property
    def recommended_sets(self) -> tuple[str, ...]:
        """All that the recommended run is given: what the search was given, and above it what it found."""
        entries = (*self.sets, *self.found.best.setting.sets())
        return tuple({entry.partition("=")[0].strip(): entry for entry in entries}.values())

    @property
    def speedup(self) -> float | None:
        current = self.found.current
        return None if current is None else current.window_time_s / self.found.best.window_time_s

    def to_json(self) -> dict[str, Any]:
        found, known = self.found, self.known
        current, same_split, undominated = found.current, found.on_current_split, front(found.rows)
        return {
            "schema_version": SCHEMA_VERSION,
            "simulated": True,
            "workload": self.workload.name,
            "profile": self.profile,
            "max_staleness": found.space.bound,
            "window_groups": self.window_groups,
            "seed": SEED,
            "rows": [row.to_json() | {"is_on_front": row in undominated} for row in found.rows],
            "current": current and current.to_json(),
            "recommended": found.best.to_json() | {"sets": list(self.recommended_sets)},
            "recommended_on_current_split": same_split and same_split.to_json(),
            "speedup": self.speedup,
            "current_known": known and {"window_time_s": known.window_time_s, "source": known.source},
            "num_settings": len(found.outcomes),
            "num_trajectories": found.windows * self.window_groups * self.n,
            "failed": [{"sets": setting.sets(), "reason": reason} for setting, reason in found.failed.items()],
            "notes": self.workload.notes,
            "limits": list(LIMITS),
        }


def tune(
    workload: Workload, reference: str, sets: Sequence[str], *, gpus: int | None, bound: int | None, on_progress: Progress
) -> Tuned:
    """Search around the profile `reference` as the workload runs it; `bound` is S, by default the profile's own.

    Raises ConfigError where profile, workload and GPUs do not go together, AsyncrlError if no setting could be simulated.
    """
    base, profile, plan = starting_point(workload, reference, tuple(sets), gpus)
    space = Space.around(profile, plan, bound=staleness_bound(profile) if bound is None else bound)
    window_groups, n = Schedule.of(profile).window_groups, profile.rollout.n
    long_windows = min(max(TRAJECTORIES // (LONG_RUNS * window_groups * n), FEWEST_LONG_WINDOWS), MOST_LONG_WINDOWS)
    planned = planned_windows(space, long_windows)

    def profile_of(setting: Setting, windows: int) -> Profile:
        return profile_for(workload, reference, (*base, *setting.sets()), groups=windows * window_groups).profile

    with simulators(usable_cores()) as pool:
        evaluate = evaluator(pool, workload, window_groups, profile_of, lambda done: on_progress(done, planned))
        found = search(space, evaluate, long_windows)
    known = _known(workload, profile)
    return Tuned(workload=workload, profile=reference, sets=base, window_groups=window_groups, n=n, found=found, known=known)


def starting_point(
    workload: Workload, reference: str, sets: tuple[str, ...], gpus: int | None
) -> tuple[tuple[str, ...], Profile, JobPlan]:
    """The `--set`s that the search starts from, the profile that they make of `reference`, and its plan.

    Raises ConfigError if it has no split, bounds no staleness, or cannot use `gpus` GPUs.
    """
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
    if gpus is not None:
        sets = scaled_sets(workload.name, profile, sets, gpus)
        profile = profile_for(workload, reference, sets).profile
    plan = compile_job(profile, virtual_cluster(profile))
    if gpus not in (None, plan.gpus):
        raise ConfigError(
            f"--gpus {gpus}, but {' and '.join(SPLIT_KEYS)} come to {plan.gpus}",
            hint=f"--gpus {plan.gpus}, or leave the counts to the search",
        )
    return sets, profile, plan


def scaled_sets(workload_name: str, profile: Profile, sets: Sequence[str], gpus: int) -> tuple[str, ...]:
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
            f"--gpus {gpus}: there is no split of fewer than {1 + each}, for a trainer rank and a rollout worker of {each}",
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
        running = [pool.submit(_figures, profile, workload, window_groups) for profile in profiles]
        for _ in as_completed(running):
            done_windows += windows
            on_windows(done_windows)
        made = zip(settings, (future.result() for future in running), strict=True)
        return [found if isinstance(found, str) else Row(setting=setting, windows=windows, **found) for setting, found in made]

    return evaluate


def _figures(profile: Profile, workload: Workload, window_groups: int) -> dict[str, float] | str:
    """One simulated run, in a process of the pool. Measured are the same groups whatever the setting's own windows."""
    run = simulate(profile, workload, seed=SEED)
    if run.error is not None:
        return str(run.error)
    groups = int(run.lines[-1]["groups_trained"])
    figures = figures_of(stretch_of(run.lines, Edges(window_groups, groups - window_groups)), window_groups)
    return {name: figures.get(name, 0.0) for name in FIGURES}
