"""The critic with processes of its own: it learns what the trainer's own would, and its state is read by
whoever has the critic."""

from __future__ import annotations

import pytest
import torch

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.measure.values import shown
from asyncrl_cli.train.critic import CriticApart
from tests.train.train_samples import make_step
from tests.trainers import planned, trainer_parts

GAE = {"adv_estimator": "gae", "gamma": 0.99, "lam": 0.9}
APART = (("train",), ("critic",), ("rollout",))


def batch_of(seed, **keys):
    metas, payloads = make_step(seed, num_groups=4)
    (plan,) = planned(metas, num_minibatches=2, step=seed + 1, **{**GAE, **keys})
    return {"plan": plan, "payloads": dict(enumerate(payloads))}


def critic_of(parts, trainer):
    """One apart, in the process of a trainer that has none."""
    assert trainer.critic is None
    return CriticApart(parts.profile, parts.place, trainer.ranks)


def state_of(critic):
    return {key: local.clone() for key, local in critic.state_tensors().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def columns_of(critic, plan, payloads):
    """Values of the batches that are trained: those of each optimizer step's groups."""
    column = {}
    for step in plan.optimizer_steps:
        groups = sorted({planned.group for planned in step.trajectories})
        column |= dict(zip(groups, critic.score([payloads[group] for group in groups], []), strict=True))
    return {"critic": column}


@pytest.mark.slow
def test_values_of_the_batches_that_are_trained_make_the_same_bits_apart(tiny_model_dir, make_trainer):
    """Policy, critic and metrics of two steps of two optimizer steps, of which the critic makes the first
    alone."""
    keys = {"head_start_steps": 1, "total_optimizer_steps": 4}
    batches = [batch_of(seed, head_start_steps=1) for seed in range(2)]
    alone = make_trainer(trainer_parts(tiny_model_dir, **GAE, **keys))
    expected = [shown(alone.train(step_in_window=0, **batch).metrics) for batch in batches]
    weights, of_critic = (
        {name: local.clone() for name, local in alone.model.locals().items()},
        state_of(alone.critic),
    )

    apart = trainer_parts(tiny_model_dir, **GAE, **keys, tasks=APART)
    trainer = make_trainer(apart)
    critic, found = critic_of(apart, trainer), []
    for batch in batches:
        columns = columns_of(critic, **batch)
        trained = trainer.train(step_in_window=0, **batch, columns=columns)
        assert "critic" not in trained.column_s
        found.append(shown(trained.metrics) | shown(critic.learn(**batch, columns=columns).metrics))
    assert found == expected
    assert same(weights, trainer.model.locals())
    assert same(of_critic, state_of(critic))


@pytest.mark.slow
def test_a_checkpoints_critic_may_go_apart_and_come_back(tiny_model_dir, make_trainer, tmp_path):
    together, apart = (trainer_parts(tiny_model_dir, **GAE, tasks=tasks) for tasks in (None, APART))
    alone = make_trainer(together)
    alone.train(step_in_window=0, **batch_of(0))
    alone.snapshot(1)
    alone.write(1, tmp_path / "together", with_published=False)
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
    critic.write(1, tmp_path / "apart")

    back = make_trainer(together)
    back.load(tmp_path / "apart")
    assert back.critic.optimizer.steps_made == 2
    assert same(expected, state_of(back.critic))
