"""Whole runs drawn from a seed: a mode, sizes, lengths, delays, faults, a stop, a resume; every invariant checked on the way.

    python -m asyncrl_cli.simulate.scenarios SEED [--trace]

prints the scenario of a seed and runs it. The trace of events follows if an invariant broke, or with `--trace`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

from asyncrl_cli.errors import AsyncrlError, ExecutorFailed, Interrupted, StallError
from asyncrl_cli.loop.pipeline import Pipeline, ResumeFrom, World
from asyncrl_cli.loop.ports import Prompt
from asyncrl_cli.loop.settings import LoopSettings, OnStale
from asyncrl_cli.simulate.clock import VirtualTimeLoop, run_virtual
from asyncrl_cli.simulate.engine import DecodeTimes
from asyncrl_cli.simulate.faults import FATAL, Fault, FaultKind, Faults, draw_faults
from asyncrl_cli.simulate.invariants import InvariantError, Invariants
from asyncrl_cli.simulate.trainer import MemoryCheckpoints, SimulatedTrainer, TrainerTimes
from asyncrl_cli.simulate.watched import WatchedFeed, WatchedTrainer, WatchedWorker
from asyncrl_cli.simulate.workers import SimulatedWorker, WorkerTimes

MODES = ("on-policy-pipeline", "stream-off-policy", "stale-samples", "partial-rollout", "one-step-off", "colocate")
_MAX_TOKENS = 300
_MAX_LEGS = 4
_CALL_TIMEOUT_S = 200.0
"""Longer than any group, shorter than `stall_timeout_s`: what hangs is named before anybody wonders why nothing moves."""
_WEIGHTS_TIMEOUT_S = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One drawn run. Seconds are means where they are drawn per call. `resume_at`: at which share of its checkpoints to resume."""

    seed: int
    mode: str
    settings: LoopSettings
    num_workers: int
    slots: int
    num_eval_prompts: int
    lengths: str
    step_s: float
    speed_spread: float
    reward_s: float
    prefetch_lag_s: float
    load_lag_s: float
    failed_rewards: float
    train_s: float
    gather_s: float
    publish_s: float
    write_s: float
    faults: tuple[Fault, ...]
    stop_at_s: float | None
    resume_at: float | None
    shuffle_seed: int | None

    def __str__(self) -> str:
        shown = [name for name in (field.name for field in fields(self)) if name != "settings"]
        drawn = [f"  {name} = {getattr(self, name)}" for name in shown]
        loop = [f"  settings.{entry.name} = {getattr(self.settings, entry.name)}" for entry in fields(self.settings)]
        return "\n".join([*drawn, *loop])


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a scenario. `counts`: events by name; `faults`: those that really happened."""

    scenario: Scenario
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    errors: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    broken: BaseException | None = None


LENGTHS: Mapping[str, Callable[[random.Random], int]] = {
    "constant": lambda rng: 12,
    "pareto": lambda rng: min(int(5 * rng.paretovariate(1.2)), _MAX_TOKENS),
    "heavy pareto": lambda rng: min(int(3 * rng.paretovariate(0.8)), _MAX_TOKENS),
    "bimodal": lambda rng: 250 if rng.random() < 0.08 else 6,
}


def draw(seed: int) -> Scenario:
    rng = random.Random(f"scenario {seed}")
    mode = rng.choice(MODES)
    settings = _draw_settings(rng, mode)
    train_s = rng.choice((0.0, 0.2, 0.7, 2.0))
    expected_s = settings.train_steps * (train_s + 0.5)
    num_workers = rng.randint(1, 4)
    return Scenario(
        seed=seed,
        mode=mode,
        settings=settings,
        num_workers=num_workers,
        slots=settings.n * rng.randint(1, 3) + rng.randint(0, settings.n - 1),
        num_eval_prompts=rng.choice((0, 0, 0, 6, 20)),
        lengths=rng.choice(tuple(LENGTHS)),
        step_s=rng.choice((0.005, 0.02, 0.05)),
        speed_spread=rng.choice((0.0, 0.3)),
        reward_s=rng.choice((0.0, 0.0, 0.1, 1.5)),
        prefetch_lag_s=rng.choice((0.0, 0.3, 2.0)),
        load_lag_s=rng.choice((0.0, 0.2, 2.0)),
        failed_rewards=rng.choice((0.0, 0.0, 0.0, 0.1, 0.4)),
        train_s=train_s,
        gather_s=rng.choice((0.0, 0.1, 0.5)),
        publish_s=rng.choice((0.0, 0.1, 1.0)),
        write_s=rng.choice((0.0, 0.4, 3.0)),
        faults=_draw_faults(rng, settings, num_workers, expected_s),
        stop_at_s=rng.uniform(0, expected_s) if rng.random() < 0.2 else None,
        resume_at=rng.random() if rng.random() < 0.3 else None,
        shuffle_seed=rng.choice((None, rng.randrange(2**31))),
    )


def _draw_settings(rng: random.Random, mode: str) -> LoopSettings:
    is_ahead = mode in ("stale-samples", "partial-rollout")
    eta = rng.choice([Fraction(text) for text in ("1/4", "1/2", "1", "2", "3")]) if is_ahead else Fraction(mode == "one-step-off")
    step_groups = rng.randint(1, 3) * rng.choice((1, 1, 2))
    has_steps = {"on-policy-pipeline": 1, "one-step-off": 1, "stream-off-policy": rng.randint(2, 4)}
    policies: tuple[OnStale, ...] = ("wait", "wait", "wait", "accept", "drop", "requeue")
    on_stale: OnStale = rng.choice(policies) if eta else "wait"
    return LoopSettings(
        seed=rng.randrange(2**31),
        step_groups=step_groups,
        window_steps=has_steps.get(mode, rng.randint(1, 4)),
        train_steps=rng.randint(3, min(20, 48 // step_groups)),
        eta=eta,
        max_staleness=-(-eta.numerator // eta.denominator) + (rng.choice((0, 0, 0, 1, 2)) if eta else 0),
        n=rng.randint(2, 4),
        colocate=mode == "colocate",
        interrupt=rng.choice(("keep-kv", "recompute-kv")) if mode == "partial-rollout" else "drain",
        on_stale=on_stale,
        max_requeues=rng.randint(0, 2),
        on_exhausted=rng.choice(("drop", "drop", "fail")),
        prefetch_groups=rng.choice((0, 0, 1, 2)),
        max_failed_ratio=0.95,
        checkpoint_every_steps=rng.choice((0, 1, 3)),
        eval_every_versions=rng.choice((0, 1, 2)),
        eval_timeout_s=rng.choice((0.5, 60.0)),
    )


def _draw_faults(rng: random.Random, settings: LoopSettings, num_workers: int, expected_s: float) -> tuple[Fault, ...]:
    """None in half of the scenarios."""
    if rng.random() < 0.5:
        return ()
    drawn = draw_faults(
        rng.randrange(2**31),
        workers=_worker_names(num_workers),
        until_s=expected_s,
        loads=settings.train_steps // settings.window_steps,
        groups=settings.total_groups // num_workers,
        steps=settings.train_steps,
    )
    return tuple(drawn.pending)


def _worker_names(num_workers: int) -> list[str]:
    return [f"rollout-{i}" for i in range(num_workers)]


class CountingFeed:
    """Implements `loop.ports.Feed`: prompts p0, p1, ...; which one comes next is all its state."""

    def __init__(self) -> None:
        self._given = 0

    def next(self) -> Prompt:
        self._given += 1
        return Prompt(uid=f"p{self._given - 1}", epoch=0, item={"prompt": str(self._given - 1)})

    def state(self) -> dict[str, Any]:
        return {"given": self._given}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._given = state["given"]


def run(scenario: Scenario) -> Outcome:
    """Run a scenario; while it ends early, and once if it is drawn so, resume it from a checkpoint and run that."""
    outcome, faults = Outcome(scenario=scenario), Faults(scenario.faults)
    resume_from: ResumeFrom | None = None
    try:
        for leg in range(_MAX_LEGS):
            cuts, error = _leg(scenario, outcome, faults, leg, resume_from)
            cut = _cut_to_resume(scenario, cuts, error, leg)
            if cut is None:
                break
            resume_from = ResumeFrom(loop_state=cut[1], payloads=cut[0].payloads)
    except Exception as error:
        outcome.broken = error
    outcome.faults.update({kind.value: count for kind, count in faults.happened.items()})
    return outcome


def _cut_to_resume(scenario: Scenario, cuts: Sequence[Any], error: BaseException | None, leg: int) -> Any | None:
    """The last checkpoint of a run that ended early; of one that is done, any, as if it had crashed some time after it."""
    if not cuts:
        return None
    if error is not None:
        return cuts[-1]
    return cuts[int(scenario.resume_at * len(cuts))] if scenario.resume_at is not None and leg == 0 else None


def _leg(
    scenario: Scenario, outcome: Outcome, faults: Faults, leg: int, resume_from: ResumeFrom | None
) -> tuple[list[Any], AsyncrlError | None]:
    """One run of the loop. Returns its checkpoints and what it raised, for a reason that the scenario explains."""

    async def main() -> tuple[list[Any], AsyncrlError | None]:
        slots = dict.fromkeys(_worker_names(scenario.num_workers), scenario.slots)
        invariants = Invariants(scenario.settings, slots, seed=scenario.seed)
        try:
            return await _run_leg(scenario, invariants, faults, leg, resume_from)
        finally:
            outcome.counts += invariants.counts + Counter({"runs": 1})
            outcome.virtual_s += asyncio.get_running_loop().time()
            outcome.trace += [f"{time_s:10.3f}  {text}" for time_s, text in invariants.trace]

    shuffle_seed = None if scenario.shuffle_seed is None else scenario.shuffle_seed + leg
    cuts, error = run_virtual(main(), shuffle_seed=shuffle_seed)
    if error is not None:
        outcome.errors.append(f"{type(error).__name__}: {error}")
        outcome.counts[f"ended by {type(error).__name__}"] += 1
    return cuts, error


async def _run_leg(
    scenario: Scenario, invariants: Invariants, faults: Faults, leg: int, resume_from: ResumeFrom | None
) -> tuple[list[Any], AsyncrlError | None]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    checkpoints, pending = MemoryCheckpoints(write_s=scenario.write_s), list(faults.pending)
    pipeline = Pipeline(scenario.settings, _world(scenario, invariants, faults, checkpoints, leg, resume_from))
    loop.explain = pipeline.who_waits
    invariants.watch(pipeline)
    if scenario.stop_at_s is not None and leg == 0:
        loop.call_later(scenario.stop_at_s, _stop, pipeline, invariants)
    error: AsyncrlError | None = None
    try:
        await pipeline.run()
    except AsyncrlError as raised:
        error = raised
    except Exception as raised:
        raise (invariants.violation or raised) from raised
    happened = [fault for fault in pending if fault not in faults.pending]
    invariants.end(error, _stop_limit_s(scenario, happened))
    _check_explained(scenario, invariants, error, happened)
    if error is not None and not any(fault.kind is FaultKind.STEP_FAILS for fault in happened):
        _check_last_cut(invariants, [cut.step for cut, _ in checkpoints.cuts], is_resumed=resume_from is not None)
    return checkpoints.cuts, error


def _stop(pipeline: Pipeline, invariants: Invariants) -> None:
    invariants.stop_requested()
    pipeline.request_stop()


def _stop_limit_s(scenario: Scenario, happened: Sequence[Fault]) -> float:
    """A stop waits for the train step, a gather, publishes and checkpoints under way; not for any rollout."""
    if any(fault.kind is FaultKind.WORKER_HANGS for fault in happened):
        return scenario.settings.stop_grace_s + 2
    stall_s = scenario.gather_s + 2 * scenario.publish_s + 2 * scenario.write_s
    return scenario.train_s + stall_s + 0.1


def _check_explained(scenario: Scenario, invariants: Invariants, error: AsyncrlError | None, happened: Sequence[Fault]) -> None:
    """Nothing fails without a fault, and what a fatal fault ends says whose fault it is."""
    fatal = [fault for fault in happened if fault.kind in FATAL]
    settings, message = scenario.settings, f"{type(error).__name__}: {error}, after {happened}"
    if error is None or isinstance(error, Interrupted):
        is_quiet = all(fault.kind is FaultKind.WORKER_HANGS for fault in fatal)
        invariants.check(is_quiet or error is not None, "ends", f"no error after {fatal}")
        holds = error is None or (invariants.stop_s is not None and not invariants.failed_with)
    elif isinstance(error, ExecutorFailed):
        holds = any(str(error).startswith(f"{fault.executor} failed: ") for fault in fatal)
    elif isinstance(error, StallError):
        holds = any(fault.kind is FaultKind.WORKER_HANGS for fault in fatal)
    else:
        holds = "requeued" in str(error) and (settings.on_stale, settings.on_exhausted) == ("requeue", "fail")
    invariants.check(holds, "ends", f"nothing explains {message}")


def _check_last_cut(invariants: Invariants, steps: Sequence[int], *, is_resumed: bool) -> None:
    """Whatever ends a run whose trainer is whole: its last step is in a checkpoint (or in the one that it was resumed from)."""
    is_kept = bool(steps) and steps[-1] == invariants.step_number
    never_moved = is_resumed and not invariants.counts["steps"]
    invariants.check(is_kept or never_moved, "cut", f"ended after step {invariants.step_number}, checkpoints of steps {steps}")


def _world(
    scenario: Scenario,
    invariants: Invariants,
    faults: Faults,
    checkpoints: MemoryCheckpoints,
    leg: int,
    resume_from: ResumeFrom | None,
) -> World:
    times, on_the_way = _worker_times(scenario), Counter[int]()
    seed, limit_s = scenario.seed + 2**32 * leg, _load_limit_s(scenario)
    workers = [SimulatedWorker(name, scenario.slots, times, seed, faults) for name in _worker_names(scenario.num_workers)]
    trainer = SimulatedTrainer(_trainer_times(scenario), faults=faults)
    return World(
        feed=WatchedFeed(CountingFeed(), invariants),
        trainer=WatchedTrainer(trainer, invariants),
        workers=[WatchedWorker(worker, invariants, on_the_way, limit_s) for worker in workers],
        eval_items=[{"prompt": str(i)} for i in range(scenario.num_eval_prompts)],
        observers=[invariants],
        checkpoints=checkpoints,
        resume_from=resume_from,
    )


def _worker_times(scenario: Scenario) -> WorkerTimes:
    length, step_s = LENGTHS[scenario.lengths], scenario.step_s
    return WorkerTimes(
        decoding=DecodeTimes(step_s=step_s, step_s_per_sequence=step_s / 20, prefill_s_per_token=step_s / 50),
        response_tokens=lambda rng, n: [length(rng) for _ in range(n)],
        reward_s=lambda rng: rng.random() * 2 * scenario.reward_s,
        failure_ratio=scenario.failed_rewards,
        prefetch_s=lambda rng: rng.random() * 2 * scenario.prefetch_lag_s,
        load_s=lambda rng: rng.random() * 2 * scenario.load_lag_s,
        speed_spread=scenario.speed_spread,
        call_timeout_s=_CALL_TIMEOUT_S,
        weights_timeout_s=_WEIGHTS_TIMEOUT_S,
    )


def _trainer_times(scenario: Scenario) -> TrainerTimes:
    return TrainerTimes(train_s=lambda batch: scenario.train_s, gather_s=scenario.gather_s, publish_s=scenario.publish_s)


def _load_limit_s(scenario: Scenario) -> float:
    """A load waits for the longest sequence that runs (drain) at the slowest that its engine gets, then copies."""
    slowest_s = 2 * scenario.step_s * (1 + scenario.slots / 20)
    slow_s = sum(fault.seconds for fault in scenario.faults if fault.kind is FaultKind.SLOW_LOAD)
    return _MAX_TOKENS * slowest_s + 2 * scenario.load_lag_s + slow_s + 0.1


def main(arguments: Sequence[str]) -> int:
    seeds = [int(argument) for argument in arguments if not argument.startswith("--")]
    broken = 0
    for seed in seeds:
        outcome = run(draw(seed))
        print(f"seed {seed}\n{outcome.scenario}")
        if outcome.broken is not None or "--trace" in arguments:
            print("\n".join(outcome.trace))
        print(f"{dict(outcome.counts)}\nended with {outcome.errors or 'no error'}; broken: {outcome.broken!r}")
        if outcome.broken is not None and not isinstance(outcome.broken, InvariantError):
            raise outcome.broken
        broken += outcome.broken is not None
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
