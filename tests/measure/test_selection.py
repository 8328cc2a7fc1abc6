"""How far a selection is from what it was selected from, and the standard error of that."""

from __future__ import annotations

import random
from statistics import fmean, pstdev, stdev

import pytest

from asyncrl_cli.measure.values import Cluster, Selection, SelectionError, from_json, to_json

Group = list[tuple[float, bool]]
"""Each member's x, and whether it was selected."""


def groups(rng: random.Random, number: int) -> list[Group]:
    """Members of a group resemble each other; long ones are selected less often, and some groups not at all.
    Groups have 2 to 14 members, those of long ones more."""
    drawn = []
    for _ in range(number):
        common, is_left_out = rng.gauss(5, 1), rng.random() < 0.1
        size = max(2, min(14, round(3 * common - 8)))
        lengths = [min(1000.0, 2.718 ** (common + rng.gauss(0, 0.8))) for _ in range(size)]
        drawn.append([(x, not is_left_out and rng.random() < 1 / (1 + x / 400)) for x in lengths])
    return drawn


def clusters(drawn: list[Group]) -> list[Cluster]:
    return [
        (
            sum(chosen for _, chosen in group),
            sum(x for x, chosen in group if chosen),
            len(group),
            sum(x for x, _ in group),
            sum(x * x for x, _ in group),
        )
        for group in drawn
    ]


def plain(drawn: list[Group]) -> float:
    members = [member for group in drawn for member in group]
    everything, chosen = [x for x, _ in members], [x for x, is_chosen in members if is_chosen]
    return (fmean(chosen) - fmean(everything)) / pstdev(everything)


def test_the_difference_is_that_of_the_means_in_standard_deviations():
    drawn = groups(random.Random(3), 40)
    of = clusters(drawn)
    assert Selection.of(of).value == pytest.approx(plain(drawn))
    for kind in (Selection, SelectionError):
        merged = kind.of(of[:13]).merge(kind.of(of[13:]))
        assert merged.value == pytest.approx(kind.of(of).value)
        moved = [[(2 * x + 500, chosen) for x, chosen in group] for group in drawn]
        assert kind.of(clusters(moved)).value == pytest.approx(kind.of(of).value), "no unit, no origin"
        assert from_json({"x": to_json({"x": merged})["x"]})["x"] == merged


def test_where_all_were_selected_the_difference_is_0_and_where_none_was_or_all_are_equal_there_is_none():
    everybody = clusters([[(x, True) for x in (1.0, 5.0)], [(x, True) for x in (2.0, 9.0)]])
    assert (Selection.of(everybody).value, SelectionError.of(everybody).value) == (
        0,
        pytest.approx(0, abs=1e-9),
    )
    for nothing in (clusters([[(1.0, False), (2.0, False)]]), clusters([[(7.1, True), (7.1, False)]])):
        assert (Selection.of(nothing).value, SelectionError.of(nothing).value) == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize("number", [64, 200])
def test_the_standard_error_is_the_scatter_of_repeated_draws_and_that_of_a_bootstrap(number):
    """Monte Carlo: 300 draws. Bootstrap: 300 times the groups of one draw, with replacement."""
    rng = random.Random(number)
    repeated = [clusters(groups(rng, number)) for _ in range(300)]
    scatter = stdev([Selection.of(one).value for one in repeated])
    errors = [SelectionError.of(one).value for one in repeated]
    assert fmean(errors) == pytest.approx(scatter, rel=0.1)
    again = [rng.choices(repeated[0], k=number) for _ in range(300)]
    assert errors[0] == pytest.approx(stdev([Selection.of(one).value for one in again]), rel=0.15)
    alone = clusters([[member] for group in groups(rng, number) for member in group])
    assert SelectionError.of(alone).value < 0.9 * scatter, "members resemble each other"
