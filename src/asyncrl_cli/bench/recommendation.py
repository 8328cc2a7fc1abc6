"""Recommends a setting: simulates many in parallel on the virtual clock, and names the best.

    workload + profile -> Space -> search -> TuneResult -> what is printed, and a profile for `train
                                     |                      --profile` or one side of `bench`
                                     +-> one simulated run per setting, each in a process of the pool

All settings get the same groups with the same lengths (both follow from the seed), so that differences come
from the settings. All results are SIMULATED, and whatever prints them says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from asyncrl_cli.base.errors import AsyncrlError, ConfigError, counted
from asyncrl_cli.base.paths import expand
from asyncrl_cli.bench.search import (
    FIGURES,
    LONG_RUNS,
    Evaluate,
    Outcome,
    Row,
    SearchResult,
    front,
    planned_windows,
    search,
)
from asyncrl_cli.bench.simulated_runs import inner_figures, simulators
from asyncrl_cli.bench.space import RANKS_KEY, WORKERS_KEY, Setting, Space, split_sets
from asyncrl_cli.checkpoint.lookup import whole_name
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import TRAINER, JobPlan
from asyncrl_cli.profile.arithmetic import (
    ROLLOUT,
    TRAIN,
    share_of,
    staleness_bound,
    tasks_apart,
    window_groups_of,
)
from asyncrl_cli.profile.loaded import set_layer
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.calibration import calibrate
from asyncrl_cli.simulate.workload import Reference, Workload
from asyncrl_cli.simulate.workload_files import (
    WINDOW,
    Residual,
    load_workload,
    profile_for,
    reference_sets,
    residuals,
)
from asyncrl_cli.simulate.world import virtual_cluster

SCHEMA_VERSION = 1
SEED = 0
DEFAULT_PROFILE = "partial-rollout"
TRAJECTORIES = 450_000
"""How many all long runs together simulate of a large workload: some 30 CPU seconds."""
FEWEST_LONG_WINDOWS, MOST_LONG_WINDOWS = 6, 24
LIMITS = (
    "what staleness does to the accuracy of the trained model is not simulated: a faster row is better only "
    "if it learns as well",
    "memory is not simulated, but for a KV cache whose size the workload knows: slots are at most those it "
    "was measured with; `asyncrl plan --profile P` estimates what a split needs",
)
"""What this search does not know, as told to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """A search as its user asked for it. `reference` is a workload, or a run that has been measured here;
    `bound` is S, by default the profile's own."""

    reference: str
    runs_dir: Path
    profile: str | None = None
    sets: tuple[str, ...] = ()
    gpus: int | None = None
    bound: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """A finished search from `profile` with the keys in `sets`. `known`: the measured or published time of
    the current setting, if there is one. `fit`: how well the simulation reproduces the run that the workload
    was calibrated on; empty for any other one."""

    workload: Workload
    profile: str
    sets: tuple[str, ...]
    found: SearchResult
    known: Reference | None
    fit: Sequence[Residual]

    @property
    def window_groups(self) -> int:
        """W of the profile that was tuned: times are seconds per so many groups, whatever a setting's own
        window is."""
        return window_groups_of(self.found.space.profile)

    @property
    def bound(self) -> str:
        """The staleness bound in words."""
        return f"at most {counted(self.found.space.bound, 'version')} of staleness"

    @property
    def error(self) -> float | None:
        """How far the simulation is off, as a share of the measured window of the current setting: by the
        whole window or, if that is more, by its worst part (errors of parts may cancel in the window, and
        need not in another setting). None: nothing was measured."""
        whole = next((one for one in self.fit if one.part == WINDOW), None)
        if whole is not None:
            return max(abs(one.predicted_s - one.measured_s) for one in self.fit) / whole.measured_s
        if self.known is None or self.found.current is None:
            return None
        return abs(self.found.current.window_time_s / self.known.window_time_s - 1)

    @property
    def recommended_sets(self) -> list[str]:
        """All `--set`s of the recommended run: those given to the search, overridden by those it found."""
        entries = (*self.sets, *self.found.best.setting.sets)
        return list({entry.partition("=")[0].strip(): entry for entry in entries}.values())

    def to_json(self) -> dict[str, object]:
        found, known, undominated = self.found, self.known, front(self.found.rows)
        rows = {
            "current": found.current,
            "recommended_on_current_split": found.on_current_split,
            "recommended_without_bound": found.without_bound,
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "simulated": True,
            "workload": self.workload.name,
            "profile": self.profile,
            "max_staleness": found.space.bound,
            "window_groups": self.window_groups,
            "seed": SEED,
            "rows": [row.to_json() | {"is_on_front": row in undominated} for row in found.rows],
            "recommended": found.best.to_json() | {"sets": self.recommended_sets},
            **{name: row and row.to_json() for name, row in rows.items()},
            "speedup": found.speedup,
            "error": self.error,
            "current_known": known and {"window_time_s": known.window_time_s, "source": known.source},
            "num_settings": len(found.outcomes),
            "num_trajectories": found.windows * self.window_groups * found.space.profile.rollout.n,
            "failed": [{"sets": setting.sets, "reason": reason} for setting, reason in found.failed.items()],
            "notes": self.workload.notes,
            "limits": list(LIMITS),
            "residuals": [asdict(residual) for residual in self.fit],
        }


