"""Advantages by hand and by other formulas; overlong shaping; what a plan makes of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.step_plan import grpo, reinforce_plus_plus_baseline, rloo, shaped_reward
from tests.train.train_samples import make_step
from tests.trainers import planned

groups_of_rewards = st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=8), min_size=1, max_size=6)


def test_one_success_in_four():
    # mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, std 1/2; the others' mean is 0 or 1/3.
    rewards = [[1.0, 0.0, 0.0, 0.0]]
    assert grpo(rewards, True)[0] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert grpo(rewards, False) == [[0.75, -0.25, -0.25, -0.25]]
    assert rloo(rewards)[0] == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("rewards", [[], [0.3], [0.1, 0.1, 0.1], [1.0] * 8])
def test_equal_rewards_teach_nothing(rewards):
    for found in (
        grpo([rewards], True),
        grpo([rewards], False),
        rloo([rewards]),
        reinforce_plus_plus_baseline([rewards]),
    ):
        assert found == [[0.0] * len(rewards)]


@given(groups_of_rewards, st.booleans())
def test_advantages_of_a_group_sum_to_zero(groups, normalize):
    for found in (grpo(groups, normalize), rloo(groups)):
        assert [math.fsum(advantages) for advantages in found] == pytest.approx([0.0] * len(groups), abs=1e-5)


def test_a_response_in_the_overlong_buffer_loses_by_how_far_it_reaches_in():
    meta = make_step(0, num_groups=1)[0][0].trajectories[0]
    algorithm = AlgorithmSection(overlong_buffer_tokens=20, overlong_penalty_factor=0.5)
    lengths = {10: 0.0, 80: 0.0, 85: 0.125, 90: 0.25, 100: 0.5, 300: 0.5}
    for length, penalty in lengths.items():
        shaped = shaped_reward(replace(meta, response_tokens=length, reward=1.0), algorithm, 100)
        assert shaped == pytest.approx(1.0 - penalty)


@pytest.mark.parametrize("cut", ["length", "max_turns"])
def test_truncated_responses_count_in_their_groups_mean_and_are_not_trained(cut):
    (group,), _ = make_step(0, num_groups=1, n=4)
    reasons = [cut, "stop", "stop", "stop"]
    metas = [
        replace(meta, reward=float(reason == cut), finish_reason=reason)
        for meta, reason in zip(group.trajectories, reasons, strict=True)
    ]
    (plan,) = planned(
        [replace(group, trajectories=tuple(metas))], mask_truncated=True, normalize_advantages=False
    )
    (step,) = plan.optimizer_steps
    assert [(t.trajectory, t.advantage) for t in step.trajectories] == [(1, -0.25), (2, -0.25), (3, -0.25)]
    assert step.num_trajectories == 3
    assert step.num_loss_tokens == sum(meta.response_tokens for meta in metas[1:])
