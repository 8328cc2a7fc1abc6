"""Trainer ranks in processes of their own: one against two ranks, and resume in a fresh process."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.weights.receivers import verified
from tests.packed import copied
from tests.train.train_samples import make_step
from tests.trainers import rank_batch, save, trainer_parts, weights_of


def assert_equal(ours, theirs):
    assert set(ours) == set(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


RECOMPUTE = {"old_logprobs": "recompute"}
SLOWLY = {**RECOMPUTE, "lr": 2e-5}
"""AdamW divides by the gradient's size, so that rounding counts where gradients are small, in proportion to
the learning rate."""
SMALL = {"max_tokens_per_microbatch": 150}
"""The ranks' numbers of microbatches differ, and empty ones fill up."""
ALGORITHMS = [
    SMALL,
    {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "old_logprobs": "loglinear", "lr": 2e-5},
    {"loss_agg_mode": "seq-mean-token-sum-norm", "rollout_is_batch_normalize": True, **RECOMPUTE},
    dict(use_kl_in_reward=True, kl_coef=0.05, use_kl_loss=True, kl_loss_coef=0.1, normalize_advantages=False),
    {"adv_estimator": "gae", "lam": 0.95, **SLOWLY},
    {
        "loss_mode": "cispo",
        "adv_estimator": "rloo",
        "rollout_is": "sequence",
        "rollout_is_threshold": "0.2_5.0",
        **SLOWLY,
    },
    {"loss_mode": "dppo", "adv_estimator": "reinforce_plus_plus", "rollout_is": "geometric", **SLOWLY},
    {
        "loss_mode": "sapo",
        "loss_agg_mode": "seq-mean-token-sum",
        "rollout_rs": "seq_mean_k3",
        "rollout_rs_threshold": 0.1,
        "lr": 2e-5,
    },
    dict(
        loss_mode="reinforce", adv_estimator="reinforce_plus_plus_baseline", rollout_is_threshold=2.0, lr=2e-5
    ),
]


# The first mini-batch has no finite gradient: its second one is trained.
ALGORITHMS += [{"spoiled_step": 1, **SMALL}, {"rank": 4, "alpha": 8.0, **RECOMPUTE}]
ALGORITHMS += [{"same_prompt": True, **SLOWLY, **SMALL}]
ALGORITHMS += [{"ppo_epochs": 2, "entropy_coeff": 0.05, **SLOWLY, **SMALL}]


@pytest.mark.slow
def test_two_ranks_train_the_weights_of_one(tiny_model_dir, other_model_dir, run_ranks):
    teacher = {"teacher_dirs": {"": str(other_model_dir)}, "adv_estimator": "none", **SMALL, **SLOWLY}
    algorithms = [*ALGORITHMS, teacher]
    settings = [{"lr": 1e-4, **algorithm} for algorithm in algorithms]
    one, two = (run_ranks(tiny_model_dir, *settings, world_size=ranks, last_step=1) for ranks in (1, 2))
    initial = load_file(tiny_model_dir / "model.safetensors")
    for algorithm, of_one, of_two in zip(algorithms, one, two, strict=True):
        for name, ours in of_one.items():
            has_adapters = "rank" in algorithm and "proj" not in name
            assert has_adapters or not torch.equal(ours, initial[name]), algorithm
            difference = (of_two[name] - ours).abs().max().item()
            assert difference <= 5e-6, f"{algorithm}: {name} differs by {difference:.1e}"
    whole, spoiled = one[0], one[ALGORITHMS.index({"spoiled_step": 1, **SMALL})]
    assert not any(torch.equal(whole[name], spoiled[name]) for name in whole)


RESUMED = [
    {"lr_schedule": "cosine", "warmup_steps": 3},
    # Step 3 is the window's third: prox comes from weights that only the checkpoint still has.
    {"old_logprobs": "recompute", "trigger_parameter_sync_step": 4, "lr": 1e-3},
    dict(
        adv_estimator="gae",
        lam=0.95,
        use_kl_in_reward=True,
        head_start_steps=1,
        kl_target=1e-3,
        kl_horizon=50.0,
    ),
    {"rank": 4, "alpha": 8.0, "old_logprobs": "recompute"},
    {"ppo_epochs": 2, "lr_schedule": "linear", "trigger_parameter_sync_step": 4, "lr": 1e-3, **RECOMPUTE},
]


