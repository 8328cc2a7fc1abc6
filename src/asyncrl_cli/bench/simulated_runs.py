"""Makes the simulated runs of a comparison, one per core at a time, each on its own virtual clock.

    jobs, references --> a pool of processes --> runs and residuals, in the order of the jobs
                              |
                              +--> the files of some runs, like those of real runs

Only the parent handles Ctrl-C. It ends the pool at once, because an unfinished simulated run is not worth
keeping; those that have ended are. No process of the pool outlives the command, however the command ends.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

from asyncrl_cli.base.child_process import end_with_parent
from asyncrl_cli.base.errors import AsyncrlError, Interrupted
from asyncrl_cli.bench.figures import Edges, figures_of, stretch_of
from asyncrl_cli.bench.results import FinishedRun
from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.contracts.events import Observer, StepRecord
from asyncrl_cli.job.driver_process import StopRequests, blocked, collect_garbage_seldom
from asyncrl_cli.observe.live_status import facts_of
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.sinks import EventsFile, MetricsFile, Sink, StatusFile, TimelineFile
from asyncrl_cli.plan.cluster import usable_cores
from asyncrl_cli.profile.loaded import Loaded
from asyncrl_cli.profile.resolved import to_document, to_toml
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import Residual, residuals
from asyncrl_cli.simulate.world import simulate

POLL_S = 0.1

Progress = Callable[[str, int], None]
"""Called with a run's name and the number of groups that the run has trained."""
Reports = SimpleQueue[tuple[str, int]]
"""What the processes of a pool tell the parent: the arguments of `Progress`."""
P = ParamSpec("P")
T = TypeVar("T")


class Pool(ProcessPoolExecutor):
    """A process pool whose children never get SIGINT (a Ctrl-C in the terminal), not even while they
    start."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with blocked(signal.SIGINT):
            return super().submit(fn, *args, **kwargs)


@contextmanager
def simulators(reports: Reports | None = None) -> Iterator[Pool]:
    """A pool for simulated runs, one per core: spawned processes (forking is unsafe, because this process has
    threads), killed at the end of the block. Raises Interrupted on SIGINT, SIGTERM or SIGHUP within the
    block."""
    others, context = set(multiprocessing.active_children()), multiprocessing.get_context("spawn")
    try:
        with StopRequests().on_signals(), Pool(usable_cores(), context, _begin, (reports,)) as pool:
            try:
                yield pool
            finally:
                for child in set(multiprocessing.active_children()) - others:
                    child.kill()
    except KeyboardInterrupt:
        raise Interrupted("interrupted: simulated runs are not kept") from None
    except BrokenProcessPool:
        hint = "the kernel does so when memory is full: `dmesg` says, and fewer other programs help"
        raise AsyncrlError("a process of the simulation was killed", hint=hint) from None


def _begin(reports: Reports | None) -> None:
    """Runs first in each process of the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()  # a process waiting for work would not notice that its parent died
    collect_garbage_seldom()
    _Reporter.reports = reports


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """One run to simulate. `directory`: where it is recorded, for a report; None if it is not."""

    loaded: Loaded
    workload: Workload
    seed: int
    directory: Path | None = None

    @property
    def name(self) -> str:
        return f"SIMULATED {self.loaded.profile.name}-s{self.seed}"


