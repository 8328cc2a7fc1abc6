"""Deterministic runs (`run.deterministic`) on the virtual clock: what is trained does not depend on time.

    python -m tests.loop.proof.logical SEED...

A scenario is drawn as any other (`drawing.py`), and made deterministic. Another one has the same profile,
prompts and responses, and everything else is drawn anew: workers, slots, speeds, delays, faults, the order of
what happens at once. Both are run, through deaths and stops, and resumed from checkpoints until they are
done. What every train step was given has to be the same in both, and in every repetition of a step after a
resume. The versions of all tokens are also computed from the scenario alone.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import ceil, floor
from typing import Any

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, Interrupted
from asyncrl_cli.contracts.events import Event, Observer, StepRecord
from asyncrl_cli.contracts.prompt_group import TrainBatch, TrainReport
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import ResumeFrom, World
from asyncrl_cli.measure.states import ExecutorReport
from asyncrl_cli.simulate.simulated_worker import SimulatedStore
from asyncrl_cli.simulate.world import run_virtual
from tests.loop.keywords import changed
from tests.loop.proof.drawing import Scenario, draw, worker_names
from tests.loop.proof.faults import FaultKind, Faults, FaultyWorker, KeepingTrainer, draw_worker_faults
from tests.loop.proof.memory import MemoryCheckpoints, resume_from
from tests.loop.proof.scenarios import feed_of, trainer_times, worker_times
from tests.loop.proof.shuffled import loop_of

_MAX_LEGS = 40
Group = tuple[Any, ...]
Steps = dict[int, tuple[Group, ...]]
"""By step: its groups, each with its key and, for each trajectory, its tokens per version and reward."""


class LogicalError(AssertionError):
    """A run was not what it should be."""


@dataclass(slots=True, kw_only=True)
class LogicalOutcome:
    scenario: Scenario
    steps: Steps = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    errors: list[str] = field(default_factory=list)
    broken: BaseException | None = None


def draw_logical(seed: int) -> Scenario:
    """The scenario of that seed, with what a deterministic run refuses left out."""
    drawn, rng = draw(seed), random.Random(f"logical {seed}")
    settings = changed(
        drawn.settings,
        deterministic=True,
        on_stale="wait",
        target_kl=None,
        mixed_versions="train",
        interrupt="recompute-kv" if drawn.mode == "partial-rollout" else "drain",
        min_workers=None,
        max_response_tokens=rng.choice((10, 40, 300)),
        max_restarts=3,
        max_failed_ratio=1.0,
        max_num_gen_batches=1000,
        checkpoint_every_steps=rng.choice((0, 1, 3)),
        call_timeout_s=200.0,
    )
    kinds = (FaultKind.SLOW_LOAD, FaultKind.LATE_PREFETCH, FaultKind.REPEATED_PREFETCH, FaultKind.STEP_FAILS)
    faults = tuple(fault for fault in drawn.faults if fault.kind in kinds)
    made = _with_deaths(replace(drawn, settings=settings, scorers=(), faults=faults), rng)
    return _without_resumes(made) if made.max_turns > 1 and made.mode == "partial-rollout" else made


def elsewhere(scenario: Scenario, number: int) -> Scenario:
    """The same run at another time, on other machines."""
    rng = random.Random(f"elsewhere {scenario.seed} {number}")
    num_workers, n = rng.randint(1, 5), scenario.settings.profile.rollout.n
    changes = dict(
        num_workers=num_workers,
        slots=rng.randint(-(-n // num_workers), 3 * n),
        step_s=rng.choice((0.005, 0.02, 0.05)),
        speed_spread=rng.choice((0.0, 0.3)),
        reward_s=rng.choice((0.0, 0.1, 1.5)),
        prefetch_lag_s=rng.choice((0.0, 0.3, 2.0)),
        load_lag_s=rng.choice((0.0, 0.2, 2.0)),
        train_s=rng.choice((0.0, 0.2, 0.7, 2.0)),
        gather_s=rng.choice((0.0, 0.1, 0.5)),
        publish_s=rng.choice((0.0, 0.1, 1.0)),
        write_s=rng.choice((0.0, 0.4, 3.0)),
        restart_s=rng.choice((0.0, 1.0, 20.0)),
        shuffle_seed=rng.randrange(2**31),
        stop_at_s=rng.uniform(0, 20) if rng.random() < 0.2 else None,
        num_eval_prompts=rng.choice((0, 6)),
    )
    settings = changed(
        scenario.settings,
        weights_mode=rng.choice(("async", "sync")),
        checkpoint_every_steps=rng.choice((0, 1, 3)),
        hold_slots=rng.random() < 0.5,
    )
    made = _with_deaths(replace(scenario, settings=settings, faults=(), **changes), rng)
    return _without_resumes(made) if made.max_turns > 1 and made.mode == "partial-rollout" else made


def _without_resumes(scenario: Scenario) -> Scenario:
    """Episodes of several turns begin again in a resumed run, so with partial rollouts it is another one."""
    faults = tuple(fault for fault in scenario.faults if fault.kind is not FaultKind.STEP_FAILS)
    return replace(scenario, faults=faults, stop_at_s=None)


def _with_deaths(scenario: Scenario, rng: random.Random) -> Scenario:
    if rng.random() < 1 / 3:
        return scenario
    deaths = draw_worker_faults(
        rng,
        workers=worker_names(scenario.num_workers),
        at_most=2,
        until_s=scenario.settings.schedule.train_steps * (scenario.train_s + 0.5),
        loads=scenario.settings.schedule.syncs,
    )
    return replace(scenario, faults=(*scenario.faults, *deaths))


def run_logical(scenario: Scenario) -> LogicalOutcome:
    """Run to the end. After an early end it is resumed from its last checkpoint that repeats the run."""
    outcome, faults = LogicalOutcome(scenario=scenario), Faults(scenario.faults)
    snapshot: Any = None
    try:
        for leg in range(_MAX_LEGS):
            snapshots, error = _leg(scenario, outcome, faults, leg, snapshot)
            snapshot = snapshots[-1] if snapshots else snapshot
            if error is None:
                break
            outcome.errors.append(f"{type(error).__name__}: {error}")
            if not isinstance(error, Interrupted | ExecutorFailed):
                raise error
        else:
            raise LogicalError(f"{_MAX_LEGS} runs have not come to the end: {outcome.errors}")
        check_versions(scenario, outcome.steps)
    except Exception as broken:
        outcome.broken = broken
    outcome.faults.update({kind.value: count for kind, count in faults.happened.items()})
    return outcome


def differences(first: LogicalOutcome, second: LogicalOutcome) -> str:
    """The first step in which the runs differ; "" if they are equal."""
    for step in sorted(first.steps.keys() | second.steps.keys()):
        if (one := first.steps.get(step)) != (other := second.steps.get(step)):
            return f"step {step}: {one} and {other}"
    return ""


def check_versions(scenario: Scenario, steps: Steps) -> None:
    """Which version sampled which token, computed from the place of each group in the run."""
    settings = scenario.settings
    schedule, training, rollout = settings.schedule, settings.profile.async_training, settings.profile.rollout
    window, eta = schedule.window_groups, float(schedule.eta)
    budget = window + floor(eta * window + 1e-9)
    stretch = ceil(rollout.max_response_tokens / (ceil(eta) + 1))
    if sorted(steps) != [*range(1, schedule.train_steps + 1)]:
        raise LogicalError(f"the steps {sorted(steps)} were trained")
    groups = list(chain.from_iterable(steps[step] for step in sorted(steps)))
    if len({key for key, *_ in groups}) != len(groups):
        raise LogicalError("a group was trained twice")
    for position, (key, *trajectories) in enumerate(groups):
        trained = position // window
        entered = max(0, -(-(position + 1 - budget) // window))
        may_be_replaced = settings.profile.algorithm.filter_groups or scenario.failed_rewards
        may_be_replaced = may_be_replaced or scenario.failing_tools or scenario.hanging_tools
        may_be_replaced = may_be_replaced or training.mixed_versions == "reject"
        for tokens, _ in trajectories:
            length, allowed = sum(count for _, count in tokens), []
            for first in {entered, trained} if may_be_replaced else {entered}:
                last = trained if training.partial_rollout else first
                versions = Counter(min(first + token // stretch, last) for token in range(length))
                allowed.append(tuple(sorted(versions.items())))
            if tokens not in allowed:
                raise LogicalError(f"{key} at {position} has tokens {tokens}, should be one of {allowed}")


class _RecordingTrainer(KeepingTrainer):
    """Records what each step is given, and holds repeated steps against it."""

    def __init__(self, scenario: Scenario, faults: Faults, outcome: LogicalOutcome) -> None:
        super().__init__(trainer_times(scenario), faults)
        self._outcome = outcome

    async def train(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        given = tuple(
            (group.key, *((meta.version_tokens, meta.reward) for meta in group.trajectories))
            for group in batch.groups
        )
        before = self._outcome.steps.setdefault(batch.step, given)
        if before != given:
            raise LogicalError(f"step {batch.step} was {before}, and after a resume {given}")
        self._outcome.counts["steps"] += 1
        return await super().train(batch)


class _Heard(Observer):
    """Counts events; `inexact`: the steps of checkpoints that do not repeat the run."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts, self.inexact = counts, set[int]()

    def event(self, event: Event) -> None:
        self.counts[event.name] += 1
        if event.name == "warning" and "bit for bit" in event.fields["message"]:
            assert event.step is not None
            self.inexact.add(event.step)

    def step(self, record: StepRecord) -> None:
        live = {name: count for name, count in record.ledger.items() if name != "admitted_total"}
        if sum(live.values()) != record.ledger["admitted_total"]:
            raise LogicalError(f"the ledger does not add up: {record.ledger}")

    def tick(self, overview: object) -> None: ...

    def state(self, record: StepRecord | None = None) -> dict[str, Any]:
        return {}

    def restore(self, state: object) -> None: ...


