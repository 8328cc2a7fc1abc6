"""A comparison from the asking to its results: who takes part, the runs, the capacities, the summary.

Request -> Contest (same work, same resources) -> runs -> capacities -> Outcome
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl_cli.bench.bars import Bars
from asyncrl_cli.bench.entries import Entry, check_groups, check_sets, entries_of, groups_for_all
from asyncrl_cli.bench.gantt import Timeline
from asyncrl_cli.bench.measure import common_edges, stretch_of
from asyncrl_cli.bench.phases import with_capacities
from asyncrl_cli.bench.pool import terminating_as_interrupt
from asyncrl_cli.bench.real import make_run, runs_of
from asyncrl_cli.bench.results import Comparison, Result, Run, is_uneven, summarise, unevenness
from asyncrl_cli.bench.simulated import SimulatedJob, simulate_all
from asyncrl_cli.errors import AsyncrlError, ConfigError, Interrupted
from asyncrl_cli.observe.lines import spent_s
from asyncrl_cli.plan.cluster import local_cluster
from asyncrl_cli.profile.layers import Loaded, load
from asyncrl_cli.simulate.references import Residual
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import virtual_cluster

REAL_GROUPS = 384
ENOUGH_WINDOWS = 3
"""Measured windows of the longest profile from which on a speedup is told without a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for. `groups` or `windows` (of the baseline), or neither."""

    baseline: str
    profiles: tuple[str, ...]
    sets: tuple[str, ...] = ()
    seed: int = 0
    repeat: int = 1
    groups: int | None = None
    windows: int | None = None

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.repeat))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Who takes part, the baseline first, and how many groups each run trains; on the virtual clock if there is a `workload`."""

    request: Request
    entries: Sequence[Entry]
    groups: int
    workload: Workload | None = None

    @property
    def baseline(self) -> Entry:
        return self.entries[0]

    @property
    def longest_window(self) -> int:
        return max(entry.window_groups for entry in self.entries)

    @property
    def warnings(self) -> list[str]:
        """Of the profiles and, for real runs, of what they need of this machine."""
        of_plan = [] if self.workload else [warning for entry in self.entries for warning in entry.plan.warnings]
        return list(dict.fromkeys([*(warning for entry in self.entries for warning in entry.loaded.warnings), *of_plan]))


def contest_of(request: Request, workload: Workload | None = None) -> Contest:
    """Raises ConfigError where the profiles cannot be compared."""
    check_sets(request.sets)
    references = (request.baseline, *request.profiles)
    if workload is None:
        entries = entries_of(references, lambda reference: _real_profile(request, reference), lambda profile: local_cluster())
        default = REAL_GROUPS
    else:
        entries = entries_of(
            references, lambda reference: profile_for(workload, reference, request.sets, groups=1), virtual_cluster
        )
        default = workload.windows * entries[0].window_groups
    if request.groups is not None and request.windows is not None:
        raise ConfigError("--groups and --windows both say how long the runs are", hint="give one of the two")
    groups = request.groups or (request.windows or 0) * entries[0].window_groups or default
    check_groups(entries, groups)
    return Contest(request=request, entries=entries, groups=groups, workload=workload)


