"""KL to a reference in the loss, against a plain loop; the reference scores each token once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.train.batch import REF
from tests.train.reference_losses import kl
from tests.train.train_samples import equal_rewards, make_step, plain_logprobs
from tests.trainers import planned, rank_batch, save, trainer_parts, weights_of, with_columns


def gradients_of(trainer):
    """Ten times the first moments after one optimizer step, whose gradient was not clipped."""
    return {
        name.removeprefix("exp_avg/"): 10 * moment
        for name, moment in trainer.optimizer.moments().items()
        if "exp_avg/" in name
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["k2", "low_var_kl"])
def test_the_kl_of_the_loss_has_a_plain_loops_value_and_gradient(
    tiny_model_dir, other_model_dir, make_trainer, kind
):
    """All rewards of a group are alike, so that the loss is its KL alone."""
    metas, payloads = make_step(1, num_groups=1, n=3)
    metas, groups = [equal_rewards(meta) for meta in metas], dict(enumerate(payloads))
    segments = [next(t.segments()) for p in payloads for t in p.trajectories]
    theta, ref = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (tiny_model_dir, other_model_dir)
    )
    logp_N = torch.cat([plain_logprobs(theta, segment) for segment in segments])
    with torch.no_grad():
        ref_N = torch.cat([plain_logprobs(ref, segment) for segment in segments])
    values, slopes = kl(kind, logp_N.detach().double().numpy(), ref_N.double().numpy())
    logp_N.backward(torch.tensor(0.7 * slopes / len(slopes), dtype=torch.float32))
    keys = dict(use_kl_loss=True, kl_loss_coef=0.7, kl_loss_type=kind, grad_clip=1e9, ref_dir=other_model_dir)
    for max_tokens in (8192, 40):
        trainer = make_trainer(trainer_parts(tiny_model_dir, max_tokens_per_microbatch=max_tokens, **keys))
        report = trainer.train(step_in_window=0, plan=planned(metas)[0], payloads=groups)
        assert report.metrics["train/loss"].value == pytest.approx(0.7 * values.mean(), rel=1e-5)
        expected = kl("k3", logp_N.detach().double().numpy(), ref_N.double().numpy())[0].mean()
        assert report.metrics["ref/kl"].value == pytest.approx(expected, rel=1e-5)
        assert report.column_s["ref"] > 0
        found, plain = gradients_of(trainer), dict(theta.named_parameters())
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_reference_is_the_initial_model_and_scores_each_token_once(
    tiny_model_dir, make_trainer, monkeypatch
):
    metas, payloads = make_step(2, num_groups=4)
    (plan,) = planned(metas, num_minibatches=2, use_kl_in_reward=True)
    groups = dict(enumerate(payloads))
    trainer = make_trainer(trainer_parts(tiny_model_dir, use_kl_in_reward=True, lr=1e-3))
    before = weights_of(trainer.reference)
    seen = []
    own = trainer.reference.numbers_N
    monkeypatch.setattr(
        trainer.reference, "numbers_N", lambda part: seen.append(len(part.targets_N)) or own(part)
    )
    reports = [trainer.train(step_in_window=0, plan=plan, payloads=groups) for _ in range(2)]
    assert sum(seen) == sum(report.tokens for report in reports)
    assert 0 < reports[0].metrics["ref/kl"].value < reports[1].metrics["ref/kl"].value
    assert all(torch.equal(before[name], local) for name, local in trainer.reference.locals().items())
    assert any(not torch.equal(before[name], local) for name, local in trainer.model.locals().items())
    monkeypatch.setattr(trainer.reference, "numbers_N", own)
    column = trainer.reference.column(groups)
    monkeypatch.setattr(trainer.reference, "numbers_N", lambda part: pytest.fail("it was computed again"))
    given = with_columns(groups, **{REF: column})
    handed_in = trainer.train(step_in_window=0, plan=plan, payloads=given, columns=(REF,))
    penalty = reports[0].metrics["reward/kl_penalty"].value
    assert handed_in.metrics["reward/kl_penalty"].value == pytest.approx(penalty, rel=1e-4)
    mu = np.concatenate(
        [s["logprobs"][s["mask"]] for p in payloads for t in p.trajectories for s in t.segments()]
    )
    ref = np.concatenate([array for arrays in column.values() for array in arrays])
    assert penalty == pytest.approx(0.001 * (mu - ref).sum() / 32, rel=1e-4)


@pytest.mark.slow
def test_a_resume_with_another_reference_is_refused(tiny_model_dir, other_model_dir, make_trainer, tmp_path):
    trainer = make_trainer(trainer_parts(tiny_model_dir, use_kl_loss=True))
    save(trainer, tmp_path / "state")
    make_trainer(trainer_parts(tiny_model_dir, use_kl_loss=True)).load(tmp_path / "state")
    with pytest.raises(RefusedError, match="a reference that had other weights"):
        make_trainer(trainer_parts(tiny_model_dir, use_kl_loss=True, ref_dir=other_model_dir)).load(
            tmp_path / "state"
        )


def test_without_a_kl_no_reference_is_loaded(tiny_model_dir, make_trainer):
    trainer = make_trainer(trainer_parts(tiny_model_dir))
    assert trainer.reference is None
    report = trainer.train(**rank_batch(*make_step(1, num_groups=1)))
    assert report.column_s.keys() == {"old_logprob"}
