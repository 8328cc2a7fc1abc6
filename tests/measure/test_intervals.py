"""Intervals of eval rewards: against the published formulas and examples, and their coverage, enumerated or
simulated."""

from __future__ import annotations

from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.measure.intervals import Interval, mean_interval, paired_change, unpaired_change

Z = 1.959963984540054  # R: qnorm(0.975)


@given(st.integers(1, 200), st.data())
def test_for_rewards_of_0_and_1_the_interval_of_a_mean_is_agresti_and_coulls(num, data):
    right = data.draw(st.integers(0, num))
    share = (right + Z**2 / 2) / (num + Z**2)
    width = Z * sqrt(share * (1 - share) / (num + Z**2))
    assert mean_interval([1.0] * right + [0.0] * (num - right)) == pytest.approx(
        (max(share - width, 0), min(share + width, 1))
    )


@given(st.lists(st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1)]), min_size=1, max_size=60))
def test_for_rewards_of_0_and_1_the_interval_of_a_change_is_agresti_and_mins(pairs):
    rises, falls, num = pairs.count((0, 1)) + 0.5, pairs.count((1, 0)) + 0.5, len(pairs) + 2
    middle, width = (rises - falls) / num, Z / num * sqrt(rises + falls - (rises - falls) ** 2 / num)
    change = paired_change(*zip(*pairs, strict=True))
    assert change.interval == pytest.approx((max(middle - width, -1), min(middle + width, 1)))


def test_the_difference_of_two_means_is_newcombes_published_example():
    """56 of 70 against 48 of 80, with Wilson's intervals: 0.0524 to 0.3339 (Newcombe 1998, table II, method
    10)."""

    def wilson(right, num):
        middle, width = right + Z**2 / 2, Z * sqrt(right * (num - right) / num + Z**2 / 4)
        return right / num, Interval((middle - width) / (num + Z**2), (middle + width) / (num + Z**2))

    change = unpaired_change(wilson(48, 80), wilson(56, 70), 70)
    assert change.interval == pytest.approx((0.0524, 0.3339), abs=5e-5)


@pytest.mark.parametrize("num", [8, 16, 64, 256])
def test_few_prompts_are_covered_too_whatever_the_share_of_right_answers(num):
    """Exact: over all outcomes, weighted by their probability."""
    intervals = [mean_interval([1.0] * right + [0.0] * (num - right)) for right in range(num + 1)]
    for share in np.linspace(0.02, 0.98, 49):
        chances = [comb(num, right) * share**right * (1 - share) ** (num - right) for right in range(num + 1)]
        assert (
            sum(
                chance for chance, (low, high) in zip(chances, intervals, strict=True) if low <= share <= high
            )
            > 0.92
        )


@pytest.mark.parametrize("num", [4, 8, 32])
def test_mean_rewards_of_several_samples_are_covered_alone_and_as_changes(num):
    rng = np.random.default_rng(3)
    hard, runs = rng.beta(0.3, 1.0, (2000, num)), 2000
    old, new = (rng.binomial(4, np.clip(hard + more, 0, 1)) / 4 for more in (0.0, 0.1))
    truth = np.clip(np.random.default_rng(4).beta(0.3, 1.0, 10**6)[:, None] + [0.0, 0.1], 0, 1).mean(axis=0)
    alone = [mean_interval(row) for row in old.tolist()]
    changes = [paired_change(*pair).interval for pair in zip(old.tolist(), new.tolist(), strict=True)]
    assert sum(low <= truth[0] <= high for low, high in alone) > 0.92 * runs
    assert sum(low <= truth[1] - truth[0] <= high for low, high in changes) > 0.92 * runs


def test_four_prompts_do_not_tell_and_say_how_many_would():
    change = paired_change([0.0, 0.0, 0.0, 0.1], [0.1, 0.1, 0.1, 0.1])
    assert (change.mean, change.is_clear) == (pytest.approx(0.075), False)
    assert change.enough_prompts > 20 * 4


def test_with_enough_prompts_four_of_five_evals_are_clear():
    """The usual formula for a power of 80%: (1.96 + 0.84)^2 * variance / change^2. Of 400 prompts 12 rise and
    5 fall."""
    before, after = [0.0] * 200 + [1.0] * 200, [1.0] * 12 + [0.0] * 193 + [1.0] * 195
    change = paired_change(before, after)
    variance = np.var(np.subtract(after, before))
    assert not change.is_clear
    assert change.enough_prompts == pytest.approx((1.96 + 0.8416) ** 2 * variance / change.mean**2, rel=0.1)


def test_rewards_outside_0_and_1_widen_the_range_and_no_interval_leaves_it():
    assert mean_interval([-1.0]).low == pytest.approx(-1.0, abs=0.2)
    assert mean_interval([0.0] * 3).low == 0.0
    assert mean_interval([5.0] * 3).high == 5.0