def _real_profile(request: Request, reference: str) -> Loaded:
    flags = {"run.seed": request.seed, "run.train_steps": 1, "eval.every_versions": 0, "checkpoint.every_steps": 0}
    return load(reference, request.sets, flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`comparison` is None if not even the baseline was run; `error` ended it early, with what was finished kept."""

    comparison: Comparison | None
    timelines: tuple[Timeline, ...]
    error: AsyncrlError | None = None


def compare(contest: Contest, directory: Path, bars: Bars) -> Outcome:
    if contest.workload is None:
        return compare_real(contest, directory, bars)
    return compare_simulated(contest, contest.workload, bars)


def compare_simulated(contest: Contest, workload: Workload, bars: Bars) -> Outcome:
    """On the virtual clock. Raises AsyncrlError for whatever is wrong, also with a run."""
    request, groups = contest.request, contest.groups
    loaded = [profile_for(workload, entry.reference, request.sets, groups=groups) for entry in contest.entries]
    jobs = [
        SimulatedJob(profile=one.profile, workload=workload, seed=seed, groups=groups, keep_timeline=seed == request.seed)
        for seed in request.seeds
        for one in loaded
    ]
    for job in jobs:
        bars.run(job.name, 0, groups)
    runs, fit = simulate_all(jobs, contest.longest_window, lambda name, trained: bars.run(name, trained, groups))
    return outcome_of(contest, runs, remarks_of(workload, fit))


def remarks_of(workload: Workload, fit: Sequence[Residual]) -> tuple[str, ...]:
    """How well the workload's parameters fit the rows that it is held against, row by row, and what its notes leave open."""
    rows: dict[tuple[str, str], list[str]] = {}
    for one in fit:
        text = f"{one.part} {one.measured_s:.4g} {one.evidence}, {one.predicted_s:.4g} simulated ({one.ratio - 1:+.1%})"
        rows.setdefault((one.profile, "calibrated on" if one.calibrated else "predicted"), []).append(text)
    lines = [f"{profile} ({how}), seconds per window: {'; '.join(parts)}" for (profile, how), parts in rows.items()]
    return (*lines, *([workload.notes.strip()] if workload.notes.strip() else ()))


def compare_real(contest: Contest, directory: Path, bars: Bars) -> Outcome:
    """On this machine, one run after the other (A B C, A B C), so that whatever drifts on it hits all alike. What is finished
    when a run fails, or we are interrupted, is kept.

    Each phase alone is measured after every repeat, as often in all as `phases.REPEATS` says: a machine's speed drifts, and
    runs are held against what the machine could do at that time.
    """
    planned = runs_of(contest.entries, contest.request.seeds, contest.groups, contest.request.sets, directory.resolve() / "runs")
    for run in planned:
        bars.run(run.name, 0, contest.groups)
    finished: list[Run] = []
    remarks: dict[str, None] = {}
    error: AsyncrlError | None = None
    try:
        with terminating_as_interrupt():
            for seed in contest.request.seeds:
                first = len(finished)
                for run in (run for run in planned if run.seed == seed):
                    made, is_last = make_run(run, bars)
                    finished.append(made)
                    if is_last:
                        raise KeyboardInterrupt
                share = 1 / contest.request.repeat
                finished[first:], doubts = with_capacities(contest.entries, finished[first:], bars, share)
                remarks |= dict.fromkeys(doubts)
    except (AsyncrlError, KeyboardInterrupt) as failure:
        error = failure if isinstance(failure, AsyncrlError) else Interrupted("interrupted: what is finished was kept")
    return outcome_of(contest, finished, tuple(remarks), tuple(run.name for run in planned[len(finished) :]), error)


def outcome_of(
    contest: Contest,
    runs: Sequence[Run],
    remarks: tuple[str, ...],
    missing: tuple[str, ...] = (),
    error: AsyncrlError | None = None,
) -> Outcome:
    baseline = contest.baseline
    if not any(run.profile == baseline.name for run in runs):
        return Outcome(comparison=None, timelines=(), error=error)
    results = summarise(contest.entries, runs, window_groups=baseline.window_groups)
    comparison = Comparison(
        results=results,
        workload=contest.workload.name if contest.workload else "",
        baseline=baseline.name,
        groups=contest.groups,
        window_groups=baseline.window_groups,
        seeds=contest.request.seeds,
        resources=f"{baseline.plan.gpus} GPUs" if baseline.plan.device == "cuda" else f"{baseline.plan.cpus} CPU cores",
        remarks=(*_doubts(contest, results, runs), *remarks),
        missing=missing,
    )
    return Outcome(comparison=comparison, timelines=tuple(run.timeline for run in runs if run.timeline), error=error)


def _doubts(contest: Contest, results: Sequence[Result], runs: Sequence[Run]) -> list[str]:
    """What a reader has to know before the speedup: too little was measured, or not the same."""
    longest = contest.longest_window
    edges = common_edges([run.lines for run in runs], longest)
    stretches = [stretch_of(run.lines, edges) for run in runs]
    measured, doubts = min(stretch.groups for stretch in stretches), []
    if measured < ENOUGH_WINDOWS * longest:
        enough = groups_for_all(contest.entries, (ENOUGH_WINDOWS + 2) * longest)
        doubts.append(
            f"Short: {measured} groups are measured, and the longest window has {longest}. A speedup of so few says little: "
            f"--groups {enough} measures {ENOUGH_WINDOWS} windows."
        )
    if is_uneven(results):
        doubts.append(
            f"The measured groups have up to {unevenness(results):.0%} more tokens in one profile than in another: read the "
            "speedup per token beside the speedup, or make the runs longer (--groups)."
        )
    if any(all(spent_s(line, "eval") > 0 for line in stretch.lines) for stretch in stretches):
        doubts.append("No idle figures where an eval ran beside every measured step: more --groups, or fewer eval.prompts.")
    return doubts
