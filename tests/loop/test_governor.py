"""The governor (loop/governor.py): its control law by hand, and in runs on the virtual clock."""

from __future__ import annotations

import json
import math
import re
from collections import deque

import pytest

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.safe_files import parse_json
from asyncrl_cli.loop.checkpointer import read_state
from asyncrl_cli.loop.governor import Governor, GovernorState
from tests.loop.keywords import loop_settings
from tests.loop.worlds import run_world


def governor(slots: int = 64, **keywords) -> Governor:
    plain = dict(step_groups=8, window_steps=1, train_steps=100, eta=2, n=4, target_kl=0.02)
    return Governor(loop_settings(**(plain | keywords)), slots)


def window(one: Governor, version: int, kl: float | None, *, waited_s: float = 5.0, used: int = 100) -> int:
    """A window of one step ends, and `version` begins. Returns the budget."""
    one.admitted(used, 0)
    one.trained(kl, 1000, 32, 0.0, {"wait_data": waited_s, "step": 10.0})
    one.open_window(version)
    return one.budget_groups


def step(one: Governor, preemptions: float, in_flight: int) -> int:
    """A step of 32 responses ends. Returns the cap."""
    one.admitted(1, in_flight)
    one.trained(None, 0, 32, preemptions, {"wait_data": 0.0, "step": 10.0})
    return one.most_in_flight


def test_the_worked_example_of_the_docstring():
    one = governor()
    budgets = [
        window(one, version, kl) for version, kl in enumerate([0.0, 0.005, 0.005, 0.5, 0.5, 0.03], start=1)
    ]
    assert budgets == [16, 16, 23, 23, 23, 20]


def test_a_trainer_that_never_waits_gets_no_older_data():
    one = governor()
    assert {window(one, version, 0.001, waited_s=0.0) for version in range(1, 9)} == {16}


def test_a_budget_that_was_not_used_up_is_not_raised():
    one = governor()
    assert {window(one, version, 0.001, used=15) for version in range(1, 9)} == {16}


@pytest.mark.parametrize("kl", [0.5, math.inf, math.nan])
def test_whatever_is_measured_the_budget_stays_between_a_window_and_the_limit(kl):
    one = governor()
    budgets = [window(one, version, kl) for version in range(1, 40)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[-1] == 8
    raised = [window(one, version, 1e-9) for version in range(40, 100)]
    assert raised[-1] == 24 == max(raised)


def windows(one: Governor, factors: list[float], power: float) -> list[int]:
    """Groups wait in a queue, and each window trains the 8 oldest. The KL is their mean age (in versions) to
    a power, in targets, times the window's factor. Returns the groups ahead after each window."""
    admitted, ahead = deque[int](), list[int]()
    for version, factor in enumerate(factors):
        admitted.extend([version] * (one.budget_groups - len(admitted)))
        age = sum(version - admitted.popleft() for _ in range(8)) / 8
        ahead.append(window(one, version + 1, 0.02 * factor * age**power) - 8)
    return ahead


@pytest.mark.parametrize("power", [1.0, 1.7, 3.0])
def test_it_settles_near_the_target_for_any_power_of_staleness(power):
    ahead = windows(governor(eta=4), [1.5**-power] * 80, power)
    assert all(0.75 <= (groups / 12) ** power <= 1.05 for groups in ahead[40:])
    assert len(set(ahead[40:])) == 1


def test_a_second_cut_waits_for_the_groups_that_were_admitted_before_the_first():
    """From window 60 on the KL of each age is 4 times as high: half of the groups ahead give as much as all
    did before. Those of the 27 that are untaken after window 60 last until window 64."""
    ahead = windows(governor(eta=4), [1 / 3.6**2] * 60 + [4 / 3.6**2] * 40, power=2)
    assert ahead[59] == 27
    assert ahead[60] < 27
    assert set(ahead[60:65]) == {ahead[60]}
    assert min(ahead[60:]) >= 27 // 2


def test_groups_may_wait_in_queues_while_no_engine_has_preempted_too_many():
    one = governor()
    assert [one.has_room(in_flight) for in_flight in (0, 60, 61, 100)] == [True] * 4


def test_sequences_in_flight_fall_with_preemptions_and_come_back():
    one = governor()
    assert step(one, 20, 60) == 64, "fewer than the step has responses"
    assert step(one, 60, 50) == 45
    assert step(one, 60, 20) == 45, "the cap was not reached"
    assert step(one, 60, 44) == 50
    assert [one.has_room(in_flight) for in_flight in (0, 46, 47)] == [True, True, False]
    for preemptions in range(100, 10_000, 100):
        step(one, preemptions, one.most_in_flight)
    assert one.most_in_flight == 4
    assert one.has_room(0)


def test_a_resumed_governor_goes_on_within_the_limits_of_its_run():
    one, other = governor(), governor()
    for version, kl in enumerate([0.0, 0.005, 0.005, 0.5, 0.5], start=1):
        window(one, version, kl)
    state = parse_json(json.dumps(one.state()), GovernorState)
    other.resume(5, state)
    assert window(other, 6, 0.03) == window(one, 6, 0.03) == 20
    small = governor(eta=0.5)
    small.resume(5, state)
    assert small.budget_groups == 12


def test_only_preemptions_cap_what_is_in_flight_after_a_resume_with_more_slots():
    one, other = governor(), governor(slots=128)
    other.resume(0, parse_json(json.dumps(one.state()), GovernorState))
    assert not other.is_capped
    step(one, 60, 50)
    other.resume(0, parse_json(json.dumps(one.state()), GovernorState))
    assert other.most_in_flight == 45


def test_a_governor_that_is_new_in_a_resumed_run_does_not_judge_the_data_of_its_fixed_eta():
    """16 groups ahead at version 57: windows 57 and 58 train them."""
    one = governor()
    one.resume(57, None)
    assert [window(one, version, 0.5) for version in (58, 59, 60)] == [16, 16, 12]


WORLD = loop_settings(
    step_groups=16,
    window_steps=1,
    train_steps=60,
    eta=4,
    n=2,
    interrupt="keep-kv",
    target_kl=0.02,
    checkpoint_every_steps=10,
)


def governed_world(version_kl: float):
    times = {"train_s": lambda batch: 0.2, "kl": lambda age: 0.001 + version_kl * age**1.7}
    return run_world(WORLD, trainer_times=times)


def test_a_run_comes_to_its_target_while_its_trainer_starves():
    ran = governed_world(0.02)
    assert ran.error is None
    kls = [record.train.metrics["correction/kl"].value for record in ran.recorder.steps]
    etas = [record.governor["governor/eta"] for record in ran.recorder.steps]
    assert max(etas) < 4.0
    assert sum(kls[20:]) / len(kls[20:]) < 0.022
    shown = ran.recorder.ticks[-1].governor
    assert re.fullmatch(r"eta [\d.]+ of 4, KL ([\d.]+) \(target 0.02\)", shown)
    assert f"KL {kls[-1]:.2g} " in shown


def test_a_checkpoint_with_an_impossible_governor_is_refused():
    ran = governed_world(0.02)
    (snapshot, _), *_ = ran.checkpoints.snapshots
    state = {**snapshot.loop_state}
    assert read_state(state, WORLD)["governor"]["ahead_groups"] == state["governor"]["ahead_groups"]
    state["governor"] = {**state["governor"], "ahead_groups": -1.0}
    with pytest.raises(RefusedError, match="malformed"):
        read_state(state, WORLD)
