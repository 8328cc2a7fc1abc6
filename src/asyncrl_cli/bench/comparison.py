"""Makes a comparison: Contest (same work, same resources) -> runs -> Comparison, with the reasons to doubt
it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl_cli.base.errors import AsyncrlError, Interrupted
from asyncrl_cli.base.storage import remove
from asyncrl_cli.bench.bars import Bars
from asyncrl_cli.bench.contest import Contest, groups_for_all
from asyncrl_cli.bench.figures import stretches
from asyncrl_cli.bench.real_runs import make_run, runs_of
from asyncrl_cli.bench.results import UNEVEN_WORK, Comparison, FinishedRun, Result, summarise, unevenness
from asyncrl_cli.bench.simulated_runs import SimulatedJob, simulate_all
from asyncrl_cli.job.driver_process import StopRequests
from asyncrl_cli.observe.line_figures import spent_s
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import Residual, profile_for

ENOUGH_WINDOWS = 3
"""How many windows (of the longest W) must be measured for a speedup without a warning."""


def compare(contest: Contest, directory: Path, bars: Bars) -> Comparison:
    """Make all runs, in `directory`/runs. Raises AsyncrlError if the first run fails. The error of a later
    real run becomes the comparison's `error`; of simulated runs nothing is kept after an error."""
    runs_dir = directory.resolve() / "runs"
    if contest.workload is None:
        return _compare_real(contest, runs_dir, bars)
    return _compare_simulated(contest, contest.workload, runs_dir, bars)


def _compare_simulated(contest: Contest, workload: Workload, runs_dir: Path, bars: Bars) -> Comparison:
    """Compare on the virtual clock. The first run of each profile is recorded."""
    groups = contest.groups
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
    rows: dict[str, list[str]] = {}
    for one in fit:
        row = f"{one.profile} ({'calibrated on' if one.calibrated else 'predicted'}), seconds per window"
        rows.setdefault(row, []).append(
            f"{one.part} {one.measured_s:.4g} {one.evidence}, {one.predicted_s:.4g} simulated "
            f"({one.ratio - 1:+.1%})"
        )
    notes = workload.notes.strip()
    return (*(f"{row}: {'; '.join(parts)}" for row, parts in rows.items()), *([notes] if notes else ()))


def _compare_real(contest: Contest, runs_dir: Path, bars: Bars) -> Comparison:
    """Compare on this machine or a cluster, one run at a time, in turns (A B C, A B C), so that a drift of
    its speed affects all profiles alike. If a run fails or the user interrupts, finished runs are kept."""
    planned = runs_of(contest.entries, contest.seeds, contest.groups, runs_dir, contest.address)
    for run in planned:
        bars.run(run.name, 0, contest.groups)
    finished: list[FinishedRun] = []
    error: AsyncrlError | None = None
    try:
        with StopRequests().on_signals():  # SIGTERM and SIGHUP act like Ctrl-C
            for run in planned:
                made, is_last = make_run(run, bars)
                finished.append(made)
                if is_last:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        error = Interrupted("interrupted: finished runs were kept")
    except AsyncrlError as failure:
        error = failure
    if error is not None and not finished:
        raise error
    missing = tuple(run.name for run in planned[len(finished) :])
    return comparison_of(contest, finished, missing=missing, error=error)


def comparison_of(
    contest: Contest,
    runs: Sequence[FinishedRun],
    remarks: tuple[str, ...] = (),
    *,
    missing: tuple[str, ...] = (),
    error: AsyncrlError | None = None,
) -> Comparison:
    """The runs' figures, with the reasons to doubt them before the other `remarks`."""
    baseline, results = contest.baseline, summarise(contest.entries, runs)
    on_gpus = baseline.plan.device == "cuda"
    return Comparison(
        results=results,
        workload=contest.workload.name if contest.workload else "",
        baseline=baseline.name,
        groups=contest.groups,
        window_groups=baseline.window_groups,
        seeds=tuple(contest.seeds),
        resources=f"{baseline.plan.gpus} GPUs" if on_gpus else f"{baseline.plan.cpus} CPU cores",
        remarks=(*_doubts(contest, results, runs), *remarks),
        missing=missing,
        error=error,
    )


def _doubts(contest: Contest, results: Sequence[Result], runs: Sequence[FinishedRun]) -> list[str]:
    """Reasons to be careful with the speedup: too little was measured, or the work was not the same."""
    longest, doubts = contest.longest_window, []
    found = stretches([run.lines for run in runs], longest)
    measured = min(stretch.groups for stretch in found)
    if measured < ENOUGH_WINDOWS * longest:
        # besides warm-up and run-out
        enough = groups_for_all(contest.entries, (ENOUGH_WINDOWS + 2) * longest)
        doubts.append(
            f"Short: {measured} groups are measured, and the longest window has {longest}. A speedup over "
            f"so few groups means little. Use --groups {enough} to measure {ENOUGH_WINDOWS} windows."
        )
    if (uneven := unevenness(results)) > UNEVEN_WORK:
        doubts.append(
            f"The measured groups have up to {uneven:.0%} more tokens in one profile than in another. Look "
            "at the speedup per token as well, or make the runs longer (--groups)."
        )
    if any(all(spent_s(line, "eval") > 0 for line in stretch.lines) for stretch in found):
        doubts.append(
            "No idle figures where an eval ran beside every measured step. Use more --groups or fewer "
            "eval.prompts."
        )
    return doubts
