"""Measures the driver's own CPU time on a cluster too large to rent: does it grow linearly with the groups?

    python benchmarks/control_plane.py [--workers 64 128 256 512] [--windows 20] [--profile NUM_WORKERS]

Runs the real loop in virtual time over simulated workers of 64 slots each, with W = 4 groups of 16 per
worker: 512 workers have 32,768 trajectories running at once. Workers report as often as real ones
(`measure.meters`).

The measurement is one run in one thread. Every stretch of executor code (each resumption of a call to a port,
each timer of an executor) is timed with `time.thread_time`. The rest of the run's CPU time is the driver's:
the loop, its observers' metrics and the (virtual) event loop. The cost of the timing itself is estimated on
empty stretches beforehand and subtracted from both sides. The cost of a transport (pickling, RPC) is not
included.

Two figures show whether the growth is linear. Python calls per group, counted by a profiler in a second,
shorter run, are exact: they are the cost of the algorithms. CPU time per group also includes the cache misses
of a larger working set. The executors' CPU time per group shows how much these cost, because their work per
group is the same at any size.

`--profile` instead runs one size under cProfile and prints the functions that take the most time.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import random
import time
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl_cli.contracts.events import Observer, Overview, StepRecord
from asyncrl_cli.job.driver_process import collect_garbage_seldom
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import World
from asyncrl_cli.observe.metrics import StepMetrics
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.responses import ResponseLengths, WorkerTimes
from asyncrl_cli.simulate.simulated_trainer import SimulatedTrainer, TrainerTimes
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from asyncrl_cli.simulate.workload import Decoding, Lengths
from asyncrl_cli.simulate.world import NumberedFeed, VirtualTimeLoop

SLOTS, N, WINDOW_STEPS = 64, 16, 4
LENGTHS = Lengths(distribution="lognormal", median_tokens=500.0, sigma=0.8, prompt_tokens=128)
MAX_RESPONSE_TOKENS = 4096
DECODING = Decoding(step_s=0.02, step_s_per_sequence=1e-4, prefill_s_per_token=1e-5, speed_spread=0.05)
TRAIN_S = 3.0
COUNTED_WINDOWS = 5
MOST_GROWTH = 1.1
EXECUTORS = ("asyncrl_cli.simulate.", "asyncrl_cli.measure.meters")
PORT_CALLS = ("abort", "next_update", "prefetch", "load", "train", "gather", "publish", "report")


class Stopwatch:
    """CPU seconds of executor code, and how many stretches they are the sum of."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.stretches = 0

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        began_s = time.thread_time()
        try:
            callback(*args)
        finally:
            self.seconds += time.thread_time() - began_s
            self.stretches += 1

    @types.coroutine
    def run(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Awaits `work`, timing every resumption of it."""
        resume: Callable[[], Any] = partial(work.send, None)
        while True:
            began_s = time.thread_time()
            try:
                awaited = resume()
            except StopIteration as end:
                return end.value
            finally:
                self.seconds += time.thread_time() - began_s
                self.stretches += 1
            try:
                yield awaited
                resume = partial(work.send, None)
            except BaseException as error:
                resume = partial(work.throw, error)


class TimedPort:
    """An executor whose calls are timed."""

    def __init__(self, executor: Any, stopwatch: Stopwatch) -> None:
        self.name = getattr(executor, "name", "")
        self.slots = getattr(executor, "slots", 0)
        for name in PORT_CALLS:
            if hasattr(executor, name):
                setattr(self, name, partial(self._timed, getattr(executor, name), stopwatch))
        if hasattr(executor, "submit"):
            self.submit = partial(stopwatch.call, executor.submit)

    @staticmethod
    def _timed(
        call: Callable[..., Coroutine[Any, Any, Any]], stopwatch: Stopwatch, *args: Any
    ) -> Generator[Any, Any, Any]:
        return stopwatch.run(call(*args))


class TimedLoop(VirtualTimeLoop):
    """Times the timers of executors."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        super().__init__()
        self._stopwatch = stopwatch

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if type(getattr(callback, "__self__", None)).__module__.startswith(EXECUTORS):
            return super().call_at(when, self._stopwatch.call, callback, *args, context=context)
        return super().call_at(when, callback, *args, context=context)


class Watcher(Observer):
    """The metrics of every step, as a real run has them, and the most that ran at once."""

    def __init__(self) -> None:
        self.most_running = 0
        self._metrics = StepMetrics(trigger_parameter_sync_step=WINDOW_STEPS, started_s=0.0)

    def step(self, record: StepRecord) -> None:
        self._metrics.update(record)

    def tick(self, overview: Overview) -> None:
        running = sum(int(report.gauges.get("running_sequences", 0)) for report in overview.reports.values())
        self.most_running = max(self.most_running, running)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    workers: int
    running: int
    groups: int
    total_s: float
    executors_s: float
    driver_s: float
    stretches: int
    virtual_s: float
    calls_per_group: float

    @property
    def driver_ms_per_1000_groups(self) -> float:
        return 1e6 * self.driver_s / self.groups


def settings(num_workers: int, windows: int) -> LoopSettings:
    """W is what all slots hold; half a window may be ahead, so that slots and not the window close
    admission."""
    tables = {
        "run": {"train_steps": WINDOW_STEPS * windows},
        "trainer": {"ppo_mini_batch_size": num_workers * SLOTS // N // WINDOW_STEPS},
        "rollout": {"n": N, "prefetch_groups": 2},
        "async_training": {
            "trigger_parameter_sync_step": WINDOW_STEPS,
            "staleness_threshold": 0.5,
            "partial_rollout": True,
        },
        "checkpoint": {"every_steps": 0},
    }
    return LoopSettings.of(Profile.model_validate(tables))


def worker_times() -> WorkerTimes:
    return WorkerTimes(
        decoding=DECODING,
        response_tokens=ResponseLengths(LENGTHS, MAX_RESPONSE_TOKENS),
        prompt_tokens=LENGTHS.prompt_tokens,
        prefetch_s=lambda rng: 1 + rng.random(),
        load_s=lambda rng: 0.5 + 0.2 * rng.random(),
    )


async def run(
    num_workers: int, windows: int, watcher: Watcher, seen: Callable[[Any], Any] = lambda executor: executor
) -> float:
    """Returns the virtual seconds it took. `seen`: an executor as the loop sees it."""
    times = worker_times()
    workers = [SimulatedWorker(f"rollout-{index}", SLOTS, times, 0) for index in range(num_workers)]
    trainer = SimulatedTrainer(TrainerTimes(train_s=lambda batch: TRAIN_S, gather_s=0.5, publish_s=0.5))
    world = World(
        feed=NumberedFeed(), trainer=seen(trainer), workers=list(map(seen, workers)), observers=[watcher]
    )
    await Pipeline(settings(num_workers, windows), world).run()
    return asyncio.get_running_loop().time()


def measure(num_workers: int, windows: int) -> Measured:
    """Garbage of an earlier size is no part of it."""
    gc.collect()
    stopwatch, watcher = Stopwatch(), Watcher()
    shown_s, taken_s = cost_of_a_stretch()
    began_s = time.thread_time()
    with asyncio.Runner(loop_factory=lambda: TimedLoop(stopwatch)) as runner:
        virtual_s = runner.run(
            run(num_workers, windows, watcher, lambda executor: TimedPort(executor, stopwatch))
        )
    spent_s = time.thread_time() - began_s
    executors_s = stopwatch.seconds - stopwatch.stretches * shown_s
    total_s = spent_s - stopwatch.stretches * taken_s
    return Measured(
        workers=num_workers,
        running=watcher.most_running,
        groups=settings(num_workers, windows).schedule.groups,
        total_s=total_s,
        executors_s=executors_s,
        driver_s=total_s - executors_s,
        stretches=stopwatch.stretches,
        virtual_s=virtual_s,
        calls_per_group=calls_per_group(num_workers),
    )


def calls_per_group(num_workers: int) -> float:
    """Python and C function calls of the loop and the executors."""
    calls = sum(entry.callcount for entry in profiled(num_workers, COUNTED_WINDOWS).getstats())
    return calls / settings(num_workers, COUNTED_WINDOWS).schedule.groups


def profiled(num_workers: int, windows: int) -> cProfile.Profile:
    profiler = cProfile.Profile()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        profiler.enable()
        runner.run(run(num_workers, windows, Watcher()))
        profiler.disable()
    return profiler


def cost_of_a_stretch(repeats: int = 200_000) -> tuple[float, float]:
    """CPU seconds of an empty stretch: what it adds to the stopwatch, and what timing it takes in all."""
    stopwatch, nothing = Stopwatch(), random.Random(0).random
    began_s = time.thread_time()
    for _ in range(repeats):
        nothing()
    bare_s = time.thread_time() - began_s
    began_s = time.thread_time()
    for _ in range(repeats):
        stopwatch.call(nothing)
    taken_s = time.thread_time() - began_s - bare_s
    return max(0.0, stopwatch.seconds - bare_s) / repeats, taken_s / repeats


def table(rows: list[Measured]) -> str:
    head = (
        f"{'workers':>7}  {'running':>7}  {'groups':>7}  {'virtual s':>9}  {'total CPU s':>11}  "
        f"{'executors s':>11}"
        f"  {'driver s':>8}  {'driver ms per 1,000 groups':>26}  {'calls per group':>15}"
    )
    lines = [head]
    for row in rows:
        lines.append(
            f"{row.workers:>7}  {row.running:>7,}  {row.groups:>7,}  {row.virtual_s:>9,.0f}  "
            f"{row.total_s:>11.2f}"
            f"  {row.executors_s:>11.2f}  {row.driver_s:>8.2f}  {row.driver_ms_per_1000_groups:>26,.0f}"
            f"  {row.calls_per_group:>15,.0f}"
        )
    return "\n".join(lines)


def verdict(rows: list[Measured]) -> str:
    """The last row against the first."""
    first, last = rows[0], rows[-1]
    calls = last.calls_per_group / first.calls_per_group
    driver = last.driver_ms_per_1000_groups / first.driver_ms_per_1000_groups
    executors = (last.executors_s / last.groups) / (first.executors_s / first.groups)
    grows = "linearly with the groups" if calls < MOST_GROWTH else "faster than the groups"
    return (
        f"{last.workers / first.workers:g} times the workers and groups: {calls:.2f} times the calls per "
        "group, the work grows "
        f"{grows}\n"
        f"CPU per group: {driver:.2f} times the driver's; {executors:.2f} times the executors', whose work "
        "per group is the same"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--profile", type=int, metavar="NUM_WORKERS")
    options = parser.parse_args()
    collect_garbage_seldom()  # as the driver of a real run does
    if options.profile is not None:
        pstats.Stats(profiled(options.profile, options.windows)).sort_stats("tottime").print_stats(30)
        return
    rows: list[Measured] = []
    for num_workers in options.workers:
        rows.append(measure(num_workers, options.windows))
        print(table(rows).splitlines()[-1] if len(rows) > 1 else table(rows), flush=True)
    if len(rows) > 1:
        print(verdict(rows))


if __name__ == "__main__":
    main()
