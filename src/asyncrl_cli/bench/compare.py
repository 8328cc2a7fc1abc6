"""A comparison from the asking to its results: who takes part, the runs, the capacities, the summary.

Request -> entries (same work, same resources) -> runs -> capacities -> Outcome
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asyncrl_cli.bench.capacities import real_capacities
from asyncrl_cli.bench.entries import Entry, check_groups, check_sets, entries_of, groups_for_all
from asyncrl_cli.bench.measure import common_edges, stretch_of
from asyncrl_cli.bench.real import RealRun, Told, make_run, runs_of, terminating_as_interrupt
from asyncrl_cli.bench.results import Comparison, Result, RunKey, RunLines, is_uneven, summarise, unevenness
from asyncrl_cli.bench.timeline import Timeline, timeline_of_run
from asyncrl_cli.errors import AsyncrlError, ConfigError, Interrupted
from asyncrl_cli.observe.bound import Capacities
from asyncrl_cli.observe.lines import spent_s
from asyncrl_cli.plan.cluster import local_cluster
from asyncrl_cli.profile.layers import Loaded, load
from asyncrl_cli.simulate.workload import Workload

if TYPE_CHECKING:
    from asyncrl_cli.simulate.references import Residual

REAL_GROUPS = 384
ENOUGH_WINDOWS = 3
"""Measured windows of the longest profile from which on a speedup is told without a warning."""


class Watcher(Protocol):
    """Someone who shows how far a comparison is."""

    def run(self, name: str, groups: int, total: int, told: Told | None = None) -> None:
        """A run has trained so many of its groups; called first with 0. `told`: what a real one says of itself."""

    def note(self, text: str, done: int, total: int) -> None:
        """Something else is being done."""

    def say(self, text: str) -> None:
        """A line for the user, beside whatever shows how far it is."""


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

    @property
    def references(self) -> tuple[str, ...]:
        return (self.baseline, *self.profiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`comparison` is None if not even the baseline was run; `error` ended it early, with what was finished kept."""

    comparison: Comparison | None
    timelines: tuple[Timeline, ...]
    error: AsyncrlError | None = None


def compare_simulated(request: Request, workload: Workload, watcher: Watcher) -> Outcome:
    """On the virtual clock. Raises AsyncrlError for whatever is wrong, also with a run."""
    from asyncrl_cli.bench.simulated import SimulatedJob, simulate_all
    from asyncrl_cli.simulate.workload_files import profile_for

    entries, groups = simulated_entries(request, workload)
    loaded = [profile_for(workload, entry.reference, request.sets, groups=groups) for entry in entries]
    jobs = [
        SimulatedJob(profile=one.profile, workload=workload, seed=seed, groups=groups, keep_timeline=seed == request.seed)
        for seed in request.seeds
        for one in loaded
    ]
    for job in jobs:
        watcher.run(job.name, 0, groups)
    made, fit = simulate_all(jobs, workload, lambda name, trained: watcher.run(name, trained, groups))
    edges = common_edges([result.lines.lines for result in made], max(entry.window_groups for entry in entries))
    capacities = {(result.lines.profile, result.lines.seed): result.capacities(edges) for result in made}
    comparison = _comparison(
        request, entries, groups, [result.lines for result in made], capacities, workload.name, remarks_of(workload, fit)
    )
    return Outcome(comparison=comparison, timelines=tuple(result.timeline for result in made if result.timeline))


def simulated_entries(request: Request, workload: Workload) -> tuple[list[Entry], int]:
    """Who takes part, and the number of groups. Raises ConfigError where the profiles cannot be compared."""
    from asyncrl_cli.simulate.workload_files import profile_for
    from asyncrl_cli.simulate.world import virtual_cluster

    check_sets(request.sets)
    entries = entries_of(
        request.references, lambda reference: profile_for(workload, reference, request.sets, groups=1), virtual_cluster
    )
    groups = _groups(request, entries[0].window_groups, workload.windows * entries[0].window_groups)
    check_groups(entries, groups)
    return entries, groups


def remarks_of(workload: Workload, fit: Sequence[Residual]) -> tuple[str, ...]:
    """How well the workload's parameters fit the rows that it is held against, row by row, and what its notes leave open."""
    rows: dict[tuple[str, str], list[str]] = {}
    for one in fit:
        text = f"{one.part} {one.measured_s:.4g} {one.known}, {one.predicted_s:.4g} simulated ({one.ratio - 1:+.1%})"
        rows.setdefault((one.profile, "calibrated on" if one.calibrated else "predicted"), []).append(text)
    lines = [f"{profile} ({how}), seconds per window: {'; '.join(parts)}" for (profile, how), parts in rows.items()]
    return (*lines, *([workload.notes.strip()] if workload.notes.strip() else ()))


