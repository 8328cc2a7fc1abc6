"""The loss against its formula in numpy, and its gradient against the one derived by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl_cli.train.losses import decoupled_ppo


def random_inputs(seed: int, num_tokens: int = 200):
    rng = np.random.default_rng(seed)
    theta, prox, mu = (rng.normal(-2.0, 0.4, num_tokens) for _ in range(3))
    return theta, prox, mu, rng.normal(0.0, 1.0, num_tokens)


def tensors(*arrays):
    return [torch.tensor(a, dtype=torch.float64) for a in arrays]


def test_loss_is_the_decoupled_formula_token_by_token():
    theta, prox, mu, advantage = random_inputs(0)
    u, w = np.exp(theta - prox), np.exp(prox - mu)
    expected = -w * np.minimum(u * advantage, np.clip(u, 0.8, 1.28) * advantage)
    losses = decoupled_ppo(*tensors(theta, prox, mu, advantage), clip_ratio_low=0.2, clip_ratio_high=0.28)
    np.testing.assert_allclose(losses.loss_N.numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(losses.ratio_N.numpy(), u, rtol=1e-12)
    np.testing.assert_allclose(losses.weight_N.numpy(), w, rtol=1e-12)


def test_gradient_is_minus_w_u_a_where_the_clip_does_not_bind_and_zero_where_it_does():
    theta, prox, mu, advantage = random_inputs(1)
    u, w = np.exp(theta - prox), np.exp(prox - mu)
    binds = ((advantage > 0) & (u > 1.28)) | ((advantage < 0) & (u < 0.8))
    theta_N, *rest = tensors(theta, prox, mu, advantage)
    theta_N.requires_grad_()
    losses = decoupled_ppo(theta_N, *rest, clip_ratio_low=0.2, clip_ratio_high=0.28)
    losses.loss_N.sum().backward()
    np.testing.assert_allclose(theta_N.grad.numpy(), np.where(binds, 0.0, -w * u * advantage), rtol=1e-12)
    np.testing.assert_array_equal(losses.clipped_N.numpy(), binds)
    assert 10 < binds.sum() < 100


def test_tokens_above_the_importance_limit_lose_nothing_and_teach_nothing():
    theta, prox, mu, advantage = random_inputs(2)
    theta_N, *rest = tensors(theta, prox, mu, advantage)
    theta_N.requires_grad_()
    losses = decoupled_ppo(theta_N, *rest, clip_ratio_low=0.2, clip_ratio_high=0.28, max_importance_weight=1.5)
    losses.loss_N.sum().backward()
    over = np.exp(prox - mu) > 1.5
    assert 10 < over.sum() < 100
    np.testing.assert_array_equal(losses.masked_N.numpy(), over)
    assert not losses.loss_N.detach().numpy()[over].any()
    assert not theta_N.grad.numpy()[over].any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_with_prox_equal_to_mu_the_weight_is_exactly_one(advantage):
    theta, mu, _, _ = random_inputs(3)
    theta_N, mu_N = (torch.tensor(a, dtype=torch.float32) for a in (theta, mu))
    losses = decoupled_ppo(theta_N, mu_N, mu_N, torch.full_like(mu_N, advantage), clip_ratio_low=0.2, clip_ratio_high=0.28)
    assert (losses.weight_N == 1.0).all()
