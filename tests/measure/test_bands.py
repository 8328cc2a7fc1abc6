"""Warnings of figures of training that leave their band."""

from __future__ import annotations

from asyncrl_cli.measure.bands import Bands
from asyncrl_cli.profile.algorithm_section import AlgorithmSection


def test_a_figure_is_warned_of_when_it_leaves_its_band_and_again_only_after_it_was_back():
    bands = Bands(AlgorithmSection(warn_kl=0.2))
    warned = [list(bands.left({"correction/kl": kl})) for kl in (0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.6, 0.9)]
    assert [len(warnings) for warnings in warned] == [0, 0, 0, 0, 1, 0, 0, 1]
    assert warned[4][0].startswith(
        "correction/kl = 0.26, the mean of 5 steps, is above algorithm.warn_kl = 0.2: "
    )
    assert warned[7][0].startswith("correction/kl = 0.36, the mean of 5 steps, is above ")


def test_single_steps_beyond_a_limit_are_not_warned_of():
    """The first steps of the default profile, as two real runs measured them, after one that is worse."""
    measured = (0.12, 0.0, 0.041, 0.05, 0.086, 0.077, 0.102, 0.04, 0.037, 0.066, 0.101, 0.025, 0.034)
    bands = Bands(AlgorithmSection())
    assert not [warning for kl in measured for warning in bands.left({"correction/kl": kl})]


def test_weights_should_not_be_few_and_what_was_not_measured_is_not_judged():
    bands = Bands(AlgorithmSection())
    for _ in range(5):
        assert not list(bands.left({"correction/effective_ratio": 0.6, "ref/kl": 0.0}))
        assert not list(bands.left({}))
    (warning,) = bands.left({"correction/effective_ratio": 0.05})
    assert "is below algorithm.warn_effective_ratio = 0.5" in warning


def test_five_steps_in_a_row_with_one_reward_everywhere_are_warned_of_once() -> None:
    bands = Bands(AlgorithmSection())
    steps = [[0.0, 0.0]] * 4 + [[0.0, 1.0]] + [[0.0, 0.0]] * 7
    told = [list(bands.flat(rewards)) for rewards in steps]
    assert [bool(one) for one in told] == [False] * 9 + [True, False, False]
    assert "the reward 0, which teaches nothing" in told[9][0]
