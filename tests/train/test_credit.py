"""Advantages from columns, against their formulas in NumPy (reference_losses.py)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.measure.values import Ratio
from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.batch import ADVANTAGES, FINISHED, REF, RETURNS, VALUES, step_batches
from asyncrl_cli.train.critic import credit, gae
from asyncrl_cli.train.kl_coefficient import KlCoefficient
from asyncrl_cli.train.step_plan import advantages_of
from tests.train import reference_losses as reference
from tests.train.train_samples import OneRank, make_step
from tests.trainers import planned

trajectories = st.lists(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=9), min_size=1, max_size=5
)


def flat(of):
    ends = np.cumsum([len(tokens) for tokens in of])
    rewards, values = np.array([pair for tokens in of for pair in tokens]).T
    return rewards, values, ends


@given(trajectories, st.floats(0.01, 1), st.floats(0, 1), st.lists(st.booleans(), min_size=5, max_size=5))
def test_gae_is_its_definition_for_finished_and_unfinished_trajectories(of, gamma, lam, unfinished):
    rewards, values, ends = flat(of)
    unfinished = np.array(unfinished[: len(of)])
    expected = [
        reference.gae([r for r, _ in tokens], [v for _, v in tokens], gamma, lam, is_unfinished)
        for tokens, is_unfinished in zip(of, unfinished, strict=True)
    ]
    found = gae(rewards, values, ends, gamma, lam, unfinished)
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-9, atol=1e-9)
    if not unfinished.any():
        np.testing.assert_array_equal(gae(rewards, values, ends, gamma, lam), found)


def credited(seed, max_tokens=8192, kl=None, cut=(), **keys):
    """The plan of one optimizer step of 4 groups, its columns of reference, values, advantages and returns,
    and its metrics. `cut`: the trajectories of each group that a limit has cut off."""
    metas, payloads = make_step(seed, num_groups=4)
    metas = [replace(one, trajectories=with_cut(one.trajectories, cut)) for one in metas]
    (plan,) = planned(metas, **keys)
    groups, algorithm, ranks = dict(enumerate(payloads)), AlgorithmSection(**keys), OneRank()
    (step,) = plan.optimizer_steps
    (batch,) = step_batches(plan, groups, max_tokens=max_tokens, ranks=ranks)
    counts = batch.counts_P
    rng = np.random.default_rng(seed)
    columns = {name: rng.normal(mean, 0.3, sum(counts)) for name, mean in ((REF, -4.0), (VALUES, 0.5))}
    for name, column in columns.items():
        batch.set_column(name, torch.from_numpy(column).float())
    metrics = credit([batch], algorithm, kl or KlCoefficient(algorithm), ranks)
    mu = np.concatenate([s["logprobs"][s["mask"]] for t in step.trajectories for s in segments_of(groups, t)])
    columns |= {
        name: batch.column(name).numpy()
        for name in (ADVANTAGES, RETURNS, FINISHED)
        if name in batch.microbatches[0].columns
    }
    split = {name: np.split(column, np.cumsum(counts)[:-1]) for name, column in {**columns, "mu": mu}.items()}
    rewards = [payloads[t.group].trajectories[t.trajectory].values["reward"] for t in step.trajectories]
    return step, rewards, split, metrics


def with_cut(metas, cut):
    return tuple(replace(one, finish_reason="length") if i in cut else one for i, one in enumerate(metas))


def segments_of(groups, planned_trajectory):
    return groups[planned_trajectory.group].trajectories[planned_trajectory.trajectory].segments()


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([8192, 60]))
def test_a_critics_advantages_and_returns_and_a_penalty_per_token(seed, max_tokens):
    keys = dict(adv_estimator="gae", gamma=0.99, lam=0.9, use_kl_in_reward=True, kl_coef=0.1, kl_penalty="k2")
    _, rewards, columns, metrics = credited(seed, max_tokens, **keys)
    advantages, sums = [], []
    for reward, values, mu, ref in zip(rewards, columns[VALUES], columns["mu"], columns[REF], strict=True):
        penalties = 0.1 * reference.kl("k2", mu.astype(float), ref)[0]
        sums.append(penalties.sum())
        penalties[-1] -= reward
        advantages.append(reference.gae(-penalties, values, 0.99, 0.9))
    for found, advantage, values in zip(columns[RETURNS], advantages, columns[VALUES], strict=True):
        np.testing.assert_allclose(found, advantage + values, atol=1e-5)
    everything = np.concatenate(advantages)
    expected = (everything - everything.mean()) / np.sqrt(everything.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(columns[ADVANTAGES]), expected, atol=1e-5)
    assert metrics["reward/kl_penalty"].value == pytest.approx(np.mean(sums), rel=1e-5)


def test_a_response_that_was_cut_off_is_credited_with_what_the_critic_expects_of_it():
    """Extended GAE: its reward does not count, and at the end the critic's last value goes on."""
    keys = dict(
        adv_estimator="gae", gamma=0.98, lam=0.9, normalize_advantages=False, bootstrap_truncated=True
    )
    step, rewards, columns, _ = credited(4, cut=(1, 5), **keys)
    assert sum(one.is_unfinished for one in step.trajectories) == 8
    every = zip(step.trajectories, rewards, columns[VALUES], columns[ADVANTAGES], strict=True)
    for one, reward, values, found in every:
        is_cut = one.trajectory in (1, 5)
        assert one.is_unfinished is is_cut
        at_end = np.zeros(len(values))
        at_end[-1] = 0.0 if is_cut else reward
        np.testing.assert_allclose(found, reference.gae(at_end, values, 0.98, 0.9, is_cut), atol=1e-5)
    for one, finished in zip(step.trajectories, columns[FINISHED], strict=True):
        assert set(finished) == {0.0 if one.is_unfinished else 1.0}


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_other_estimators_compare_rewards_less_the_sum_of_penalties(estimator):
    keys = {"adv_estimator": estimator, "use_kl_in_reward": True, "kl_coef": 0.05}
    step, rewards, columns, _ = credited(3, **keys)
    penalized: dict[int, list[float]] = {group: [0.0] * 8 for group in range(4)}
    for planned_trajectory, reward, mu, ref in zip(
        step.trajectories, rewards, columns["mu"], columns[REF], strict=True
    ):
        penalized[planned_trajectory.group][planned_trajectory.trajectory] = reward - 0.05 * (mu - ref).sum()
    advantages = advantages_of(list(penalized.values()), AlgorithmSection(adv_estimator=estimator))
    for planned_trajectory, found in zip(step.trajectories, columns[ADVANTAGES], strict=True):
        expected = advantages[planned_trajectory.group][planned_trajectory.trajectory]
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_weight_of_the_kl_follows_its_target():
    """By hand, with 32 trajectories a step: the error of a KL five times the target is cut to 0.2, that of
    one a tenth below it is -0.1, that of a negative estimate is cut to -0.2."""
    keys = dict(use_kl_in_reward=True, kl_coef=0.5, kl_target=0.1, kl_horizon=640.0)
    kl = KlCoefficient(AlgorithmSection(**keys))
    for measured, factor in ((0.5, 1.01), (0.09, 0.995), (-0.3, 0.99), (0.1, 1.0)):
        before, metrics = kl.value, {"reward/kl": Ratio(10 * measured, 10)}
        kl.update(metrics, 32)
        assert metrics["reward/kl_coef"].value == before
        assert kl.value == pytest.approx(before * factor, rel=1e-12)
    kept = kl.value
    for broken in (math.nan, math.inf):
        kl.update({"reward/kl": Ratio(broken, 10)}, 32)
        assert kl.value == kept
    # 1 - 0.2 * 32 / 2 would be -2.2
    fast = KlCoefficient(AlgorithmSection(**keys | {"kl_horizon": 2.0}))
    fast.update({"reward/kl": Ratio(0.0, 10)}, 32)
    assert fast.value == pytest.approx(0.5 * 0.8, rel=1e-12)
    fixed = KlCoefficient(AlgorithmSection(use_kl_in_reward=True, kl_coef=0.5))
    fixed.update({"reward/kl": Ratio(5.0, 10)}, 32)
    assert fixed.value == 0.5


def test_a_step_is_penalized_with_the_weight_that_the_steps_before_it_left():
    keys = dict(use_kl_in_reward=True, kl_coef=0.5, kl_target=0.001, kl_horizon=16.0)
    kl = KlCoefficient(AlgorithmSection(**keys))
    for weight in (0.5, 0.5 * 1.4):  # 32 trajectories, far above the target: 1 + 0.2 * 32 / 16
        _, _, columns, metrics = credited(4, kl=kl, kl_penalty="k2", **keys)
        pairs = zip(columns["mu"], columns[REF], strict=True)
        estimates = [reference.kl("k2", mu.astype(float), ref)[0] for mu, ref in pairs]
        assert metrics["reward/kl"].value == pytest.approx(np.concatenate(estimates).mean(), rel=1e-5)
        penalty = weight * np.mean([one.sum() for one in estimates])
        assert metrics["reward/kl_penalty"].value == pytest.approx(penalty, rel=1e-5)
