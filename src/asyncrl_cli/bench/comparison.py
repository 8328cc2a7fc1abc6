"""Makes a comparison: Contest (same work, same resources) -> runs -> Comparison, with the reasons to doubt
it. A real run is a child process: `asyncrl train` as a user would call it, followed through its
status.json."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from asyncrl_cli.base.errors import AsyncrlError, ConfigError, Interrupted, PreflightError
from asyncrl_cli.base.storage import remove
from asyncrl_cli.bench.bars import Bars
from asyncrl_cli.bench.contest import Contest, Entry, groups_for_all
from asyncrl_cli.bench.figures import stretches
from asyncrl_cli.bench.results import UNEVEN_WORK, Comparison, FinishedRun, summarise, unevenness
from asyncrl_cli.bench.simulated_runs import SimulatedJob, simulate_all, simulators
from asyncrl_cli.bench.what_if import outlook
from asyncrl_cli.checkpoint.run_directory import stem_of
from asyncrl_cli.job.driver_process import StopRequests
from asyncrl_cli.observe.recorded import Recorded, read_metrics
from asyncrl_cli.observe.run_lines import spent_s
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import Residual, profile_for

ENOUGH_WINDOWS = 3
"""How many windows (of the longest W) must be measured for a speedup without a warning."""
POLL_S = 0.5
STOP_EXTRA_S = 30.0
"""Added to `run.stop_grace_s`, the least that a stopped run has: ending Ray takes longer. A run that is ended
in a longer train step loses nothing: an interrupted run of a comparison is not resumed."""
KINDS: dict[int, type[AsyncrlError]] = {2: ConfigError, 3: PreflightError}
"""The error of a run by its exit code; others are an AsyncrlError."""


def compare(contest: Contest, directory: Path, bars: Bars) -> Comparison:
    """Make all runs, in `directory`/runs. Raises AsyncrlError if the first run fails. The error of a later
    real run becomes the comparison's `error`, and so does an interrupt of simulated runs, of which nothing is
    kept after another error. What comes after all simulated runs ends with an `error`, too."""
    runs_dir, workload, groups = directory.resolve() / "runs", contest.workload, contest.groups
    if workload is None:
        return _compare_real(contest, runs_dir, bars)
    loaded = [profile_for(workload, entry.reference, entry.sets, groups=groups) for entry in contest.entries]
    jobs = []
    for seed, one in product(contest.seeds, loaded):
        # the first run of each profile is recorded
        recorded_in = runs_dir / f"{one.profile.name}-s{seed}" if seed == contest.seeds[0] else None
        jobs.append(SimulatedJob(loaded=one, workload=workload, seed=seed, directory=recorded_in))

    for job in jobs:
        bars.run(job.name, 0, groups)
    try:
        runs, fit, interrupt = simulate_all(jobs, lambda name, trained: bars.run(name, trained, groups))
    except BaseException:
        remove(runs_dir)
        raise
    made, outlooks, scalings = comparison_of(contest, runs, remarks_of(workload, fit)), dict[str, str](), []
    if interrupt is not None:
        ended = {(run.profile, run.seed) for run in runs}
        cut_off = [job for job in jobs if (job.loaded.profile.name, job.seed) not in ended]
        for directory in filter(None, [job.directory for job in cut_off]):
            remove(directory)
        return replace(made, missing=tuple(job.name for job in cut_off), error=interrupt)
    error: AsyncrlError | None = None
    try:
        with simulators() as pool:
            for entry in contest.entries:
                bars.say(f"simulating what limits {entry.name}, and how it scales")
                limit, scaling = outlook(pool, workload, entry.reference, entry.sets, entry.profile)
                outlooks[entry.name] = f"limited by {limit}" + (f"; {scaling}" if scaling else "")
                scalings += [scaling] if scaling else []
    except Interrupted:
        error = Interrupted("interrupted: the runs are compared, but what limits each profile is not known")
    except AsyncrlError as failure:
        error = failure
    return replace(made, outlooks=outlooks, scalings=scalings, error=error)


def remarks_of(workload: Workload, fit: Sequence[Residual]) -> tuple[str, ...]:
    """How well the simulation fits each measured row of the workload, then the workload's notes."""
    rows: dict[str, list[str]] = {}
    for one in fit:
        row = f"{one.profile} ({'calibrated on' if one.calibrated else 'predicted'}), seconds per window"
        simulated = f"{one.predicted_s:.4g} simulated ({one.ratio - 1:+.1%})"
        rows.setdefault(row, []).append(f"{one.part} {one.measured_s:.4g} {one.evidence}, {simulated}")
    notes = workload.notes.strip()
    return (*(f"{row}: {'; '.join(parts)}" for row, parts in rows.items()), *([notes] if notes else ()))


