"""Simulated runs, as many at once as there are cores, each on a virtual clock of its own.

    jobs, references --longest first--> a pool of processes --> results and residuals, in the order that was asked for

A Ctrl-C is the parent's to answer: it ends the pool at once, since a simulated run leaves nothing that is worth keeping.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.bench.measure import Edges, stretch_of
from asyncrl_cli.bench.pool import interrupts_later, simulators
from asyncrl_cli.bench.real import terminating_as_interrupt
from asyncrl_cli.bench.reference_rows import ReferenceRow, rows_of
from asyncrl_cli.bench.results import RunLines
from asyncrl_cli.bench.timeline import KeptTimeline, Timeline
from asyncrl_cli.observe.bound import Capacities
from asyncrl_cli.plan.cluster import usable_cores
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.costs import Alone
from asyncrl_cli.simulate.references import Residual, residuals, window_parts
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

    @property
    def responses(self) -> int:
        """What a run's length in real time goes with."""
        return self.groups * self.profile.rollout.n


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedResult:
    """`parts_s`: mean seconds per window, by part of a step (`window_parts`); `alone`: what each phase does by itself."""

    lines: RunLines
    alone: Alone
    timeline: Timeline | None
    parts_s: Mapping[str, float]

    def capacities(self, edges: Edges) -> Capacities:
        """For the very groups that are measured: others have other lengths."""
        stretch = stretch_of(self.lines.lines, edges)
        end_groups = int(stretch.lines[-1]["groups_trained"])
        return self.alone.capacities(end_groups - stretch.groups, end_groups)


def simulate_all(
    jobs: Sequence[SimulatedJob], workload: Workload, progress: Progress
) -> tuple[list[SimulatedResult], list[Residual]]:
    """Results in the order of `jobs`, and how well the workload fits its references.

    Raises what the first failing run raised, and Interrupted; either way all other runs are ended first.
    """
    rows = rows_of(workload, [(job.profile, job.seed, job.groups) for job in jobs])
    tasks: list[SimulatedJob | ReferenceRow] = [*jobs, *(row for row in rows if row.job is None)]
    order = sorted(range(len(tasks)), key=lambda index: -tasks[index].responses)
    told = multiprocessing.get_context("spawn").SimpleQueue()
    size = min(len(tasks), usable_cores())
    with terminating_as_interrupt(), simulators(size, _begin, (told,)) as pool:
        with interrupts_later():
            running = {index: pool.submit(_make, tasks[index]) for index in order}
        _follow(list(running.values()), told, progress)
        results = [running[index].result() for index in range(len(tasks))]
    made = [result for result in results if isinstance(result, SimulatedResult)]
    others = [result for result in results if not isinstance(result, SimulatedResult)]
    return made, _residuals(rows, made, others)


def _residuals(rows: Sequence[ReferenceRow], made: Sequence[SimulatedResult], others: Sequence[list[Residual]]) -> list[Residual]:
    """In the order of the workload's references. `others`: of the rows that no run of the comparison answers."""
    remaining = iter(others)
    fits = [next(remaining) if row.job is None else row.residuals(made[row.job].parts_s) for row in rows]
    return [residual for fit in fits for residual in fit]


def _follow(running: Sequence[Future[Any]], told: Any, progress: Progress) -> None:
    """Until all have ended, or one has failed."""
    unfinished = set(running)
    while unfinished:
        ended, unfinished = wait(unfinished, timeout=POLL_S)
        while not told.empty():
            progress(*told.get())
        for future in ended:
            future.result()


_pool: dict[str, Any] = {}


def _begin(told: Any) -> None:
    """In each process of the pool."""
    _pool["told"] = told


def _make(task: SimulatedJob | ReferenceRow) -> SimulatedResult | list[Residual]:
    if isinstance(task, SimulatedJob):
        return _simulate(task)
    return residuals(task.workload)


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
        alone=run.alone,
        timeline=kept.timeline(job.profile.name, run.lines) if job.keep_timeline else None,
        parts_s=window_parts(run),
    )


def _teller(name: str) -> Callable[[int, float], None]:
    """Tells the parent now and then."""
    last_s = 0.0

    def tell(groups: int, virtual_s: float) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= TELL_EVERY_S:
            last_s = now_s
            _pool["told"].put((name, groups))

    return tell