def tune(asked: TuneRequest, progress: Callable[..., None]) -> TuneResult:
    """Search as asked. `progress(text, windows simulated so far, windows planned)`.

    Raises ConfigError if profile, workload and GPUs do not fit together, AsyncrlError if no setting could be
    simulated.
    """
    workload, run_profile = workload_of(asked, progress)
    rows = workload.references if run_profile else ()
    fit = [residual for row in rows for residual in residuals(workload, row)]
    reference = asked.profile or run_profile or DEFAULT_PROFILE
    sets, profile, plan = starting_point(workload, reference, asked.sets, asked.gpus)
    bound = staleness_bound(profile) if asked.bound is None else asked.bound
    space, window_groups = Space.around(profile, plan, bound=bound), window_groups_of(profile)
    trajectories = LONG_RUNS * window_groups * profile.rollout.n
    long_windows = min(max(TRAJECTORIES // trajectories, FEWEST_LONG_WINDOWS), MOST_LONG_WINDOWS)
    planned = planned_windows(space, long_windows)
    with simulators() as pool:
        evaluate = evaluator(pool, workload, reference, sets, window_groups)
        found = search(
            space, evaluate, long_windows, lambda done: progress("SIMULATED: windows, at most", done, planned)
        )
    progress(f"SIMULATED: {len(found.outcomes)} settings tried in {found.windows} windows")
    known = None
    for row in workload.references:  # the row of this very profile, but for the length of its run
        other = profile_for(workload, row.profile, reference_sets(row)).profile
        if other.model_dump(exclude={"run"}) == profile.model_dump(exclude={"run"}):
            known = row
            break
    return TuneResult(workload=workload, profile=reference, sets=sets, found=found, known=known, fit=fit)


def evaluator(
    pool: Executor, workload: Workload, reference: str, sets: Sequence[str], window_groups: int
) -> Evaluate:
    """The search's `Evaluate`, in parallel."""
    simulated = partial(_simulated, workload, reference, sets, window_groups)
    return lambda settings, windows: pool.map(partial(simulated, windows), settings)


def _simulated(
    workload: Workload,
    reference: str,
    sets: Sequence[str],
    window_groups: int,
    windows: int,
    setting: Setting,
) -> Outcome:
    """One simulated run. The same groups are measured whatever the setting's own windows are."""
    try:
        profile = profile_for(workload, reference, (*sets, *setting.sets)).profile
        figures = inner_figures(profile, workload, windows, window_groups, seed=SEED)
    except AsyncrlError as error:
        return error.message
    return Row(setting=setting, windows=windows, **{name: figures.get(name, 0.0) for name in FIGURES})


def workload_of(asked: TuneRequest, progress: Callable[..., None]) -> tuple[Workload, str | None]:
    """The workload that WORKLOAD|RUN names. For a run (a name, `last` or a directory) it is calibrated; the
    second value is its profile."""
    run = whole_name(asked.reference, asked.runs_dir)
    for directory in (expand(run), asked.runs_dir / run):
        profile = directory / "profile.toml"
        if profile.is_file() and (directory / "metrics.jsonl").is_file():
            progress(f"calibrating a workload from {directory}")
            return calibrate(directory), str(profile)
    try:
        return load_workload(asked.reference), None
    except ConfigError as error:
        message = f"{error}; nor is there a finished run of that name in {asked.runs_dir}"
        raise ConfigError(message, hint=error.hint) from None


def starting_point(
    workload: Workload, reference: str, sets: tuple[str, ...], gpus: int | None
) -> tuple[tuple[str, ...], Profile, JobPlan]:
    """The `--set`s that the search starts from, the profile that they make of `reference`, and its plan.

    Raises ConfigError if it has no split, bounds no staleness, or cannot use `gpus` GPUs.
    """
    profile = profile_for(workload, reference, sets).profile
    if profile.placement.colocate:
        what = f"{reference} is colocated: trainer and rollout share all GPUs, so there is no split to tune"
        raise ConfigError(what, hint=f"--profile {DEFAULT_PROFILE}")
    if (on_stale := profile.async_training.on_stale) != "wait":
        what = f'async_training.on_stale = "{on_stale}" bounds no staleness, and a search needs a bound'
        raise ConfigError(what, hint="--set async_training.on_stale=wait")
    if gpus is not None:
        sets = scaled_sets(workload.name, profile, sets, gpus)
        profile = profile_for(workload, reference, sets).profile
    plan = compile_job(profile, virtual_cluster(profile))
    if gpus not in (None, plan.gpus):
        what = f"--gpus {gpus}, but {RANKS_KEY} and {WORKERS_KEY} come to {plan.gpus}"
        raise ConfigError(what, hint=f"--gpus {plan.gpus}, or leave the counts to the search")
    return sets, profile, plan


def scaled_sets(workload_name: str, profile: Profile, sets: Sequence[str], gpus: int) -> tuple[str, ...]:
    """The `--set`s for `gpus` GPUs: the profile's own split in proportion, or the counts that the user set.

    Raises ConfigError for a workload on CPUs, and for GPUs that cannot be split.
    """
    placement, scorers = profile.placement, tasks_apart(profile)
    if placement.device == "cpu":
        hint = f"--set {RANKS_KEY}=2 --set {WORKERS_KEY}=2 gives it more processes"
        what = f"{workload_name} runs on CPUs, where {counted(gpus, 'GPU')} mean nothing"
        raise ConfigError(what, hint=hint)
    counts = {RANKS_KEY: placement.trainer_workers, WORKERS_KEY: profile.rollout.workers}
    if placement.colocate:  # as many of each as there are GPUs
        return (*sets, f"placement.gpus={gpus}", *(f"{key}={gpus}" for key in counts if counts[key]))
    is_given = set_layer(sets).values.keys() & counts.keys()
    # the plan refuses scorers without a list of tasks
    if is_given or (scorers and placement.tasks is None):
        return (*sets, f"placement.gpus={gpus}")
    # The profile's proportion: shares of tasks go before counts, and these before the ratio.
    each, sharing = placement.gpus_per_rollout_worker, profile.trainer.sequence_parallel_size
    left, right = map(int, placement.ratio.split(":"))
    if placement.trainer_workers is not None and profile.rollout.workers is not None:
        left, right = placement.trainer_workers, profile.rollout.workers * each
    left, right = share_of(profile, TRAIN) or left, share_of(profile, ROLLOUT) or right
    total = sum(placement.ratios or (gpus,))
    scorer_gpus = {task: max(1, round(gpus * (share_of(profile, task) or 1) / total)) for task in scorers}
    sides = gpus - sum(scorer_gpus.values())

    def rank_counts(sides: int) -> list[int]:
        return [ranks for ranks in range(sharing, sides, sharing) if (sides - ranks) % each == 0]

    if not (possible := rank_counts(sides)):
        fitting = next((fewer for fewer in range(sides - 1, 0, -1) if rank_counts(fewer)), sharing + each)
        beside = "".join(f" beside {task}" for task in scorers)
        default = f"the workload's own {placement.gpus}" if placement.gpus else "what the profile says"
        what = f"{counted(gpus, 'GPU')}: there is no split of {max(sides, 0)} for trainer and rollout{beside}"
        why = f"ranks come in multiples of {sharing} (trainer.sequence_parallel_size)"
        hint = f"{counted(fitting + gpus - sides, 'GPU')} can be split; without --gpus it is {default}"
        raise ConfigError(f"{what}, as {why} and a rollout worker has {each}", hint=hint)
    proportional = round(sides * left / (left + right))
    ranks = next((ranks for ranks in possible if ranks >= proportional), possible[-1])
    return (*sets, *split_sets({TRAINER: ranks, **scorer_gpus, ROLLOUT: sides - ranks}, each))
