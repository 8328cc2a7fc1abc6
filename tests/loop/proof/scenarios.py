"""Whole runs of scenarios (`tests.loop.proof.drawing`), with every invariant checked on the way.

    python -m tests.loop.proof.scenarios SEED [--turns] [--scorer] [--trace]

prints the scenario of a seed (`--turns`: for certain with several turns, `--scorer`: with a scorer) and runs
it. The trace of events follows if an invariant broke, or with `--trace`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from asyncrl_cli.base.errors import (
    AsyncrlError,
    ExecutorFailed,
    Interrupted,
    NoRoom,
    RefusedError,
    StallError,
)
from asyncrl_cli.contracts.item import Item, make_item
from asyncrl_cli.contracts.ports import Feed
from asyncrl_cli.job.driver_prompts import PromptFeed
from asyncrl_cli.loop.data_keys import SETTLE_S
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import ResumeFrom, World
from asyncrl_cli.profile.arithmetic import CRITIC, REWARD, mixed_requeues, mixes
from asyncrl_cli.simulate.responses import WorkerTimes
from asyncrl_cli.simulate.sequences import UNLIMITED, CacheSize, ToolWait
from asyncrl_cli.simulate.simulated_trainer import ScorerTimes, TrainerTimes
from asyncrl_cli.simulate.workload import Decoding
from asyncrl_cli.simulate.world import NumberedFeed, run_virtual
from tests.loop.keywords import changed
from tests.loop.proof.causes import Watching
from tests.loop.proof.data_watch import WorkersEnd
from tests.loop.proof.drawing import LENGTHS, MAX_TOKENS, TOOL_TIMEOUT_S, Scenario, draw
from tests.loop.proof.faults import (
    FATAL,
    Fault,
    FaultKind,
    Faults,
    FaultyScorer,
    FaultyWorker,
    KeepingTrainer,
)
from tests.loop.proof.invariants import InvariantError, Invariants
from tests.loop.proof.limits_book import BATCHES, RATIO
from tests.loop.proof.memory import MemoryCheckpoints, resume_from
from tests.loop.proof.shuffled import loop_of
from tests.loop.proof.watched import WatchedFeed, WatchedScorer, WatchedTrainer, WatchedWorker

_MAX_LEGS = 40
"""More than there are faults: each ends one run at most."""
PLENTY = CacheSize(blocks=10**9)
"""With a limit that is never reached, engines report preemptions."""
_CALL_TIMEOUT_S = 200.0
"""Longer than any group, shorter than `stall_timeout_s`: what hangs is named before anybody wonders why
nothing moves."""
_WEIGHTS_TIMEOUT_S = 100.0


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


def run(scenario: Scenario, checks: type[Invariants] = Invariants) -> Outcome:
    """Run a scenario. Whatever ends it early, it is resumed from its last checkpoint until it is done. Then
    it is resumed once more: from its last checkpoint or, if it is drawn so, from another, as if it had
    crashed some time after it."""
    outcome, faults = Outcome(scenario=scenario), Faults(scenario.faults)
    snapshot, is_done, now = None, False, scenario
    try:
        for leg in range(_MAX_LEGS):
            snapshots, error = _leg(
                now, outcome, faults, leg, resume_from(*snapshot) if snapshot else None, checks
            )
            if error is None and is_done:
                outcome.counts["ended early, then resumed to the end"] += len(outcome.errors)
                break
            now, is_done = _mended(now, error), is_done or error is None
            is_last = error is not None or scenario.resume_at is None
            snapshot = (
                snapshots[-1 if is_last else int(scenario.resume_at * len(snapshots))]
                if snapshots
                else snapshot
            )
        else:
            raise InvariantError("ends", f"seed {scenario.seed}, {_MAX_LEGS} runs have not come to the end")
    except Exception as broken:
        outcome.broken = broken
    outcome.faults.update({kind.value: count for kind, count in faults.happened.items()})
    return outcome


def _mended(scenario: Scenario, error: BaseException | None) -> Scenario:
    """What a user changes before the resume of a run that a limit has ended."""
    ways_out = {
        RATIO: {"max_failed_ratio": 1.0},
        BATCHES: {"max_num_gen_batches": 1000},
        "requeued": {"on_exhausted": "drop"},
    }
    changes = next((changes for named, changes in ways_out.items() if named in str(error)), None)
    return replace(scenario, settings=changed(scenario.settings, **changes)) if changes else scenario


def _leg(
    scenario: Scenario,
    outcome: Outcome,
    faults: Faults,
    leg: int,
    resume_from: ResumeFrom | None,
    checks: type[Invariants],
) -> tuple[list[Any], AsyncrlError | None]:
    """One run of the loop. Returns its checkpoints and what it raised, for a reason that the scenario
    explains."""

    async def main() -> tuple[list[Any], AsyncrlError | None]:
        own, lent = scenario.names_of(leg)
        slots = dict.fromkeys([*own, *lent], scenario.slots)
        known = {"scorers": scenario.scorers, "num_eval_prompts": scenario.num_eval_prompts, "lent": lent}
        invariants = checks(scenario.settings, slots, seed=scenario.seed, **known)
        invariants.books.preempts = scenario.preemptions > 0
        try:
            return await _run_leg(scenario, invariants, faults, leg, resume_from)
        finally:
            outcome.counts += invariants.counts + Counter({"runs": 1})
            outcome.virtual_s += asyncio.get_running_loop().time()
            outcome.trace += [f"{time_s:10.3f}  {text}" for time_s, text in invariants.trace]

    shuffle_seed = None if scenario.shuffle_seed is None else scenario.shuffle_seed + leg
    snapshots, error = run_virtual(main(), loop_factory=loop_of(shuffle_seed))
    if error is not None:
        outcome.errors.append(f"{type(error).__name__}: {error}")
        outcome.counts[f"ended by {type(error).__name__}"] += 1
    return snapshots, error


async def _run_leg(
    scenario: Scenario, invariants: Invariants, faults: Faults, leg: int, resume_from: ResumeFrom | None
) -> tuple[list[Any], AsyncrlError | None]:
    checkpoints, pending = MemoryCheckpoints(scenario.write_s, invariants.data), list(faults.pending)
    try:
        world = _world(scenario, invariants, faults, checkpoints, leg, resume_from)
        pipeline = Pipeline(scenario.settings, world)
    except RefusedError as refused:
        message = f"seed {scenario.seed}: its own checkpoint is refused: {refused}"
        raise InvariantError("resume", message) from refused
    invariants.watch(pipeline)
    if scenario.stop_at_s is not None and leg == 0:
        asyncio.get_running_loop().call_later(scenario.stop_at_s, _stop, pipeline, invariants)
    error: AsyncrlError | None = None
    try:
        await pipeline.run()
    except AsyncrlError as raised:
        error = raised
    except Exception as raised:
        raise (invariants.violation or raised) from raised
    happened = [fault for fault in pending if fault not in faults.pending]
    invariants.end(error, _stop_limit_s(scenario, happened))
    lent = scenario.names_of(leg)[1]  # the run goes on without these, whatever becomes of them
    happened = [fault for fault in happened if fault.executor not in lent]
    _check_explained(scenario, invariants, error, happened)
    if error is None or not any(map(_has_no_restart, happened)):
        steps = [snapshot.step for snapshot, _ in checkpoints.snapshots]
        _check_last_snapshot(invariants, steps, is_resumed=resume_from is not None)
    return checkpoints.snapshots, error


def _stop(pipeline: Pipeline, invariants: Invariants) -> None:
    invariants.stop_requested()
    pipeline.request_stop()


def _stop_limit_s(scenario: Scenario, happened: Sequence[Fault]) -> float:
    """A stop waits for the train step, a gather, publishes and checkpoints under way, and
    for the last sweep of the data; not for any rollout."""
    if any(fault.kind is FaultKind.WORKER_HANGS for fault in happened):
        return scenario.settings.profile.run.stop_grace_s + 2
    stall_s = scenario.gather_s + 2 * scenario.publish_s + 2 * scenario.write_s + SETTLE_S
    return max(scenario.train_s, scenario.learn_s) + stall_s + 0.1


def _check_explained(
    scenario: Scenario, invariants: Invariants, error: AsyncrlError | None, happened: Sequence[Fault]
) -> None:
    """Nothing fails without a fault that no restart can mend, and what such a fault ends says whose fault it
    is."""
    settings = scenario.settings
    fatal = _not_mended(happened, settings.profile.rollout.max_restarts)
    message = f"{type(error).__name__}: {error}, after {happened}"
    if error is None or isinstance(error, Interrupted):
        may_be_away = settings.profile.rollout.min_workers is not None
        loud = [fault for fault in fatal if not _goes_unnoticed(scenario, fault)]
        is_quiet = may_be_away or all(invariants.lost[fault.executor] for fault in loud)
        invariants.check(is_quiet or error is not None, "ends", f"no error after {fatal}")
        holds = error is None or (invariants.stop_s is not None and not invariants.failed_with)
    elif isinstance(error, ExecutorFailed):
        no_room = [fault for fault in happened if fault.kind is FaultKind.NO_ROOM]
        may_fail = [*fatal, *(no_room if isinstance(error, NoRoom) else [])]
        holds = error.executor in {fault.executor for fault in may_fail}
    elif isinstance(error, StallError):
        holds = any(fault.kind is FaultKind.WORKER_HANGS for fault in fatal)
    elif over := {name for name in (RATIO, BATCHES) if name in str(error)}:
        holds = over <= invariants.ledger.limits.seen
    else:
        training = settings.profile.async_training
        may_exhaust = (training.on_stale, training.on_exhausted) == ("requeue", "fail")
        holds = "requeued" in str(error) and may_exhaust
    invariants.check(holds, "ends", f"nothing explains {message}")


def _goes_unnoticed(scenario: Scenario, fault: Fault) -> bool:
    """Whether a run may end without having heard of the fault. A scorer with nothing left to do is asked for
    a report once a second."""
    age_s = asyncio.get_running_loop().time() - fault.at_s
    return fault.kind is FaultKind.WORKER_HANGS or (fault.executor in scenario.scorers and age_s <= 1.0)


def _not_mended(happened: Sequence[Fault], max_restarts: int) -> list[Fault]:
    """Fatal faults of executors that had more of them than restarts, which a lack of room uses up, too. (Two
    that come together cost a worker one restart.)"""
    fatal = [fault for fault in happened if fault.kind in FATAL]
    uses_one = FATAL | {FaultKind.NO_ROOM}
    counts = Counter(fault.executor for fault in happened if fault.kind in uses_one)
    return [fault for fault in fatal if _has_no_restart(fault) or counts[fault.executor] > max_restarts]


def _has_no_restart(fault: Fault) -> bool:
    """Whether it meets who has been trained: the run ends at once."""
    return fault.kind is FaultKind.STEP_FAILS or fault.executor == CRITIC


def _check_last_snapshot(invariants: Invariants, steps: Sequence[int], *, is_resumed: bool) -> None:
    """Whatever ends a run whose trainer is whole: its last step is in a checkpoint (or in the one that it was
    resumed from)."""
    is_kept = bool(steps) and steps[-1] == invariants.steps.number
    never_moved = is_resumed and not invariants.counts["steps"]
    last = invariants.steps.number
    invariants.check(
        is_kept or never_moved, "snapshot", f"ended after step {last}, checkpoints of steps {steps}"
    )


def feed_of(scenario: Scenario) -> Feed:
    """Some scenarios have a few prompts that come again, with a curriculum."""
    if scenario.seed % 8 != 5:
        return NumberedFeed()
    items: list[Item] = [{**make_item(str(i), "1", {}), "uid": f"p{i}"} for i in range(12)]
    return PromptFeed(items, seed=scenario.seed, curriculum=0.2)


def _world(
    scenario: Scenario,
    invariants: Invariants,
    faults: Faults,
    checkpoints: MemoryCheckpoints,
    leg: int,
    resume_from: ResumeFrom | None,
) -> World:
    times, on_the_way, data = worker_times(scenario), Counter[int](), invariants.data
    seed, limit_s, workers = scenario.seed + 2**32 * leg, _load_limit_s(scenario), []
    met = {"faults": faults, "call_timeout_s": _CALL_TIMEOUT_S, "is_judged": REWARD in scenario.scorers}
    own, lent = scenario.names_of(leg)
    for name in (*own, *lent):
        end, kind = WorkersEnd(data), {"preemptions": scenario.preemptions, "is_lent": name in lent}
        end.worker = FaultyWorker(name, scenario.slots, times, seed, store=end, **kind, **met)
        workers.append(end.worker)
    for key in chain.from_iterable(resume_from.payloads if resume_from else ()):
        data.put(key)
    trainer = KeepingTrainer(trainer_times(scenario), faults)
    return World(
        feed=WatchedFeed(feed_of(scenario), invariants),
        trainer=WatchedTrainer(trainer, invariants),
        scorers=[
            WatchedScorer(_scorer(name, scenario, invariants, faults), invariants)
            for name in scenario.scorers
        ],
        workers=[WatchedWorker(worker, invariants, on_the_way, limit_s) for worker in workers],
        lent=lent,
        eval_sets={"": [{"uid": f"e{i}", "prompt": str(i)} for i in range(scenario.num_eval_prompts)]},
        observers=[invariants],
        checkpoints=checkpoints,
        data=data,
        resume_from=resume_from,
    )


def _scorer(name: str, scenario: Scenario, invariants: Invariants, faults: Faults) -> FaultyScorer:
    group_s, load_s = scenario.group_score_s, scenario.load_lag_s
    times = ScorerTimes(
        score_s=lambda groups: len(groups) * group_s,
        learn_s=lambda groups: scenario.learn_s,
        judge_s=scenario.judge_s,
        call_tokens=60,
        load_s=load_s,
        restart_s=scenario.restart_s,
    )
    return FaultyScorer(
        name, times, faults=faults, call_timeout_s=_CALL_TIMEOUT_S, on_report=invariants.times.check_report
    )


def worker_times(scenario: Scenario) -> WorkerTimes:
    length, step_s = LENGTHS[scenario.lengths], scenario.step_s
    return WorkerTimes(
        decoding=Decoding(
            step_s=step_s,
            step_s_per_sequence=step_s / 20,
            prefill_s_per_token=step_s / 50,
            speed_spread=scenario.speed_spread,
        ),
        response_tokens=lambda rng, n: [length(rng) for _ in range(n)],
        tool_calls=partial(_tool_calls, scenario) if scenario.max_turns > 1 else None,
        hold_slots=scenario.settings.profile.rollout.hold_slots,
        reward_s=lambda rng: rng.random() * 2 * scenario.reward_s,
        failure_ratio=scenario.failed_rewards,
        mixes=mixes(scenario.settings.profile),
        mixed_requeues=mixed_requeues(scenario.settings.profile),
        prefetch_s=lambda rng: rng.random() * 2 * scenario.prefetch_lag_s,
        load_s=lambda rng: rng.random() * 2 * scenario.load_lag_s,
        restart_s=lambda rng: rng.random() * 2 * scenario.restart_s,
        wake_s=scenario.wake_s,
        sleep_s=scenario.sleep_s,
        cache=PLENTY if scenario.preemptions else UNLIMITED,
        weights_timeout_s=_WEIGHTS_TIMEOUT_S,
    )


def _tool_calls(scenario: Scenario, rng: random.Random, tokens: int) -> list[ToolWait]:
    """Up to the first that fails. All turns together are at most `MAX_TOKENS` long."""
    calls: list[ToolWait] = []
    for _ in range(rng.randint(0, scenario.max_turns - 1)):
        luck = rng.random()
        seconds = min(rng.expovariate(1 / scenario.tool_s) if scenario.tool_s else 0.0, TOOL_TIMEOUT_S)
        if luck < scenario.hanging_tools:
            return [*calls, ToolWait(TOOL_TIMEOUT_S, 0, 0, "tool-timeout")]
        if luck < scenario.hanging_tools + scenario.failing_tools:
            return [*calls, ToolWait(seconds, 0, 0, "tool-died")]
        turn_tokens = min(LENGTHS[scenario.lengths](rng), MAX_TOKENS - tokens)
        if turn_tokens < 1:
            break
        tokens += turn_tokens
        calls.append(ToolWait(seconds, rng.randint(0, 40), turn_tokens))
    return calls


def trainer_times(scenario: Scenario) -> TrainerTimes:
    is_governed = scenario.settings.profile.async_training.target_kl is not None
    return TrainerTimes(
        train_s=lambda batch: scenario.train_s,
        gather_s=scenario.gather_s,
        publish_s=scenario.publish_s,
        kl=(lambda age: 0.001 + scenario.version_kl * age) if is_governed else None,
    )


def _load_limit_s(scenario: Scenario) -> float:
    """A load waits for the longest trajectory that runs (drain) at the slowest that its engine gets, then
    copies.

    Its turns may each wait for a slot that is not held, and for prefills of whoever comes and goes meanwhile.
    """
    slowest_s = 2 * scenario.step_s * (1 + scenario.slots / 20)
    if scenario.max_turns > 1:
        slowest_s *= 4
    slow_s = sum(fault.seconds for fault in scenario.faults if fault.kind is FaultKind.SLOW_LOAD)
    tools_s = (scenario.max_turns - 1) * TOOL_TIMEOUT_S
    return MAX_TOKENS * slowest_s + tools_s + 2 * scenario.load_lag_s + slow_s + 0.1


def main(arguments: Sequence[str]) -> int:
    seeds = [int(argument) for argument in arguments if not argument.startswith("--")]
    broken = 0
    for seed in seeds:
        outcome = run(
            draw(seed, with_turns="--turns" in arguments, with_scorer="--scorer" in arguments), Watching
        )
        print(f"seed {seed}\n{outcome.scenario}")
        if outcome.broken is not None or "--trace" in arguments:
            print("\n".join(outcome.trace))
        print(
            f"{dict(outcome.counts)}\nended with {outcome.errors or 'no error'}; broken: {outcome.broken!r}"
        )
        if outcome.broken is not None and not isinstance(outcome.broken, InvariantError):
            raise outcome.broken
        broken += outcome.broken is not None
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
