"""Losses against their formulas in numpy, gradients against those derived by hand, and figures reduced by their kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.loop.values import shown
from asyncrl_cli.profile.schema import AlgorithmSection
from asyncrl_cli.train.losses import LOSSES, LossBatch, Metric, check_loss, find_loss, max_of, mean_of, sum_of
from asyncrl_cli.train.losses.vanilla import vanilla
from asyncrl_cli.train.policy_update import reduced

MASKING = AlgorithmSection(old_logprobs="recompute", max_importance_weight=1.5)


def random_inputs(seed: int, num_tokens: int = 200):
    rng = np.random.default_rng(seed)
    theta, prox, mu = (rng.normal(-2.0, 0.4, num_tokens) for _ in range(3))
    return theta, prox, mu, rng.normal(0.0, 1.0, num_tokens)


def batch_of(theta, prox, mu, advantages) -> LossBatch:
    theta_N, prox_N, mu_N, advantages_N = (torch.as_tensor(array, dtype=torch.float64) for array in (theta, prox, mu, advantages))
    return LossBatch(
        logp_theta_N=theta_N.requires_grad_(),
        logp_prox_N=prox_N,
        logp_mu_N=mu_N,
        advantages_N=advantages_N,
        rows_N=torch.zeros(len(theta_N), dtype=torch.int64),
        num_rows=1,
        step_tokens=len(theta_N),
        step_trajectories=1,
    )


def test_the_loss_is_the_decoupled_formula_token_by_token():
    theta, prox, mu, advantage = inputs = random_inputs(0)
    u, w = np.exp(theta - prox), np.exp(prox - mu)
    expected = -w * np.minimum(u * advantage, np.clip(u, 0.8, 1.28) * advantage)
    found = [vanilla(batch_of(*(array[i : i + 1] for array in inputs)), AlgorithmSection())[0].item() for i in range(200)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_gradient_is_minus_w_u_a_where_the_clip_does_not_bind_and_zero_where_it_does():
    theta, prox, mu, advantage = random_inputs(1)
    u, w = np.exp(theta - prox), np.exp(prox - mu)
    binds = ((advantage > 0) & (u > 1.28)) | ((advantage < 0) & (u < 0.8))
    batch = batch_of(theta, prox, mu, advantage)
    loss, metrics = vanilla(batch, AlgorithmSection())
    loss.backward()
    np.testing.assert_allclose(batch.logp_theta_N.grad.numpy(), np.where(binds, 0.0, -w * u * advantage), rtol=1e-12)
    assert 10 < binds.sum() < 100
    assert metrics["correction/clipped_ratio"].amount == binds.sum()
    assert metrics["correction/ratio_mean"].amount.item() == pytest.approx(u.sum())
    assert metrics["correction/ratio_max"].amount.item() == pytest.approx(u.max())


def test_tokens_above_the_importance_limit_lose_nothing_and_teach_nothing():
    theta, prox, mu, advantage = random_inputs(2)
    batch = batch_of(theta, prox, mu, advantage)
    loss, metrics = vanilla(batch, MASKING)
    loss.backward()
    over = np.exp(prox - mu) > 1.5
    kept = vanilla(batch_of(*(array[~over] for array in (theta, prox, mu, advantage))), MASKING)[0]
    assert 10 < over.sum() < 100
    assert loss.item() == pytest.approx(kept.item())
    assert metrics["correction/masked_ratio"].amount == over.sum()
    assert not batch.logp_theta_N.grad.numpy()[over].any()


def test_with_prox_equal_to_mu_the_weight_is_exactly_one():
    theta, mu, _, advantage = random_inputs(3)
    _, metrics = vanilla(batch_of(theta, mu, mu, advantage), AlgorithmSection(old_logprobs="recompute"))
    assert metrics["correction/weight_mean"].amount == metrics["correction/weight_mean"].weight == len(mu)
    assert metrics["correction/weight_max"].amount == 1.0


class OneRank:
    device = torch.device("cpu")

    def sum(self, tensor):
        return tensor

    max = sum


def test_figures_are_reduced_by_their_kind_whatever_their_names():
    seen = []
    for values in ([1.0, 2.0], [], [6.0]):
        values_N = torch.tensor(values)
        seen.append({"a": sum_of(values_N), "b": mean_of(values_N), "c": max_of(values_N)})
    assert shown(reduced(OneRank(), seen)) == {"a": 9.0, "b": 3.0, "c": 6.0}


def test_of_no_tokens_at_all_a_mean_is_absent():
    seen = [{"mean": mean_of(torch.zeros(0)), "max": Metric(kind="max", amount=torch.tensor(-math.inf))}]
    assert shown(reduced(OneRank(), seen)) == {"max": -math.inf}


def test_an_unknown_loss_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match='loss_mode = "vanila" is not known') as refused:
        check_loss("vanila")
    assert "vanilla" in refused.value.hint
    assert {name: find_loss(name) for name in LOSSES} == {"vanilla": vanilla}
