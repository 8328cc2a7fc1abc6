"""Simulated runs, as many at once as there are cores, each on a virtual clock of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.bench.bound import Capacities
from asyncrl_cli.bench.results import RunLines
from asyncrl_cli.bench.timeline import KeptTimeline, Timeline
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.references import Residual, residuals
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.world import simulate

TELL_EVERY_S = 0.2
POLL_S = 0.1

Progress = Callable[[str, int], None]
"""Told a run's name and the number of groups that it has trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """One run to simulate. `keep_timeline`: it is drawn."""

    profile: Profile
    workload: Workload
    seed: int
    groups: int
    keep_timeline: bool

    @property
    def name(self) -> str:
        return f"{self.profile.name}-s{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedResult:
    lines: RunLines
    capacities: Capacities
    timeline: Timeline | None
    virtual_s: float
    timer_events: int


def simulate_all(
    jobs: Sequence[SimulatedJob], workload: Workload, progress: Progress
) -> tuple[list[SimulatedResult], list[Residual]]:
    """Results in the order of `jobs`, and how well the workload fits its references.

    Raises what the first failing run raised; interrupted, it ends all of them first.
    """
    context = multiprocessing.get_context("spawn")
    told, ending = context.SimpleQueue(), context.Event()
    workers = min(len(jobs) + 1, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(told, ending)) as pool:
        try:
            running = [pool.submit(_simulate, job) for job in jobs]
            fit = pool.submit(residuals, workload)
            _follow([*running, fit], told, progress)
            return [future.result() for future in running], fit.result()
        except BaseException:
            ending.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _follow(running: Sequence[Future[Any]], told: Any, progress: Progress) -> None:
    """Until all have ended, or one has failed."""
    unfinished = set(running)
    while unfinished:
        ended, unfinished = wait(unfinished, timeout=POLL_S)
        while not told.empty():
            progress(*told.get())
        for future in ended:
            future.result()


class _EndedError(Exception):
    """In a pool's process: the bench was interrupted."""


_pool: dict[str, Any] = {}


def _begin(told: Any, ending: Any) -> None:
    """In each process of the pool. A Ctrl-C is the parent's to answer: it says so through `ending`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _pool.update(told=told, ending=ending)


def _simulate(job: SimulatedJob) -> SimulatedResult:
    kept = KeptTimeline()
    run = simulate(
        job.profile,
        job.workload,
        seed=job.seed,
        observers=(kept,) if job.keep_timeline else (),
        groups=job.groups,
        on_progress=_teller(job.name),
    )
    if run.error is not None:
        raise run.error
    _pool["told"].put((job.name, job.groups))
    return SimulatedResult(
        lines=RunLines(profile=job.profile.name, seed=job.seed, lines=run.lines),
        capacities=run.capacities,
        timeline=kept.timeline(job.profile.name, run.lines) if job.keep_timeline else None,
        virtual_s=run.virtual_s,
        timer_events=run.timer_events,
    )


def _teller(name: str) -> Callable[[int, float], None]:
    """Tells the parent now and then; ends the run where the parent wants it."""
    last_s = 0.0

    def tell(groups: int, virtual_s: float) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= TELL_EVERY_S:
            last_s = now_s
            _pool["told"].put((name, groups))
            if _pool["ending"].is_set():
                raise _EndedError

    return tell
