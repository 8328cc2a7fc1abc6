"""The pure state machine of admission and take."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.contracts.prompt_group import PartialResponse, PartResult, Prompt
from asyncrl_cli.loop.admission import Admission, Closed, takeable_in_time
from asyncrl_cli.loop.fleet import WorkerSlots
from asyncrl_cli.loop.ledger import Attempt, Stage
from tests.loop.keywords import loop_settings


def admission(**changes):
    slots, num_workers = changes.pop("slots", 64), changes.pop("workers", 1)
    window_groups, total_groups = changes.pop("window_groups", 4), changes.pop("total_groups", 100)
    values = {"eta": Fraction(0), "max_staleness": 0, "n": 2} | changes
    settings = loop_settings(
        step_groups=window_groups, window_steps=1, train_steps=total_groups // window_groups, **values
    )
    return Admission(settings, [WorkerSlots(name=f"rollout-{i}", slots=slots) for i in range(num_workers)])


def start(machine, number):
    placement = machine.choose()
    assert placement is not None
    attempt = Attempt(prompt=Prompt(uid=f"p{number}", epoch=0, item={}))
    machine.admit(attempt, placement)
    return attempt


def workers_of(attempt):
    return [(part.worker, part.indices) for part in attempt.parts.values()]


def end_part(machine, part):
    """As `Groups` does when a worker's result arrives."""
    part.result = PartResult(key=part.key, trajectories=(), failures=(), failed_tokens=0)
    machine.workers[part.worker].release(part.key)


def end(machine, attempt):
    """All of its parts end, and so does the group."""
    for part in attempt.running_parts():
        end_part(machine, part)
    machine.leave(attempt, Stage.FINISHED)


@given(
    deadlines=st.dictionaries(st.integers(5, 8), st.integers(1, 4), max_size=4),
    takes_left=st.integers(0, 4),
    window_groups=st.integers(1, 4),
)
def test_the_inequality_holds_exactly_if_some_order_serves_every_deadline(
    deadlines, takes_left, window_groups
):
    """Against a schedule by hand: earliest deadline first, `takes_left` now, then a window's groups per
    version."""
    order = sorted(itertools.chain.from_iterable([deadline] * count for deadline, count in deadlines.items()))
    servable = all(
        deadline >= 5 + max(0, math.ceil((place + 1 - takes_left) / window_groups))
        for place, deadline in enumerate(order)
    )
    assert takeable_in_time(deadlines, 5, takes_left, window_groups) == servable


def test_the_worked_example_of_the_docstring():
    assert takeable_in_time({5: 1, 6: 1}, 5, 1, 2)
    assert not takeable_in_time({5: 1}, 5, 0, 2)


@pytest.mark.parametrize(
    ("eta", "expected"), [("0", 100), ("0.15", 115), ("0.5", 150), ("0.3", 130), ("1", 200)]
)
def test_the_window_budget_is_exact_in_decimals(eta, expected):
    machine = admission(
        window_groups=100, total_groups=1000, eta=Fraction(eta), max_staleness=1, slots=10_000
    )
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
    first = start(machine, 0)
    start(machine, 1)
    machine.slots_freed("rollout-0", {first.parts[0].key: 1})
    assert machine.closed() is Closed.SLOTS
    machine.slots_freed("rollout-0", {first.parts[0].key: 2})
    assert machine.closed() is Closed.OPEN


def test_a_slot_that_was_left_for_a_tool_is_taken_again_even_if_another_has_it():
    machine = admission(slots=4, n=2)
    first, second = start(machine, 0), start(machine, 1)
    machine.slots_freed("rollout-0", {first.parts[0].key: 1, second.parts[0].key: 1})
    third = start(machine, 2)
    assert machine.closed() is Closed.SLOTS
    machine.slots_freed("rollout-0", {second.parts[0].key: 1})
    assert machine.workers["rollout-0"].used == 2 + 1 + 2 == len(third.parts[0].indices) + 3
    assert machine.closed() is Closed.SLOTS


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
    assert machine.choose() == ({"rollout-1": 2}, 1)


