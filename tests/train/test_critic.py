"""The critic: its optimizer step against a plain loop, its head start, its place in the trainer's state. With
processes of its own it learns what the trainer's would, and its state is read by whoever has the critic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.measure.values import shown
from asyncrl_cli.train.critic import CriticApart
from tests.train import reference_losses as reference
from tests.train.test_credit import with_cut
from tests.train.train_samples import make_step
from tests.trainers import rank_batch, save, trainer_parts, weights_of, with_columns

GAE = {"adv_estimator": "gae", "gamma": 0.99, "lam": 0.9}
APART = (("train",), ("critic",), ("rollout",))


def with_a_head(trainer):
    """A head that is not zero, so that values differ and the transformer gets a gradient."""
    head = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 0.05
    trainer.critic.locals()["head.weight"].copy_(head[None])
    return trainer, head


def one_step(seed=1, num_minibatches=1, cut=(), **keys):
    """`cut`: the trajectories of each group that a limit has cut off."""
    metas, payloads = make_step(seed, num_groups=2, n=3)
    metas = [replace(one, trajectories=with_cut(one.trajectories, cut)) for one in metas]
    return rank_batch(metas, payloads, num_minibatches=num_minibatches, **GAE, **keys), payloads


def plain_values(model, head, segment) -> torch.Tensor:
    """Of the state before each sampled token: one sequence at a time, without padding."""
    tokens = torch.tensor(segment["tokens"], dtype=torch.int64)
    return (model.model(tokens[None]).last_hidden_state[0] @ head)[:-1][torch.tensor(segment["mask"][1:])]


@pytest.mark.slow
@pytest.mark.parametrize(("max_tokens", "cut"), [(8192, ()), (50, (1,))])
def test_an_optimizer_step_has_the_loss_and_gradient_of_a_plain_loop(
    tiny_model_dir, make_trainer, max_tokens, cut
):
    """It learns nothing from the tokens of responses that were cut off (`bootstrap_truncated`)."""
    keys = {**GAE, "bootstrap_truncated": bool(cut)}
    parts = trainer_parts(tiny_model_dir, **keys, max_tokens_per_microbatch=max_tokens)
    section = parts.profile.critic.model_copy(update={"cliprange_value": 10.0, "grad_clip": 1e9})
    parts = parts._replace(profile=parts.profile.model_copy(update={"critic": section}))
    trainer, head = with_a_head(make_trainer(parts))
    batch, payloads = one_step(cut=cut, bootstrap_truncated=bool(cut))
    metrics = shown(trainer.train(**batch).metrics)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    head.requires_grad_()
    errors, returns_of_all, num_tokens = [], [], 0
    for trajectory, is_cut in ((t, i in cut) for one in payloads for i, t in enumerate(one.trajectories)):
        num_tokens += trajectory.num_sampled
        if is_cut:
            continue
        values = plain_values(model, head, next(trajectory.segments()))
        rewards = [*np.zeros(len(values) - 1), trajectory.values["reward"]]
        returns = reference.gae(rewards, values.tolist(), 0.99, 0.9) + values.tolist()
        errors.append(values - torch.tensor(returns, dtype=torch.float32))
        returns_of_all.append(returns)
    everything, returns = torch.cat(errors), np.concatenate(returns_of_all)
    loss = everything.square().sum() / 2 / num_tokens
    loss.backward()
    assert metrics["critic/loss"] == pytest.approx(loss.item(), rel=1e-4)
    explained = 1 - np.var(everything.tolist()) / np.var(returns)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-4)
    assert cut or metrics["critic/return_mean"] == pytest.approx(returns.mean(), rel=1e-4)
    plain = {f"model.{name}": parameter.grad for name, parameter in model.model.named_parameters()}
    plain["head.weight"] = head.grad
    moments = trainer.critic.optimizer.moments()
    assert len(plain) > 20
    for name, gradient in plain.items():
        torch.testing.assert_close(10 * moments[f"exp_avg/{name}"].squeeze(0), gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_critic_learns_what_to_expect_and_the_policy_waits_for_its_head_start(tiny_model_dir, make_trainer):
    trainer = make_trainer(
        trainer_parts(tiny_model_dir, **GAE, lr=1e-3, head_start_steps=3, total_optimizer_steps=9)
    )
    before = weights_of(trainer)
    batches = [one_step(num_minibatches=2, step=step, head_start_steps=3)[0] for step in (1, 2, 3)]
    first, second, third = (shown(trainer.train(**batch).metrics) for batch in batches)
    assert "train/loss" not in first
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)  # its head is zero
    assert third["critic/loss"] < 0.8 * first["critic/loss"]
    assert third["critic/explained_variance"] > 0.1
    assert (trainer.critic.optimizer.steps_made, trainer.optimizer.steps_made) == (6, 3)
    assert "train/loss" in second
    assert any(not torch.equal(before[name], local) for name, local in trainer.model.locals().items())


def batch_of(seed, **keys):
    batch = rank_batch(*make_step(seed, num_groups=4), num_minibatches=2, step=seed + 1, **GAE, **keys)
    return {"plan": batch["plan"], "payloads": batch["payloads"]}


def critic_of(parts, trainer):
    """One apart, in the process of a trainer that has none."""
    assert trainer.critic is None
    return CriticApart(parts.profile, parts.place, trainer.ranks)


def state_of(critic):
    return {key: local.clone() for key, local in critic.state_tensors().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_critic_apart_resumes_with_the_weight_of_the_kl_that_the_trainer_had(
    tmp_path, tiny_model_dir, make_trainer
):
    keys = dict(**GAE, use_kl_in_reward=True, kl_target=1e-6, kl_horizon=10.0)
    trainer = make_trainer(trainer_parts(tiny_model_dir, **keys))
    trainer.train(**one_step(use_kl_in_reward=True)[0])
    save(trainer, tmp_path)
    apart = trainer_parts(tiny_model_dir, **keys, tasks=(("train",), ("ref",), ("critic",), ("rollout",)))
    critic = CriticApart(apart.profile, apart.place, trainer.ranks)
    critic.restore(tmp_path)
    assert critic._kl.value == trainer._kl.value != 0.001


def columns_of(critic, plan, payloads):
    """Values of the batches that are trained: those of each optimizer step's groups."""
    column = {}
    for step in plan.optimizer_steps:
        groups = sorted({planned.group for planned in step.trajectories})
        column |= dict(zip(groups, critic.score([payloads[group] for group in groups], []), strict=True))
    return with_columns(payloads, critic=column)


