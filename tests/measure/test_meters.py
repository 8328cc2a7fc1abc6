"""Integrals of a rollout worker's time, on a clock that we move by hand."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl_cli.measure.meters import DEBOUNCE_S, POLL_S, LongPoll, MeteredRewards, RolloutMeter
from asyncrl_cli.measure.states import ExecutorReport, State
from asyncrl_cli.simulate.world import run_virtual


class HandClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def meter(clock: HandClock) -> RolloutMeter:
    return RolloutMeter("rollout-0", 8, clock, lambda: None)


def report(meter: RolloutMeter) -> ExecutorReport:
    return meter.report(version=0, sampled_tokens=0, decode_steps=0, running_tokens=0)


def test_running_sequences_are_integrated_at_every_change(meter: RolloutMeter, clock: HandClock) -> None:
    clock.now_s += 1.0  # starved
    meter.running(4)
    clock.now_s += 2.0
    meter.running(3)
    clock.now_s += 1.0
    meter.running(0)
    clock.now_s += 0.5  # starved
    found = report(meter)
    assert found.sums["running_sequence_s"] == pytest.approx(4 * 2.0 + 3 * 1.0)
    assert found.sums["idle_s"] == pytest.approx(1.5)
    assert found.state_s == pytest.approx({State.STARVED: 1.5, State.BUSY: 3.0})
    assert "eval_s" not in found.sums


def test_a_frozen_load_is_loading_and_runs_nothing(meter: RolloutMeter, clock: HandClock) -> None:
    meter.running(4)
    clock.now_s += 1.0
    meter.load_begins("keep-kv")
    clock.now_s += 0.25
    meter.load_ended()
    clock.now_s += 1.0
    found = report(meter)
    assert found.sums["running_sequence_s"] == pytest.approx(4 * 2.0)
    assert found.sums["idle_s"] == pytest.approx(0.25)
    assert found.state_s == pytest.approx({State.BUSY: 2.0, State.LOADING: 0.25})


def test_a_drain_is_busy_until_its_last_sequence_has_ended(meter: RolloutMeter, clock: HandClock) -> None:
    meter.running(2)
    meter.load_begins("drain")
    clock.now_s += 3.0
    meter.running(1)
    clock.now_s += 1.0
    meter.running(0)
    clock.now_s += 0.5
    meter.load_ended()
    meter.running(2)
    found = report(meter)
    assert found.state_s == pytest.approx({State.BUSY: 4.0, State.LOADING: 0.5})
    assert found.sums["running_sequence_s"] == pytest.approx(2 * 3.0 + 1.0)
    assert found.state is State.BUSY


def test_waiting_for_tools_is_idle_time_of_its_own_that_also_holds_back_a_drain(
    meter: RolloutMeter, clock: HandClock
) -> None:
    meter.running(2)
    clock.now_s += 1.0
    meter.waiting("p1@0.0/0", "calculator")
    meter.running(1)
    clock.now_s += 2.0  # one runs, one waits
    meter.waiting("p1@0.0/1", "search")
    meter.running(0)
    meter.load_begins("drain")
    clock.now_s += 4.0  # both wait
    found = report(meter)
    assert (found.state, found.waiting_for) == (
        State.WAITING,
        "calculator of p1@0.0/0 (6 s so far) and 1 more",
    )
    assert found.state_s == pytest.approx({State.BUSY: 3.0, State.WAITING: 4.0})
    assert (found.sums["idle_s"], found.sums["waiting_trajectory_s"]) == (
        pytest.approx(4.0),
        pytest.approx(2.0 + 2 * 4.0),
    )
    assert found.gauges["waiting_trajectories"] == 2
    meter.waiting("p1@0.0/0", "")
    meter.waiting("p1@0.0/1", "")
    assert report(meter).state is State.LOADING


def test_a_pause_is_idle_time(meter: RolloutMeter, clock: HandClock) -> None:
    meter.pause(True)
    clock.now_s += 2.0
    meter.pause(False)
    found = report(meter)
    assert found.state_s == {State.PAUSED: 2.0}
    assert found.sums["idle_s"] == 2.0
    assert found.waiting_for == "prompts"


def test_eval_time_is_the_time_with_at_least_one(meter: RolloutMeter, clock: HandClock) -> None:
    meter.evals(+1)
    clock.now_s += 1.0
    meter.evals(+1)
    clock.now_s += 1.0
    meter.evals(-1)
    meter.evals(-1)
    clock.now_s += 5.0
    assert report(meter).sums["eval_s"] == 2.0


def test_rewards_are_busy_while_one_is_pending_also_if_it_raises(clock: HandClock) -> None:
    class Scorer:
        async def score(self, item: object, response_text: str) -> float:
            clock.now_s += 1.0
            if response_text == "bad":
                raise ValueError("no reward")
            return 1.0

    async def main() -> ExecutorReport:
        rewards = MeteredRewards("reward-0", Scorer().score, clock)
        clock.now_s += 0.5
        assert await rewards.score({}, "good") == 1.0
        with pytest.raises(ValueError, match="no reward"):
            await rewards.score({}, "bad")
        return rewards.report()

    found = asyncio.run(main())
    assert (found.role, found.state, found.sums["rewards"]) == ("reward", State.STARVED, 2)
    assert found.state_s == pytest.approx({State.STARVED: 0.5, State.BUSY: 2.0})


def test_a_long_poll_answers_a_change_at_once_and_silence_after_a_second() -> None:
    async def main() -> list[float]:
        now = asyncio.get_running_loop().time
        changes, began_s, answered = LongPoll(), now(), []
        asyncio.get_running_loop().call_later(0.3, changes.note)
        seen = await changes.after(0)
        answered.append(now() - began_s)
        assert seen == 1
        changes.note()
        seen = await changes.after(seen)  # at once, but for the debounce
        answered.append(now() - began_s)
        await changes.after(seen)
        answered.append(now() - began_s)
        return answered

    assert run_virtual(main()) == pytest.approx([0.3, 0.3 + DEBOUNCE_S, 0.3 + DEBOUNCE_S + POLL_S])


def test_an_engines_own_counters_travel_with_the_report(meter: RolloutMeter) -> None:
    figures = {"sums": {"preemptions": 3.0}, "gauges": {"kv_cache_usage": 0.5}}
    told = meter.report(version=0, sampled_tokens=7, decode_steps=2, running_tokens=0, **figures)
    assert told.sums["preemptions"] == 3
    assert told.sums["sampled_tokens"] == 7
    assert told.gauges["kv_cache_usage"] == 0.5
    assert told.gauges["slots"] == 8


def test_an_urgent_change_is_told_before_the_debounce_is_over() -> None:
    async def main() -> list[float]:
        loop, changes = asyncio.get_running_loop(), LongPoll()
        began_s, answered = loop.time(), []
        changes.note()
        seen = await changes.after(0)
        changes.note()
        loop.call_later(0.4 * DEBOUNCE_S, lambda: changes.note(is_urgent=True))
        for _ in range(2):
            seen = await changes.after(seen)
            answered.append(loop.time() - began_s)
            changes.note()
        return answered

    assert run_virtual(main()) == pytest.approx([0.4 * DEBOUNCE_S, 1.4 * DEBOUNCE_S])
