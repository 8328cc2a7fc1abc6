"""Trajectories that crossed an update (`async_training.mixed_versions`)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from asyncrl_cli.profile.arithmetic import mixed_requeues, mixes
from tests.loop.worlds import Ran, run_world, settings


def crossing(mixed: str, **changes: Any) -> Ran:
    """Some responses are longer than a window."""
    sizes = {"window_steps": 1, "step_groups": 2, "train_steps": 30, "n": 4} | changes
    chosen = settings("partial-rollout", eta=Fraction(2), mixed_versions=mixed, **sizes)
    profile = chosen.profile
    times = {"response_tokens": lambda rng: 150 if rng.random() < 0.3 else 5, "mixes": mixes(profile)}
    ran = run_world(chosen, times=times | {"mixed_requeues": mixed_requeues(profile)})
    assert ran.error is None
    last = ran.recorder.steps[-1]
    assert last.ledger["trained"] == 60
    assert max(ran.staleness()) <= 2
    return ran


def test_by_default_they_are_trained():
    assert max(crossing("train").spans()) > 0


@pytest.mark.parametrize(("mixed", "most_requeues"), [("reject", 2), ("requeue", 2), ("requeue", 0)])
def test_rejected_or_sampled_again_none_is_trained_and_their_tokens_count_as_discarded(mixed, most_requeues):
    ran = crossing(mixed, max_requeues=most_requeues)
    assert set(ran.spans()) == {0}
    last, tries = ran.recorder.steps[-1], most_requeues if mixed == "requeue" else 0
    assert set(last.failures) == {"mixed"}
    assert last.tokens_discarded > 0
    reasons = ran.recorder.fields("dropped", "reason")
    assert set(reasons) <= {"mixed"}
    assert bool(reasons) == (tries == 0), "with two further tries no group loses three of four"
    lengths = [meta.response_tokens for _, meta in ran.trajectories]
    assert (lengths.count(150) > 0.1 * len(lengths)) == (tries > 0), "long ones come through when tried again"


def test_where_responses_begin_again_at_a_load_none_is_mixed_and_only_tokens_before_the_load_are_lost():
    ran, tried_again = (crossing(mixed, **one) for mixed, one in (("train", RESTART), ("requeue", MANY)))
    assert set(ran.spans()) == {0}
    assert not ran.recorder.fields("dropped", "reason")
    last, other = ran.recorder.steps[-1], tried_again.recorder.steps[-1]
    assert set(last.failures) == {"mixed"}
    given_up = [one.tokens_discarded / one.failures["mixed"] for one in (last, other)]
    assert 0 < given_up[0] < given_up[1] == 150, "requeue also loses what is sampled after the load"


RESTART, MANY = {"interrupt": "restart"}, {"max_requeues": 1000}


def test_groups_left_with_a_single_response_are_dropped_as_mixed_and_do_not_end_the_run():
    """Every response crosses an update now and then, many more than `task.max_failed_ratio` allows."""
    ran = crossing("reject", n=2, max_failed_ratio=0.0)
    reasons = ran.recorder.fields("dropped", "reason")
    assert set(reasons) == {"mixed"}
    assert ran.recorder.steps[-1].ledger["dropped"] == len(reasons) > 5
