"""How long weights travel, counted in responses that end meanwhile."""

from __future__ import annotations

import pytest

from asyncrl_cli.contracts.prompt_group import AttemptKey, PartKey
from asyncrl_cli.loop.fleet import Travel


def groups(**unfinished):
    return {PartKey(AttemptKey(uid, 0, 0), 0): count for uid, count in unfinished.items()}


def test_the_worked_example_of_the_docstring():
    travel = Travel(2)
    travel.set_out("a", groups(p=4))
    travel.set_out("b", groups(q=3, r=3))
    travel.arrived("a", groups(p=3))
    travel.arrived("b", groups(q=1, r=3))
    assert travel.is_short


@pytest.mark.parametrize(("left", "is_short"), [(6, True), (4, True), (3, False), (0, False)])
def test_a_travel_is_short_if_fewer_than_half_of_the_responses_end_meanwhile(left, is_short):
    travel = Travel(1)
    travel.set_out("a", groups(p=6))
    travel.arrived("a", groups(p=left, begun_on_the_way=8))
    assert travel.is_short is is_short


def test_it_begins_when_the_version_is_made_or_if_later_when_the_worker_turns_to_it():
    travel = Travel(1)
    travel.set_out("a", groups(p=6))
    travel.set_out("a", groups(p=1))
    travel.arrived("a", groups(p=1))
    assert not travel.is_short


def test_it_is_short_before_anything_is_known_and_not_where_nothing_ran():
    travel = Travel(1)
    assert travel.is_short
    travel.set_out("a", {})
    travel.arrived("a", {})
    assert not travel.is_short


def test_what_was_on_its_way_to_a_process_that_died_is_not_counted():
    travel = Travel(1)
    travel.set_out("a", groups(p=6))
    travel.lost("a")
    travel.set_out("a", groups(q=2))
    travel.arrived("a", groups(q=2))
    assert travel.is_short


def test_older_loads_weigh_less_and_are_forgotten():
    travel = Travel(2)
    for left, loads in ((0, 40), (10, 12)):
        for load in range(loads):
            worker = "ab"[load % 2]
            travel.set_out(worker, groups(p=10))
            travel.arrived(worker, groups(p=left))
    assert travel.is_short
