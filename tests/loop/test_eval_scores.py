"""Mean@n and best@N of an eval set, against enumeration and the published formula of pass@k."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb, isclose

from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.contracts.ports import EvalTry
from asyncrl_cli.contracts.prompt_group import TrajectoryFailure, TrajectoryMeta
from asyncrl_cli.loop.evals import best_of, summary_of


def meta(reward: float, tokens: int = 4, finish_reason: str = "stop") -> TrajectoryMeta:
    lengths = {"prompt_tokens": 3, "response_tokens": tokens, "version_tokens": ((2, tokens),)}
    return TrajectoryMeta(reward=reward, finish_reason=finish_reason, **lengths)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=7), st.data())
def test_best_of_is_the_mean_of_the_best_over_all_choices(rewards, data):
    size = data.draw(st.integers(1, len(rewards)))
    choices = [max(choice) for choice in combinations(rewards, size)]
    assert isclose(best_of(rewards, size), Fraction(sum(choices), len(choices)), abs_tol=1e-12)


@given(st.integers(1, 64), st.data())
def test_for_rewards_of_0_and_1_it_is_pass_at_k(num, data):
    right, k = data.draw(st.integers(0, num)), data.draw(st.integers(1, num))
    expected = 1 - Fraction(comb(num - right, k), comb(num, k))
    assert isclose(best_of([1.0] * right + [0.0] * (num - right), k), expected, abs_tol=1e-12)


def test_a_prompt_weighs_the_same_however_many_of_its_samples_have_a_score():
    failed = TrajectoryFailure("reward", "the reward raised")
    outcomes = dict(a=[meta(1.0), meta(0.0, 9, "length"), failed, failed], b=[meta(1.0)] * 4, c=[failed] * 4)
    ended = [
        (EvalTry({"uid": uid}, "math", i), outcome)
        for uid, own in outcomes.items()
        for i, outcome in enumerate(own)
    ]
    summary = summary_of(ended, version=7, eval_s=2.5)
    assert summary is not None
    assert (summary.version, summary.eval_set, summary.eval_s, summary.samples_per_prompt) == (
        7,
        "math",
        2.5,
        4,
    )
    assert summary.reward_mean == (0.5 + 1.0) / 2
    assert summary.best == ((2, 1.0), (4, 1.0))  # of four only "b" has enough
    assert (summary.num_prompts, summary.num_failed) == (2, 6)
    assert summary.rewards == (0.5, 1.0, None)
    assert summary.truncated_ratio == 1 / 6
    assert summary.response_tokens_median == 4


def test_one_sample_per_prompt_has_no_best_and_failures_alone_no_summary():
    single = summary_of([(EvalTry({"uid": "a"}), meta(0.25))], version=0, eval_s=1.0)
    assert single is not None
    assert (single.reward_mean, single.best) == (0.25, ())
    assert (
        summary_of([(EvalTry({"uid": "a"}), TrajectoryFailure("reward", "it raised"))], version=0, eval_s=1.0)
        is None
    )


def test_rewards_are_in_the_order_of_uids_whichever_worker_was_first():
    ended = [(EvalTry({"uid": uid}), meta(reward)) for uid, reward in (("c", 0.3), ("a", 0.1), ("b", 0.2))]
    one, other = (summary_of(order, version=0, eval_s=1.0) for order in (ended, ended[::-1]))
    assert one is not None
    assert other is not None
    assert one.rewards == other.rewards == (0.1, 0.2, 0.3)
    assert one.prompts == other.prompts
    fewer = summary_of(ended[1:], version=0, eval_s=1.0)
    assert fewer is not None
    assert fewer.prompts != one.prompts