def compare_real(request: Request, directory: Path, watcher: Watcher) -> Outcome:
    """On this machine, one run after the other; raises only for what is wrong before the first one.

    Each phase alone is measured after every repeat, as often in all as `phases.REPEATS` says: a machine's speed drifts, and
    runs are held against what the machine could do at that time.
    """
    entries, groups = real_entries(request)
    runs = runs_of(entries, request.seeds, groups, request.sets, directory.resolve() / "runs")
    for run in runs:
        watcher.run(run.name, 0, groups)
    finished: list[RunLines] = []
    capacities: dict[RunKey, Capacities] = {}
    remarks: dict[str, None] = {}
    error: AsyncrlError | None = None
    for seed in request.seeds:
        made, error = _make_all([run for run in runs if run.seed == seed], groups, watcher)
        finished += made
        if error is None:
            try:
                found, doubts = real_capacities(entries, made, watcher, share=1 / len(request.seeds))
                capacities |= found
                remarks |= dict.fromkeys(doubts)
            except (AsyncrlError, KeyboardInterrupt) as failure:
                error = _as_error(failure)
        if error is not None:
            break
    if not any(run.profile == entries[0].name for run in finished):
        return Outcome(comparison=None, timelines=(), error=error)
    missing = tuple(run.name for run in runs[len(finished) :])
    comparison = _comparison(request, entries, groups, finished, capacities, "", tuple(remarks), missing)
    return Outcome(comparison=comparison, timelines=_timelines(runs, finished), error=error)


def real_entries(request: Request) -> tuple[list[Entry], int]:
    """Who takes part, and the number of groups. Raises ConfigError where the profiles cannot be compared."""
    check_sets(request.sets)

    def load_one(reference: str) -> Loaded:
        flags = {"run.seed": request.seed, "run.train_steps": 1, "eval.every_versions": 0, "checkpoint.every_steps": 0}
        return load(reference, request.sets, flags)

    entries = entries_of(request.references, load_one, lambda profile: local_cluster())
    groups = _groups(request, entries[0].window_groups, REAL_GROUPS)
    check_groups(entries, groups)
    return entries, groups


def _groups(request: Request, window_groups: int, default: int) -> int:
    if request.groups is not None and request.windows is not None:
        raise ConfigError("--groups and --windows both say how long the runs are", hint="give one of the two")
    return request.groups or (request.windows * window_groups if request.windows else default)


def _make_all(runs: Sequence[RealRun], groups: int, watcher: Watcher) -> tuple[list[RunLines], AsyncrlError | None]:
    """Run after run until one fails or we are interrupted; what is finished stays."""
    finished: list[RunLines] = []
    try:
        with terminating_as_interrupt():
            for run in runs:
                finished.append(make_run(run, _teller(watcher, run.name, groups), watcher.say))
                if finished[-1].interrupted:
                    raise KeyboardInterrupt
    except (AsyncrlError, KeyboardInterrupt) as failure:
        return finished, _as_error(failure)
    return finished, None


def _teller(watcher: Watcher, name: str, groups: int) -> Callable[[Told], None]:
    return lambda told: watcher.run(name, told.groups, groups, told)


def _as_error(failure: BaseException) -> AsyncrlError:
    return failure if isinstance(failure, AsyncrlError) else Interrupted("interrupted: what is finished was kept")


def _timelines(runs: Sequence[RealRun], finished: Sequence[RunLines]) -> tuple[Timeline, ...]:
    """Of each profile's first run."""
    first = {run.entry.name: (run, lines) for run, lines in reversed(list(zip(runs, finished, strict=False)))}
    found = (timeline_of_run(name, run.directory, lines.lines) for name, (run, lines) in reversed(first.items()))
    return tuple(timeline for timeline in found if timeline is not None)


def _comparison(
    request: Request,
    entries: Sequence[Entry],
    groups: int,
    runs: Sequence[RunLines],
    capacities: Mapping[RunKey, Capacities],
    workload: str,
    remarks: tuple[str, ...],
    missing: tuple[str, ...] = (),
) -> Comparison:
    baseline = entries[0]
    results = summarise([entry.contestant() for entry in entries], runs, capacities, window_groups=baseline.window_groups)
    return Comparison(
        results=results,
        workload=workload,
        baseline=baseline.name,
        groups=groups,
        window_groups=baseline.window_groups,
        seeds=request.seeds,
        resources=f"{baseline.plan.gpus} GPUs" if baseline.plan.device == "cuda" else f"{baseline.plan.cpus} CPU cores",
        remarks=(*_doubts(entries, results, runs), *remarks),
        missing=missing,
    )


def _doubts(entries: Sequence[Entry], results: Sequence[Result], runs: Sequence[RunLines]) -> list[str]:
    """What a reader has to know before the speedup: too little was measured, or not the same."""
    longest = max(entry.window_groups for entry in entries)
    edges = common_edges([run.lines for run in runs], longest)
    stretches = [stretch_of(run.lines, edges) for run in runs]
    measured, doubts = min(stretch.groups for stretch in stretches), []
    if measured < ENOUGH_WINDOWS * longest:
        enough = groups_for_all(entries, (ENOUGH_WINDOWS + 2) * longest)
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