@pytest.mark.slow
def test_values_of_the_batches_that_are_trained_make_the_same_bits_apart(tiny_model_dir, make_trainer):
    """Policy, critic and metrics of two steps of two optimizer steps, of which the critic makes the first
    alone."""
    keys = {"head_start_steps": 1, "total_optimizer_steps": 4}
    batches = [batch_of(seed, head_start_steps=1) for seed in range(2)]
    alone = make_trainer(trainer_parts(tiny_model_dir, **GAE, **keys))
    expected = [shown(alone.train(step_in_window=0, **batch).metrics) for batch in batches]
    weights, of_critic = weights_of(alone), state_of(alone.critic)

    apart = trainer_parts(tiny_model_dir, **GAE, **keys, tasks=APART)
    trainer = make_trainer(apart)
    critic, found = critic_of(apart, trainer), []
    for batch in batches:
        given = {"plan": batch["plan"], "payloads": columns_of(critic, **batch), "columns": ("critic",)}
        trained = trainer.train(step_in_window=0, **given)
        assert "critic" not in trained.column_s
        found.append(shown(trained.metrics) | shown(critic.learn(**given).metrics))
    assert found == expected
    assert same(weights, trainer.model.locals())
    assert same(of_critic, state_of(critic))


@pytest.mark.slow
def test_a_checkpoints_critic_may_go_apart_and_come_back(tiny_model_dir, make_trainer, tmp_path):
    together, apart = (trainer_parts(tiny_model_dir, **GAE, tasks=tasks) for tasks in (None, APART))
    alone = make_trainer(together)
    alone.train(step_in_window=0, **batch_of(0))
    save(alone, tmp_path / "together", 1)
    expected = state_of(alone.critic)

    trainer = make_trainer(apart)
    critic = critic_of(apart, trainer)
    trainer.load(tmp_path / "together")
    critic.restore(tmp_path / "together")
    assert critic.optimizer.steps_made == 2
    assert same(expected, state_of(critic))
    trainer.snapshot(1)
    critic.snapshot(1)
    trainer.write(1, tmp_path / "apart", with_published=False)
    with pytest.raises(RefusedError, match=r"critic\..* is absent"):
        critic.restore(tmp_path / "apart")
    with pytest.raises(RefusedError, match=r"critic\..* is absent"):
        make_trainer(together).load(tmp_path / "apart")
    critic.write(1, tmp_path / "apart")

    back = make_trainer(together)
    back.load(tmp_path / "apart")
    assert back.critic.optimizer.steps_made == 2
    assert same(expected, state_of(back.critic))