def test_kept_tokens_continue_on_no_older_weights_than_theirs():
    machine = admission(workers=2, slots=2, eta=Fraction(1), max_staleness=2)
    group = start(machine, 0)
    lent, own = machine.workers.values()
    assert workers_of(group) == [(lent.name, (0,)), (own.name, (1,))]
    machine.version = 1
    lent.set_down(True)
    machine.lose(lent.name)
    group.partial[0] = PartialResponse(((0, 2), (1, 3)))
    assert machine.choose() is None, "the other worker has version 0"
    own.end_load(1)
    assert machine.choose() == ({own.name: 1}, 1)


def test_the_worked_example_of_placing():
    """docs/admission.md: n = 4 on workers a (version 5, 2 free slots), b (version 5, 1), c (version 4, 3),
    max_staleness = 1."""
    machine = admission(workers=3, slots=3, n=4, eta=Fraction(1), max_staleness=1)
    machine.version = 5
    a, b, c = machine.workers.values()
    a.end_load(5), b.end_load(5), c.end_load(4)
    a.change_evals(1), b.change_evals(2)
    assert machine.closed() is Closed.DEADLINES, (
        "due in the window that has begun: version 4 is too old with a bound of 1"
    )
    machine = admission(workers=3, slots=3, n=4, eta=Fraction(1), max_staleness=2)
    machine.version, machine.fleet.travel.is_short = 5, False
    a, b, c = machine.workers.values()
    a.end_load(5), b.end_load(5), c.end_load(4)
    a.change_evals(1), b.change_evals(2)
    group = start(machine, 0)
    assert workers_of(group) == [("rollout-0", (0, 1)), ("rollout-1", (2,)), ("rollout-2", (3,))]
    assert group.deadline == 4 + 2
    a.change_evals(-1)
    end_part(machine, group.parts[1])
    c.set_down(True)
    machine.lose("rollout-2")
    assert group.unplaced == (3,)
    (part,) = machine.place_again(group, machine.choose())
    assert (part.key.number, part.worker, part.indices, part.version) == (3, "rollout-0", (3,), 5)
    assert group.deadline == 5 + 2, "all that is left began on version 5"
    assert machine.unplaced == {}


def test_lost_responses_are_placed_before_a_new_group_and_only_on_workers_that_are_new_enough():
    machine = admission(workers=3, slots=2, n=2, eta=Fraction(1), max_staleness=1)
    machine.version = 1
    for name in ("rollout-0", "rollout-1"):
        machine.workers[name].end_load(1)
    group = start(machine, 0)
    assert workers_of(group) == [("rollout-0", (0,)), ("rollout-1", (1,))]
    machine.workers["rollout-1"].change_evals(1)
    machine.workers["rollout-0"].set_down(True)
    machine.lose("rollout-0")
    assert machine.closed() is Closed.DEADLINES, "rollout-2 has room, but holds version 0"
    assert [worker.name for worker in machine.refused()] == ["rollout-2"]
    machine.workers["rollout-2"].end_load(1)
    assert machine.choose() == ({"rollout-2": 1}, 1)


def test_a_group_that_is_larger_than_a_worker_runs_on_several_and_a_whole_one_never_does():
    machine = admission(workers=3, slots=2, n=5)
    assert workers_of(start(machine, 0)) == [
        ("rollout-0", (0, 1)),
        ("rollout-1", (2, 3)),
        ("rollout-2", (4,)),
    ]
    assert admission(workers=3, slots=2, n=5, placement="group").closed() is Closed.SLOTS
    whole = admission(workers=3, slots=6, n=5, placement="group")
    assert [workers_of(start(whole, number)) for number in range(3)] == [
        [(f"rollout-{i}", (0, 1, 2, 3, 4))] for i in range(3)
    ]
    assert whole.closed() is Closed.SLOTS


def lagging(*, max_staleness, ended):
    """Six groups of two responses run on the only worker when version 1 is made; `ended` of them end before
    it arrives. Then version 2 is made."""
    machine = admission(eta=Fraction(1), max_staleness=max_staleness, window_groups=8)
    worker = machine.workers["rollout-0"]
    attempts = [start(machine, number) for number in range(6)]
    machine.open_window()
    worker.begin_prefetch(1)
    for attempt in attempts[:ended]:
        machine.leave(attempt, Stage.DROPPED, "failed")
    worker.begin_load()
    worker.end_load(1)
    machine.open_window()
    return machine


