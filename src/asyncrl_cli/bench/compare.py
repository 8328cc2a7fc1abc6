"""Makes a comparison, from the user's request to the results: checks profiles, makes runs, measures
capacities, summarises them.

Contest (same work, same resources) -> runs -> capacities -> Comparison
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from asyncrl_cli.base.errors import AsyncrlError, ConfigError, Interrupted
from asyncrl_cli.base.storage import remove, replace_text
from asyncrl_cli.bench.bars import Bars
from asyncrl_cli.bench.baseline import baseline_toml
from asyncrl_cli.bench.entries import Entry, check_groups, check_sets, entries_of, groups_for_all
from asyncrl_cli.bench.measure import stretches
from asyncrl_cli.bench.phases import NO_CLUSTER_BOUND, REPEATS, with_capacities
from asyncrl_cli.bench.real import make_run, runs_of
from asyncrl_cli.bench.results import Comparison, FinishedRun, Result, is_uneven, summarise, unevenness
from asyncrl_cli.bench.simulated import SimulatedJob, simulate_all
from asyncrl_cli.checkpoint.run_directory import stem_of
from asyncrl_cli.job.process import StopRequests
from asyncrl_cli.job.session import connected
from asyncrl_cli.observe.lines import spent_s
from asyncrl_cli.plan.cluster import ClusterResources, local_cluster
from asyncrl_cli.plan.compiling import compile_job
from asyncrl_cli.profile.loaded import Loaded, load
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import is_file_reference
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import Residual, profile_for
from asyncrl_cli.simulate.world import virtual_cluster

REAL_GROUPS = 384
ENOUGH_WINDOWS = 3
"""How many windows (of the longest W) must be measured for a speedup without a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The profiles to compare, the baseline first. Each runs once per seed and trains `groups` groups: on the
    virtual clock if there is a `workload`, on the Ray cluster at `address` if that is given."""

    entries: Sequence[Entry]
    seeds: Sequence[int]
    groups: int
    workload: Workload | None
    address: str | None = None

    @property
    def baseline(self) -> Entry:
        return self.entries[0]

    @property
    def longest_window(self) -> int:
        return max(entry.window_groups for entry in self.entries)

    @property
    def warnings(self) -> list[str]:
        """Warnings about the profiles and, for real runs, about their placement on this machine."""
        of_plan = (
            [] if self.workload else [warning for entry in self.entries for warning in entry.plan.warnings]
        )
        return list(
            dict.fromkeys(
                [*(warning for entry in self.entries for warning in entry.loaded.warnings), *of_plan]
            )
        )


def contest_of(
    baseline: str | None,
    profiles: Sequence[str],
    *,
    directory: Path = Path(),
    keep_k: bool = False,
    sets: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    groups: int | None = None,
    windows: int | None = None,
    workload: Workload | None = None,
    address: str | None = None,
) -> Contest:
    """Check the profiles and determine the runs' length: `groups`, or about `windows` of the baseline, or
    about a default.

    Without a `baseline` that of the first profile that is a file is derived and written to `directory`
    (`keep_k`: baseline.py); if all are shipped profiles it is `colocate`. Raises ConfigError if the profiles
    cannot be compared.
    """
    check_sets(sets)
    own = next(filter(is_file_reference, profiles), None) if baseline is None else None
    if keep_k and own is None:
        raise ConfigError(
            "--keep-k is for the baseline that is derived from a profile's file",
            hint="--profile my.toml, without --compare",
        )
    flags = {
        "run.seed": seeds[0],
        "run.train_steps": 1,
        "eval.every_versions": 0,
        "checkpoint.every_steps": 0,
    }

    def loaded(reference: str, sets: Sequence[str]) -> Loaded:
        return (
            load(reference, sets, flags)
            if workload is None
            else profile_for(workload, reference, sets, groups=1)
        )

    def cluster(profile: Profile) -> ClusterResources:
        if workload is not None:
            return virtual_cluster(profile)
        return local_cluster() if address is None else _cluster_at(address)

    with ExitStack() as undo:
        references: dict[str, Sequence[str]] = dict.fromkeys([baseline or "colocate", *profiles], sets)
        if own is not None:
            base = loaded(own, sets)
            path = directory / f"{stem_of(base.profile.name)}-colocate.toml"
            replace_text(
                path, baseline_toml(base, compile_job(base.profile, cluster(base.profile)), keep_k=keep_k)
            )
            undo.callback(path.unlink)
            references = {str(path): (), **dict.fromkeys(profiles, sets)}
        entries = entries_of(references, loaded, cluster)
        groups = _length(entries, groups, windows, workload)
        undo.pop_all()
    return Contest(entries=entries, seeds=seeds, groups=groups, workload=workload, address=address)


def _length(
    entries: Sequence[Entry], groups: int | None, windows: int | None, workload: Workload | None
) -> int:
    """The groups that each run trains: those that the user gave, or a number that suits all profiles."""
    if groups is not None and windows is not None:
        raise ConfigError(
            "--groups and --windows both set the length of the runs", hint="give one of the two"
        )
    window_groups = entries[0].window_groups
    if groups is None:
        default = workload.windows * window_groups if workload else REAL_GROUPS
        return groups_for_all(entries, windows * window_groups if windows else default)
    check_groups(entries, groups)
    return groups


@cache
def _cluster_at(address: str) -> ClusterResources:
    with connected(address) as cluster:
        return cluster


def compare(contest: Contest, directory: Path, bars: Bars) -> Comparison:
    """Make all runs. Raises AsyncrlError if the first run fails. The error of a later real run becomes the
    comparison's `error`."""
    if contest.workload is None:
        return compare_real(contest, directory, bars)
    return compare_simulated(contest, contest.workload, directory, bars)