def _compare_real(contest: Contest, runs_dir: Path, bars: Bars) -> Comparison:
    """Compare on this machine or a cluster, one run at a time, in turns (A B C, A B C), so that a drift of
    its speed affects all profiles alike. If a run fails or the user interrupts, finished runs are kept."""
    planned = runs_of(contest, runs_dir)
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
    return replace(comparison_of(contest, finished), missing=missing, error=error)


def comparison_of(contest: Contest, runs: Sequence[FinishedRun], remarks: tuple[str, ...] = ()) -> Comparison:
    """The runs' figures. Reasons to be careful with the speedup, because too little was measured or the work
    was not the same, come before the other `remarks`."""
    baseline, results = contest.baseline, summarise(contest.entries, runs)
    longest, doubts = contest.longest_window, []
    found = stretches([run.lines for run in runs], longest)
    measured = min(stretch.groups for stretch in found)
    if measured < ENOUGH_WINDOWS * longest:
        # besides warm-up and run-out
        enough = groups_for_all(contest.entries, (ENOUGH_WINDOWS + 2) * longest)
        short = f"Short: {measured} groups are measured, and the longest window has {longest}. "
        short += "A speedup over so few groups means little. "
        doubts.append(f"{short}Use --groups {enough} to measure {ENOUGH_WINDOWS} windows.")
    if (uneven := unevenness(results)) > UNEVEN_WORK:
        more = f"The measured groups have up to {uneven:.0%} more tokens in one profile than in another. "
        doubts.append(f"{more}Look at the speedup per token as well, or make the runs longer (--groups).")
    if any(all(spent_s(line, "eval") > 0 for line in stretch.lines) for stretch in found):
        unknown = "No idle figures where an eval ran beside every measured step."
        doubts.append(f"{unknown} Use more --groups or fewer eval.prompts.")
    on_gpus = baseline.plan.device == "cuda"
    return Comparison(
        results=results,
        workload=contest.workload.name if contest.workload else "",
        baseline=baseline.name,
        groups=contest.groups,
        window_groups=baseline.window_groups,
        seeds=tuple(contest.seeds),
        resources=f"{baseline.plan.gpus} GPUs" if on_gpus else f"{baseline.plan.cpus} CPU cores",
        remarks=(*doubts, *remarks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """One run to make, in the directory `runs_dir/name`. Its stdout, which is JSON, goes to `output`, its
    stderr to `log`."""

    entry: Entry
    repeat: int
    contest: Contest
    runs_dir: Path

    @property
    def seed(self) -> int:
        return self.contest.seeds[self.repeat]

    @property
    def name(self) -> str:
        return f"{stem_of(self.entry.name)}-r{self.repeat}"

    @property
    def directory(self) -> Path:
        return self.runs_dir / self.name

    @property
    def output(self) -> Path:
        return self.runs_dir / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return self.runs_dir / f"{self.name}.log"

    def command(self) -> list[str]:
        sets = [*self.entry.sets, f"run.seed={self.seed}", f"run.total_rollout_steps={self.contest.groups}"]
        sets += ["eval.every_versions=0", "checkpoint.every_steps=0"]
        words = [word for text in sets for word in ("--set", text)]
        words += ["--runs-dir", str(self.runs_dir), "--name", self.name, "--ui", "none", "--json"]
        words += ["--address", self.contest.address or "local"]
        return [sys.executable, "-m", "asyncrl_cli", "train", "--profile", self.entry.reference, *words]


def runs_of(contest: Contest, runs_dir: Path) -> list[RealRun]:
    """The runs in the order in which they are made."""
    pairs = product(range(len(contest.seeds)), contest.entries)
    return [RealRun(entry=one, repeat=repeat, contest=contest, runs_dir=runs_dir) for repeat, one in pairs]


def make_run(run: RealRun, bars: Bars) -> tuple[FinishedRun, bool]:
    """Make the run. The second value is True if we were interrupted just as the run finished: it should be
    the last one.

    Interrupted earlier, ends the run and raises KeyboardInterrupt. Raises AsyncrlError with the run's error
    if it fails."""
    run.runs_dir.mkdir(parents=True, exist_ok=True)
    # Signals are only noted here, and checked while waiting: an exception at another point could leave the
    # run behind.
    interrupts: list[float] = []
    requests = StopRequests(lambda: interrupts.append(time.monotonic()))
    with run.output.open("wb") as output, run.log.open("wb") as log, requests.on_signals():
        # In a session of its own, so that a Ctrl-C in the terminal reaches the run only through us.
        child = subprocess.Popen(
            run.command(), stdin=subprocess.DEVNULL, stdout=output, stderr=log, start_new_session=True
        )
        try:
            while (code := _wait(child, POLL_S, interrupts)) is None:
                if interrupts:
                    raise KeyboardInterrupt
                _show_status(run, bars)
        except BaseException:
            bars.say(f"stopping {run.name}; Ctrl-C again ends it at once")
            end(child, run.entry.profile.run.stop_grace_s + STOP_EXTRA_S, interrupts)
            raise
    if code != 0:
        raise KeyboardInterrupt if interrupts else _failure(run, code)
    lines = read_metrics(run.directory / "metrics.jsonl")
    bars.run(run.name, run.contest.groups, run.contest.groups, time_s=lines[-1]["time_s"])
    prints = dict[int, str]()
    if run.entry.profile.run.deterministic:
        loads = Recorded(run.directory).events("loaded")
        prints = {load.get("version", 0): load.get("fingerprint", "") for load in loads}
    made = FinishedRun(profile=run.entry.name, seed=run.seed, lines=lines, fingerprints=prints)
    return made, bool(interrupts)


def end(child: subprocess.Popen[bytes], grace_s: float, interrupts: Sequence[float]) -> None:
    """SIGINT for an orderly stop, SIGINT to end at once, SIGTERM, then kill. Each further interrupt skips to
    the next."""
    for number, limit_s in ((signal.SIGINT, grace_s), (signal.SIGINT, STOP_EXTRA_S), (signal.SIGTERM, 5.0)):
        if child.poll() is not None:
            return
        child.send_signal(number)
        if _wait(child, limit_s, interrupts) is not None:
            return
    child.kill()
    child.wait()


def _wait(child: subprocess.Popen[bytes], limit_s: float, interrupts: Sequence[float]) -> int | None:
    """The exit code; None if the child still runs after `limit_s` or when a new interrupt comes."""
    until_s, seen = time.monotonic() + limit_s, len(interrupts)
    while (code := child.poll()) is None and time.monotonic() < until_s and len(interrupts) == seen:
        time.sleep(min(0.1, limit_s))
    return code


def _show_status(run: RealRun, bars: Bars) -> None:
    """Groups trained, and the run's time, phase (with what it does while it starts) and time left, from its
    status.json."""
    try:
        status = json.loads((run.directory / "status.json").read_text(encoding="utf-8"))
        progress, phase = status["progress"], str(status["phase"])
        if doing := status.get("doing"):
            phase = f"{phase}: {doing}"
        groups, time_s, left_s = int(progress["groups_trained"]), progress["time_s"], progress.get("eta_s")
    except (FileNotFoundError, ValueError, KeyError):
        bars.run(run.name, 0, run.contest.groups, phase="starting")
    else:
        bars.run(run.name, groups, run.contest.groups, time_s=time_s, phase=phase, left_s=left_s)


def _failure(run: RealRun, code: int) -> AsyncrlError:
    """The run's own error and hint (or its last line of output, if it was killed), with the place of its
    log."""
    output = run.log.read_text(encoding="utf-8", errors="replace").splitlines()
    last_line = next((line for line in reversed(output) if line.strip()), "it said nothing")
    try:
        found = json.loads(run.output.read_text(encoding="utf-8"))
    except ValueError:
        found = {}
    logs = run.directory / "logs" / "latest"
    where = f"its log: {logs / 'driver.log' if logs.is_dir() else run.log}"
    how = f"signal {-code}" if code < 0 else f"exit {code}"
    message = f"the run {run.name} failed ({how}): {found.get('error') or last_line}"
    return KINDS.get(code, AsyncrlError)(message, hint="; ".join(filter(None, [found.get("hint"), where])))