@pytest.mark.parametrize(
    ("ended", "closed"), [(0, Closed.DEADLINES), (2, Closed.DEADLINES), (3, Closed.OPEN), (6, Closed.OPEN)]
)
def test_a_group_waits_for_a_load_while_weights_arrive_before_half_of_what_runs_has_ended(ended, closed):
    assert lagging(max_staleness=2, ended=ended).closed() is closed


def test_where_weights_travel_long_a_group_still_waits_if_it_would_be_due_in_the_window_that_has_begun():
    machine = lagging(max_staleness=2, ended=6)
    assert machine.deadline_from(machine.workers["rollout-0"].version) == 3
    machine.open_window()
    assert machine.closed() is Closed.DEADLINES


@pytest.mark.parametrize("ended", [0, 6])
def test_a_load_ends_the_wait(ended):
    machine = lagging(max_staleness=2, ended=ended)
    worker = machine.workers["rollout-0"]
    worker.begin_prefetch(2)
    worker.begin_load()
    assert machine.closed() is Closed.LOADING
    worker.end_load(2)
    assert machine.closed() is Closed.OPEN


def test_a_worker_that_loads_gets_nothing():
    machine = admission()
    machine.workers["rollout-0"].begin_load()
    assert machine.closed() is Closed.LOADING


def test_live_and_trained_groups_never_exceed_the_run():
    machine = admission(window_groups=4, total_groups=4, eta=Fraction(2), max_staleness=2)
    attempts = [start(machine, number) for number in range(4)]
    assert machine.closed() is Closed.END
    machine.leave(attempts[0], Stage.DROPPED, "failed")
    assert machine.closed() is Closed.OPEN, "a dropped group is replaced"


@pytest.mark.slow
@settings(max_examples=100)
@given(
    eta=st.sampled_from(["0", "0.25", "0.5", "1", "2"]),
    window_groups=st.integers(1, 6),
    workers=st.integers(1, 3),
    slots=st.integers(2, 9),
    placement=st.sampled_from(["response", "group"]),
    choices=st.lists(
        st.tuples(st.sampled_from(["finish", "take", "load", "die"]), st.integers(0, 99)), max_size=120
    ),
)
def test_no_sequence_of_events_breaks_the_bound_or_leaves_nothing_to_do(
    eta, window_groups, workers, slots, placement, choices
):
    """Finishes, takes, deaths and lagging loads in any order. Finished groups always suffice for the next
    take once all have finished."""
    bound, few = math.ceil(Fraction(eta)), {"slots": slots, "placement": placement, "total_groups": 10_000}
    machine = admission(
        window_groups=window_groups, eta=Fraction(eta), max_staleness=bound, workers=workers, **few
    )
    number, began = 0, {}

    def admit_all():
        nonlocal number
        while machine.is_open():
            lost = next(iter(machine.unplaced.values()), None)
            if lost is not None:
                machine.place_again(lost, machine.choose())
            else:
                start(machine, number)
                number += 1
        for attempt in machine.ledger.running.values():
            if not attempt.unplaced:
                began[attempt.prompt.uid] = min(part.version for part in attempt.parts.values())

    def take_one():
        for attempt in machine.takeable(1):
            machine.take(attempt)
            assert machine.version - began[attempt.prompt.uid] <= bound
            machine.ledger.move(attempt, Stage.TRAINED)
            if machine.takes_left == 0:
                assert machine.open_window() == []
            return True
        return False

    admit_all()
    for what, pick in choices:
        running = [attempt for attempt in machine.ledger.running.values() if not attempt.unplaced]
        if what == "finish" and running:
            end(machine, running[pick % len(running)])
        elif what == "take":
            take_one()
        elif what == "load":
            worker = machine.workers[f"rollout-{pick % workers}"]
            worker.set_down(False)
            worker.end_load(max(worker.version, machine.version - pick // workers % 2))
        elif what == "die":
            name = f"rollout-{pick % workers}"
            machine.workers[name].set_down(True)
            machine.lose(name)
        admit_all()
    for worker in machine.workers.values():
        worker.set_down(False)
        worker.end_load(machine.version)
    admit_all()
    while any_running := [attempt for attempt in machine.ledger.running.values() if not attempt.unplaced]:
        for attempt in any_running:
            end(machine, attempt)
        admit_all()
    assert not machine.unplaced
    assert take_one(), "everything is loaded and finished, and the trainer would wait for ever"