def compare_simulated(contest: Contest, workload: Workload, directory: Path, bars: Bars) -> Comparison:
    """Compare on the virtual clock. The first run of each profile is recorded in `directory`/runs. Raises
    AsyncrlError if any run fails or anything else is wrong; then nothing is kept."""
    groups, runs_dir = contest.groups, directory.resolve() / "runs"
    loaded = [profile_for(workload, entry.reference, entry.sets, groups=groups) for entry in contest.entries]
    jobs = [
        SimulatedJob(
            loaded=one, workload=workload, seed=seed, runs_dir=runs_dir if seed == contest.seeds[0] else None
        )
        for seed in contest.seeds
        for one in loaded
    ]
    for job in jobs:
        bars.run(job.name, 0, groups)
    try:
        runs, fit = simulate_all(
            jobs, contest.longest_window, lambda name, trained: bars.run(name, trained, groups)
        )
    except BaseException:
        remove(runs_dir)
        raise
    return comparison_of(contest, runs, remarks_of(workload, fit))


def remarks_of(workload: Workload, fit: Sequence[Residual]) -> tuple[str, ...]:
    """How well the simulation fits each measured row of the workload, then the workload's notes."""
    rows: dict[tuple[str, str], list[str]] = {}
    for one in fit:
        text = (
            f"{one.part} {one.measured_s:.4g} {one.evidence}, {one.predicted_s:.4g} simulated "
            f"({one.ratio - 1:+.1%})"
        )
        rows.setdefault((one.profile, "calibrated on" if one.calibrated else "predicted"), []).append(text)
    lines = [
        f"{profile} ({how}), seconds per window: {'; '.join(parts)}" for (profile, how), parts in rows.items()
    ]
    return (*lines, *([workload.notes.strip()] if workload.notes.strip() else ()))


def compare_real(contest: Contest, directory: Path, bars: Bars) -> Comparison:
    """Compare on this machine, one run at a time, in turns (A B C, A B C), so that a drift of its speed
    affects all profiles alike. If a run fails or the user interrupts, finished runs are kept.

    Each phase alone is measured after every repeat, about `phases.REPEATS` times in all, so that a run is
    compared with the speed of the machine at that time.
    """
    runs_dir = directory.resolve() / "runs"
    planned = runs_of(contest.entries, contest.seeds, contest.groups, runs_dir, contest.address)
    for run in planned:
        bars.run(run.name, 0, contest.groups)
    finished: list[FinishedRun] = []
    remarks: dict[str, None] = {}
    error: AsyncrlError | None = None
    try:
        with StopRequests().on_signals():  # SIGTERM and SIGHUP act like Ctrl-C
            for seed in contest.seeds:
                first = len(finished)
                for run in (run for run in planned if run.seed == seed):
                    made, is_last = make_run(run, bars)
                    finished.append(made)
                    if is_last:
                        raise KeyboardInterrupt
                repeats = math.ceil(REPEATS / len(contest.seeds))
                doubts: Sequence[str] = (NO_CLUSTER_BOUND,)
                if contest.address is None:
                    finished[first:], doubts = with_capacities(
                        contest.entries, finished[first:], bars, repeats
                    )
                remarks |= dict.fromkeys(doubts)
    except (AsyncrlError, KeyboardInterrupt) as failure:
        error = (
            failure
            if isinstance(failure, AsyncrlError)
            else Interrupted("interrupted: finished runs were kept")
        )
        if not finished:
            raise error from None
    return comparison_of(
        contest, finished, tuple(remarks), tuple(run.name for run in planned[len(finished) :]), error
    )


def comparison_of(
    contest: Contest,
    runs: Sequence[FinishedRun],
    remarks: tuple[str, ...],
    missing: tuple[str, ...] = (),
    error: AsyncrlError | None = None,
) -> Comparison:
    baseline = contest.baseline
    results = summarise(contest.entries, runs)
    return Comparison(
        results=results,
        workload=contest.workload.name if contest.workload else "",
        baseline=baseline.name,
        groups=contest.groups,
        window_groups=baseline.window_groups,
        seeds=tuple(contest.seeds),
        resources=f"{baseline.plan.gpus} GPUs"
        if baseline.plan.device == "cuda"
        else f"{baseline.plan.cpus} CPU cores",
        remarks=(*_doubts(contest, results, runs), *remarks),
        missing=missing,
        timelines=tuple(run.timeline for run in runs if run.timeline),
        error=error,
    )


def _doubts(contest: Contest, results: Sequence[Result], runs: Sequence[FinishedRun]) -> list[str]:
    """Reasons to be careful with the speedup: too little was measured, or the work was not the same."""
    longest = contest.longest_window
    found = stretches([run.lines for run in runs], longest)
    measured, doubts = min(stretch.groups for stretch in found), []
    if measured < ENOUGH_WINDOWS * longest:
        enough = groups_for_all(contest.entries, (ENOUGH_WINDOWS + 2) * longest)
        doubts.append(
            f"Short: {measured} groups are measured, and the longest window has {longest}. A speedup over so "
            "few groups means "
            f"little. Use --groups {enough} to measure {ENOUGH_WINDOWS} windows."
        )
    if is_uneven(results):
        doubts.append(
            f"The measured groups have up to {unevenness(results):.0%} more tokens in one profile than in "
            "another. Look at the "
            "speedup per token as well, or make the runs longer (--groups)."
        )
    if any(all(spent_s(line, "eval") > 0 for line in stretch.lines) for stretch in found):
        doubts.append(
            "No idle figures where an eval ran beside every measured step. Use more --groups or "
            "fewer eval.prompts."
        )
    return doubts