def _leg(
    scenario: Scenario, outcome: LogicalOutcome, faults: Faults, leg: int, snapshot: Any
) -> tuple[list[Any], AsyncrlError | None]:
    async def main() -> tuple[list[Any], AsyncrlError | None]:
        heard, checkpoints = _Heard(outcome.counts), MemoryCheckpoints(scenario.write_s)
        resume = resume_from(*snapshot) if snapshot else None
        pipeline = Pipeline(
            scenario.settings, _world(scenario, outcome, faults, checkpoints, heard, leg, resume)
        )
        if scenario.stop_at_s is not None and leg == 0:
            asyncio.get_running_loop().call_later(scenario.stop_at_s, pipeline.request_stop)
        error: AsyncrlError | None = None
        try:
            await pipeline.run()
        except AsyncrlError as raised:
            error = raised
        outcome.virtual_s += asyncio.get_running_loop().time()
        outcome.counts["runs"] += 1
        outcome.counts["inexact checkpoints"] += len(heard.inexact)
        exact = [one for one in checkpoints.snapshots if one[0].step not in heard.inexact]
        return exact, error

    shuffle_seed = None if scenario.shuffle_seed is None else scenario.shuffle_seed + leg
    return run_virtual(main(), loop_factory=loop_of(shuffle_seed))


