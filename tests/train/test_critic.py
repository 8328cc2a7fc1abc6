"""The critic: its loss, its optimizer step against a plain loop, its head start, its place in the trainer's
state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.measure.values import shown
from asyncrl_cli.train.critic import value_loss
from tests.train import reference_losses as reference
from tests.train.train_samples import make_step
from tests.trainers import planned, trainer_parts

GAE = {"adv_estimator": "gae", "gamma": 0.99, "lam": 0.9}


def with_a_head(trainer):
    """A head that is not zero, so that values differ and the transformer gets a gradient."""
    head = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 0.05
    trainer.critic.locals()["head.weight"].copy_(head[None])
    return trainer, head


def one_step(seed=1, num_minibatches=1, **keys):
    metas, payloads = make_step(seed, num_groups=2, n=3)
    (plan,) = planned(metas, num_minibatches=num_minibatches, **{**GAE, **keys})
    return {"step_in_window": 0, "plan": plan, "payloads": dict(enumerate(payloads))}, payloads


def test_the_value_loss_has_its_papers_values_and_gradients():
    rng = np.random.default_rng(0)
    values, old, returns = rng.normal(0, 1, (3, 300))
    values_N = torch.tensor(values, requires_grad=True)
    loss_N, is_clipped_N = value_loss(values_N, torch.tensor(old), torch.tensor(returns), 0.3)
    loss_N.sum().backward()
    expected, slopes = reference.value_loss(values, old, returns, 0.3)
    np.testing.assert_allclose(loss_N.detach(), expected, rtol=1e-12)
    np.testing.assert_allclose(values_N.grad, slopes, rtol=1e-12)
    assert 0 < is_clipped_N.sum() < len(values)


def plain_values(model, head, segment) -> torch.Tensor:
    """Of the state before each sampled token: one sequence at a time, without padding."""
    tokens = torch.tensor(segment.tokens_T, dtype=torch.int64)
    return (model.model(tokens[None]).last_hidden_state[0] @ head)[:-1][torch.tensor(segment.mask_T[1:])]


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [8192, 100, 50])
def test_an_optimizer_step_has_the_loss_and_gradient_of_a_plain_loop(
    tiny_model_dir, make_trainer, max_tokens
):
    parts = trainer_parts(tiny_model_dir, **GAE, max_tokens_per_microbatch=max_tokens)
    section = parts.profile.critic.model_copy(update={"cliprange_value": 10.0, "grad_clip": 1e9})
    parts = parts._replace(profile=parts.profile.model_copy(update={"critic": section}))
    trainer, head = with_a_head(make_trainer(parts))
    batch, payloads = one_step()
    metrics = shown(trainer.train(**batch).metrics)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    head.requires_grad_()
    errors, returns_of_all = [], []
    for trajectory in (t for payload in payloads for t in payload.trajectories):
        values = plain_values(model, head, trajectory.segments[0])
        rewards = [*np.zeros(len(values) - 1), trajectory.reward]
        returns = reference.gae(rewards, values.tolist(), 0.99, 0.9) + values.tolist()
        errors.append(values - torch.tensor(returns, dtype=torch.float32))
        returns_of_all.append(returns)
    everything, returns = torch.cat(errors), np.concatenate(returns_of_all)
    (everything.square().mean() / 2).backward()
    assert metrics["critic/loss"] == pytest.approx((everything.square().mean() / 2).item(), rel=1e-4)
    explained = 1 - np.var(everything.tolist()) / np.var(returns)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-4)
    assert metrics["critic/return_mean"] == pytest.approx(returns.mean(), rel=1e-4)
    plain = {f"model.{name}": parameter.grad for name, parameter in model.model.named_parameters()} | {
        "head.weight": head.grad
    }
    moments = trainer.critic.optimizer.moments()
    assert len(plain) > 20
    for name, gradient in plain.items():
        torch.testing.assert_close(10 * moments[f"exp_avg/{name}"].squeeze(0), gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_critic_learns_what_to_expect_and_the_policy_waits_for_its_head_start(tiny_model_dir, make_trainer):
    trainer = make_trainer(
        trainer_parts(tiny_model_dir, **GAE, lr=1e-3, head_start_steps=3, total_optimizer_steps=9)
    )
    before = {name: local.clone() for name, local in trainer.model.locals().items()}
    batches = [one_step(num_minibatches=2, step=step, head_start_steps=3)[0] for step in (1, 2, 3)]
    first, second, third = (shown(trainer.train(**batch).metrics) for batch in batches)
    assert "train/loss" not in first
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)  # its head is zero
    assert third["critic/loss"] < 0.8 * first["critic/loss"]
    assert third["critic/explained_variance"] > 0.1
    assert (trainer.critic.optimizer.steps_made, trainer.optimizer.steps_made) == (6, 3)
    assert "train/loss" in second
    assert any(not torch.equal(before[name], local) for name, local in trainer.model.locals().items())


@pytest.mark.slow
def test_a_checkpoint_has_the_critic_and_one_without_is_refused(tiny_model_dir, make_trainer, tmp_path):
    settings = trainer_parts(tiny_model_dir, **GAE)
    trainer = make_trainer(settings)
    trainer.train(**one_step()[0])
    trainer.snapshot(1)
    trainer.write(1, tmp_path / "with", with_published=False)
    expected = {key: local.clone() for key, local in trainer.state_tensors().items()}
    again = make_trainer(settings)
    again.load(tmp_path / "with")
    assert again.critic.optimizer.steps_made == 1
    assert {key for key in expected if "/critic." in key}
    assert all(torch.equal(local, expected[key]) for key, local in again.state_tensors().items())
    without = make_trainer(trainer_parts(tiny_model_dir))
    without.snapshot(0)
    without.write(0, tmp_path / "without", with_published=False)
    with pytest.raises(RefusedError, match=r"critic\..* is absent"):
        make_trainer(settings).load(tmp_path / "without")