def simulate_all(
    jobs: Sequence[SimulatedJob], progress: Progress
) -> tuple[list[FinishedRun], list[Residual], Interrupted | None]:
    """The runs in the order of `jobs`, of which the first is the baseline's, and how well the workload fits
    its references; after an interrupt, what had ended of both. Raises the error of a run that fails, or
    Interrupted if no run of the baseline had ended; all others are ended."""
    workload, baseline = jobs[0].workload, jobs[0].loaded.profile.name
    reports: Reports = multiprocessing.get_context("spawn").SimpleQueue()
    running, fits = list[Future[FinishedRun]](), list[Future[list[Residual]]]()
    interrupt = None
    try:
        with simulators(reports) as pool:
            running += [pool.submit(_simulate, job) for job in jobs]
            fits += [pool.submit(residuals, workload, row) for row in workload.references]
            unfinished: set[Future[Any]] = {*running, *fits}
            while unfinished:
                done, unfinished = wait(unfinished, timeout=POLL_S)
                while not reports.empty():
                    progress(*reports.get())
                for future in done:
                    future.result()  # raises the error of the first run that fails
    except Interrupted:
        interrupt = Interrupted("interrupted: simulated runs that had ended are compared")
    made = _results(running)
    if interrupt is not None and not any(run.profile == baseline for run in made):
        raise Interrupted(f"interrupted: no run of {baseline} had ended")
    fit = [residual for row in _results(fits) for residual in row]
    return made, fit, interrupt


def _results(futures: Sequence[Future[T]]) -> list[T]:
    """Of those that have one."""
    return [one.result() for one in futures if one.done() and not one.cancelled() and not one.exception()]


def _simulate(job: SimulatedJob) -> FinishedRun:
    profile, directory = job.loaded.profile, job.directory
    files = recorded(job.loaded, directory, job.workload.cores) if directory else nullcontext(Observer())
    with files as recorder:
        observers, keeps = [_Reporter(job.name), recorder], directory is not None
        run = simulate(profile, job.workload, seed=job.seed, observers=observers, machines=keeps)
        if run.error is not None:
            raise run.error
    return FinishedRun(profile=profile.name, seed=job.seed, lines=run.lines, costs=run.costs)


def inner_figures(
    profile: Profile,
    workload: Workload,
    windows: int,
    window_groups: int,
    *,
    seed: int,
    factors: Mapping[str, float] | None = None,
    scale: int = 1,
) -> dict[str, float]:
    """The figures of a simulated run of so many windows of `window_groups` groups, without the first and the
    last one. Raises the run's error. `factors`, `scale`: as for `simulate`."""
    groups = windows * window_groups
    run = simulate(profile, workload, seed=seed, groups=groups, factors=factors, scale=scale)
    if run.error is not None:
        raise run.error
    edges = Edges(window_groups, int(run.lines[-1]["groups_trained"]) - window_groups)
    return figures_of(stretch_of(run.lines, edges), window_groups)


class _Reporter(Observer):
    """After every train step, tells the parent how many groups the run has trained."""

    reports: ClassVar[Reports | None] = None
    """Of this process of the pool."""

    def __init__(self, name: str) -> None:
        self._name = name

    def step(self, record: StepRecord) -> None:
        assert self.reports is not None, "the pool was made without a queue"
        self.reports.put((self._name, record.ledger["trained"]))


@contextmanager
def recorded(loaded: Loaded, directory: Path, cores: int | None = None) -> Iterator[Observer]:
    """An observer for `simulate` that writes the files of a real run to the new `directory`, so that any
    reader of runs works. Raises RefusedError if the directory exists."""
    profile, origins = loaded.profile, loaded.origins
    document, toml = to_document(profile, origins), to_toml(profile, origins)
    run = RunDirectory.create(directory.parent, directory.name, profile_toml=toml, resolved=document)
    with closing(run) as files:
        facts = replace(facts_of(profile, files.path, 1), profile=f"SIMULATED {profile.name}", cores=cores)
        sinks: list[Sink] = [MetricsFile(files.metrics), EventsFile(files.events)]
        sinks += [TimelineFile(files.timeline), _LastStatus(files.status)]
        observers, phase = Observers(facts, sinks, clock=_virtual_s), "failed"
        try:
            yield observers
            phase = "done"
        finally:
            observers.close(phase)


class _LastStatus(StatusFile):
    """Writes status.json only once, at the end, because nobody watches a simulated run."""

    status = Sink.status


def _virtual_s() -> float:
    """The time on the virtual clock, which begins at 0 with the simulation's event loop."""
    with suppress(RuntimeError):
        return asyncio.get_running_loop().time()
    return 0.0