def _world(
    scenario: Scenario,
    outcome: LogicalOutcome,
    faults: Faults,
    checkpoints: MemoryCheckpoints,
    heard: Observer,
    leg: int,
    resume: ResumeFrom | None,
) -> World:
    data, times = SimulatedStore(), worker_times(scenario)
    for key in chain.from_iterable(resume.payloads if resume else ()):
        data.put(key)
    names = worker_names(scenario.workers_of(leg))
    met = {"faults": faults, "call_timeout_s": 200.0, "store": data}
    return World(
        feed=feed_of(scenario),
        trainer=_RecordingTrainer(scenario, faults, outcome),
        workers=[FaultyWorker(name, scenario.slots, times, scenario.seed + leg, **met) for name in names],
        eval_sets={"": [{"uid": f"e{i}", "prompt": str(i)} for i in range(scenario.num_eval_prompts)]},
        observers=[heard],
        checkpoints=checkpoints,
        data=data,
        resume_from=resume,
    )


def pair(seed: int) -> tuple[LogicalOutcome, LogicalOutcome, str]:
    """A scenario run here and elsewhere, and what is wrong; "" if nothing is."""
    here = run_logical(draw_logical(seed))
    there = run_logical(elsewhere(here.scenario, 1))
    broken = here.broken or there.broken
    return here, there, f"{type(broken).__name__}: {broken}" if broken else differences(here, there)


def main(arguments: Sequence[str]) -> int:
    for seed in map(int, arguments):
        here, there, wrong = pair(seed)
        for outcome in (here, there):
            print(f"seed {seed}\n{outcome.scenario}\n{dict(outcome.counts)}\n{outcome.errors}")
        print(wrong or "equal")
        if broken := here.broken or there.broken:
            raise broken
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
