"""The pure state machine of admission and take."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.loop.admission import Admission, Closed, takeable_in_time
from asyncrl_cli.loop.attempts import Attempt, Prompt, Stage
from asyncrl_cli.loop.fleet import WorkerSlots
from tests.loop.keywords import loop_settings


def admission(**changes):
    slots, num_workers = changes.pop("slots", 64), changes.pop("workers", 1)
    window_groups, total_groups = changes.pop("window_groups", 4), changes.pop("total_groups", 100)
    values = {"eta": Fraction(0), "max_staleness": 0, "n": 2} | changes
    settings = loop_settings(step_groups=window_groups, window_steps=1, train_steps=total_groups // window_groups, **values)
    return Admission(settings, [WorkerSlots(name=f"rollout-{i}", slots=slots) for i in range(num_workers)])


def start(machine, number):
    worker = machine.choose()
    assert worker is not None
    attempt = Attempt(prompt=Prompt(uid=f"p{number}", epoch=0, item={}))
    machine.admit(attempt, worker)
    return attempt, worker


@given(
    deadlines=st.dictionaries(st.integers(5, 8), st.integers(1, 4), max_size=4),
    takes_left=st.integers(0, 4),
    window_groups=st.integers(1, 4),
)
def test_the_inequality_holds_exactly_if_some_order_serves_every_deadline(deadlines, takes_left, window_groups):
    """Against a schedule by hand: earliest deadline first, `takes_left` now, then a window's groups per version."""
    order = sorted(itertools.chain.from_iterable([deadline] * count for deadline, count in deadlines.items()))
    servable = all(
        deadline >= 5 + max(0, math.ceil((place + 1 - takes_left) / window_groups)) for place, deadline in enumerate(order)
    )
    assert takeable_in_time(deadlines, 5, takes_left, window_groups) == servable


def test_the_worked_example_of_the_docstring():
    assert takeable_in_time({5: 1, 6: 1}, 5, 1, 2)
    assert not takeable_in_time({5: 1}, 5, 0, 2)


@pytest.mark.parametrize(("eta", "expected"), [("0", 100), ("0.15", 115), ("0.5", 150), ("0.3", 130), ("1", 200)])
def test_the_window_budget_is_exact_in_decimals(eta, expected):
    machine = admission(window_groups=100, total_groups=1000, eta=Fraction(eta), max_staleness=1, slots=10_000)
    number = 0
    while machine.choose() is not None:
        start(machine, number)
        number += 1
    assert number == expected
    assert machine.closed() is Closed.WINDOW


def test_groups_wait_for_slots_and_prefetch_groups_lend_some():
    machine = admission(slots=5, n=2)
    start(machine, 0), start(machine, 1)
    assert machine.closed() is Closed.SLOTS
    roomy = admission(slots=5, n=2, prefetch_groups=1)
    start(roomy, 0), start(roomy, 1), start(roomy, 2)
    assert roomy.closed() is Closed.SLOTS


def test_a_sequence_that_ends_frees_its_slot_before_its_group_ends():
    machine = admission(slots=4, n=2)
    first, _ = start(machine, 0)
    start(machine, 1)
    machine.sequences_finished("rollout-0", {first.key: 1})
    assert machine.closed() is Closed.SLOTS
    machine.sequences_finished("rollout-0", {first.key: 2})
    assert machine.closed() is Closed.OPEN


def test_evals_take_slots_but_no_window_budget():
    machine = admission(slots=4, n=2)
    machine.workers["rollout-0"].change_evals(3)
    assert machine.closed() is Closed.SLOTS
    machine.workers["rollout-0"].change_evals(-3)
    assert machine.closed() is Closed.OPEN


def test_groups_start_on_the_newest_weights():
    machine = admission(workers=2, eta=Fraction(1), max_staleness=1)
    machine.version = 1
    machine.workers["rollout-1"].end_load(1)
    assert machine.choose().name == "rollout-1"


def test_a_worker_that_loads_gets_nothing():
    machine = admission()
    machine.workers["rollout-0"].begin_load()
    assert machine.closed() is Closed.LOADING


def test_live_and_trained_groups_never_exceed_the_run():
    machine = admission(window_groups=4, total_groups=4, eta=Fraction(2), max_staleness=2)
    attempts = [start(machine, number)[0] for number in range(4)]
    assert machine.closed() is Closed.END
    machine.leave(attempts[0], Stage.DROPPED, "failed")
    assert machine.closed() is Closed.OPEN, "a dropped group is replaced"


@settings(max_examples=200)
@given(
    eta=st.sampled_from(["0", "0.25", "0.5", "1", "2"]),
    window_groups=st.integers(1, 6),
    workers=st.integers(1, 3),
    choices=st.lists(st.tuples(st.sampled_from(["finish", "take", "load"]), st.integers(0, 99)), max_size=120),
)
def test_no_sequence_of_events_breaks_the_bound_or_leaves_nothing_to_do(eta, window_groups, workers, choices):
    """Finishes, takes and lagging loads in any order. Finished groups always suffice for the next take once all have finished."""
    bound = math.ceil(Fraction(eta))
    machine = admission(window_groups=window_groups, eta=Fraction(eta), max_staleness=bound, workers=workers, total_groups=10_000)
    number, began = 0, {}

    def admit_all():
        nonlocal number
        while machine.is_open():
            _, worker = start(machine, number)
            began[f"p{number}"] = worker.version
            number += 1

    def take_one():
        for attempt in machine.takeable(1):
            machine.take(attempt)
            assert machine.version - began[attempt.prompt.uid] <= bound
            machine.ledger.move(attempt, Stage.TRAINED)
            if machine.takes_left == 0:
                assert machine.publish() == []
            return True
        return False

    admit_all()
    for what, pick in choices:
        running = list(machine.ledger.running.values())
        if what == "finish" and running:
            machine.leave(running[pick % len(running)], Stage.FINISHED)
        elif what == "take":
            take_one()
        elif what == "load":
            worker = machine.workers[f"rollout-{pick % workers}"]
            worker.end_load(max(worker.version, machine.version - pick // workers % 2))
        admit_all()
    for worker in machine.workers.values():
        worker.end_load(machine.version)
    admit_all()
    for attempt in list(machine.ledger.running.values()):
        machine.leave(attempt, Stage.FINISHED)
    assert take_one(), "everything is loaded and finished, and the trainer would wait for ever"