@pytest.mark.slow
def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path, tiny_model_dir, run_ranks):
    straight = run_ranks(tiny_model_dir, *RESUMED)
    run_ranks(tiny_model_dir, *RESUMED, last_step=2, save=tmp_path)
    resumed = run_ranks(tiny_model_dir, *RESUMED, first_step=3, load=tmp_path)
    for ours, theirs in zip(resumed, straight, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_numbers_of_ranks_trains_the_same_weights(
    tmp_path, tiny_model_dir, run_ranks
):
    """Two ranks, then one, then two: as `asyncrl resume --set placement.trainer_workers=...` does."""
    keys = dict(lr=1e-4, lr_schedule="cosine", adv_estimator="gae", lam=0.95)
    of_two, of_one = tmp_path / "of-2", tmp_path / "of-1"
    (straight,) = run_ranks(tiny_model_dir, keys, world_size=2)
    run_ranks(tiny_model_dir, keys, world_size=2, last_step=1, save=of_two)
    run_ranks(tiny_model_dir, keys, first_step=2, last_step=2, load=of_two, save=of_one)
    (resharded,) = run_ranks(tiny_model_dir, keys, world_size=2, first_step=3, load=of_one)
    for name, ours in straight.items():
        torch.testing.assert_close(resharded[name], ours, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_version_that_two_ranks_have_published_is_in_their_checkpoint_for_any_number_of_ranks(
    tmp_path, tiny_model_dir, run_ranks, make_trainer
):
    (sent,) = run_ranks(tiny_model_dir, {"lr": 1e-3}, world_size=2, last_step=1, save=tmp_path)
    trainer = make_trainer(trainer_parts(tiny_model_dir, lr=1e-3, total_optimizer_steps=100))
    trainer.load(tmp_path / "0")
    assert_equal(copied(trainer.published(1)[1]), sent)


@pytest.mark.slow
def test_experts_and_what_adapters_are_merged_into_arrive_whole_beside_rows_of_two_ranks(tmp_path, run_ranks):
    """No step is trained: what arrives are the model's own files, bit for bit."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = dict(vocab_size=63, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    experts = dict(moe_intermediate_size=16, num_experts=3, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads, **experts))
    model.save_pretrained(tmp_path / "experts")
    files = load_file(tmp_path / "experts" / "model.safetensors")
    adapters = {"rank": 4, "target_modules": ("q_proj", "o_proj")}
    for settings in ({}, adapters):
        (sent,) = run_ranks(tmp_path / "experts", settings, world_size=2, last_step=0)
        assert_equal(sent, files)


def one_step(trainer, step=1):
    trainer.train(**rank_batch(*make_step(step, num_groups=2)))


@pytest.mark.slow
def test_the_published_version_survives_in_a_checkpoint(tmp_path, tiny_model_dir, make_trainer):
    settings = trainer_parts(tiny_model_dir, gather_bucket_size_mb=0.3)
    trainer = make_trainer(settings)
    trainer.gather(5)
    before, _ = trainer.published(5)
    one_step(trainer)
    trainer.snapshot(1)
    trainer.gather(6)
    trainer.write(1, tmp_path / "checkpoint", with_published=True)
    again = make_trainer(settings)
    again.load(tmp_path / "checkpoint")
    after, buckets = again.published(5)
    list(verified(buckets, before))
    assert after == before


@pytest.mark.slow
def test_a_snapshot_does_not_change_when_training_goes_on(tmp_path, tiny_model_dir, make_trainer):
    settings = trainer_parts(tiny_model_dir)
    trainer = make_trainer(settings)
    one_step(trainer)
    expected = weights_of(trainer)
    trainer.snapshot(1)
    one_step(trainer, step=2)
    trainer.write(1, tmp_path / "checkpoint", with_published=False)
    again = make_trainer(settings)
    again.load(tmp_path / "checkpoint")
    assert_equal(again.model.locals(), expected)
    with pytest.raises(ValueError, match="held: none"):
        again.published(0)


@pytest.mark.slow
def test_a_foreign_or_missing_checkpoint_is_refused(tmp_path, tiny_model_dir, make_trainer):
    from transformers import AutoModelForCausalLM, Qwen3Config

    trainer = make_trainer(trainer_parts(tiny_model_dir))
    with pytest.raises(RefusedError, match=r"trainer\.json cannot be read: no such file"):
        trainer.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no snapshot of step 3"):
        trainer.write(3, tmp_path / "checkpoint", with_published=False)
    save(trainer, tmp_path / "checkpoint")
    sizes = Qwen3Config.from_pretrained(tiny_model_dir).to_dict() | {"num_hidden_layers": 4}
    config = Qwen3Config(**sizes | {"layer_types": None})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    other = make_trainer(trainer_parts(tmp_path / "other"))
    with pytest.raises(RefusedError, match="checkpoint is of another model"):
        other.load(tmp_path / "checkpoint")
