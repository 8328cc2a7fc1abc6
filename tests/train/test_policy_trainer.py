"""The policy trainer on one CPU rank: against a plain GRPO loop, prox, metrics, gather, publication."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.trajectories import GroupPayload, trajectory_of
from asyncrl_cli.measure.values import shown
from asyncrl_cli.profile.schema import TrainerSection
from asyncrl_cli.train import optimizer, ranks
from asyncrl_cli.train.batch import SPLIT_COST_TOKENS, cut_padded
from asyncrl_cli.train.optimizer import learning_rate
from asyncrl_cli.weights.buckets import Unpacked
from asyncrl_cli.weights.receivers import verified
from asyncrl_cli.weights.versions import mean_abs_diff
from tests.products import counted_products
from tests.train.reference_losses import aggregate
from tests.train.train_samples import (
    equal_rewards,
    make_segment,
    make_step,
    meta_of,
    plain_logprobs,
    save_tiny_model,
)
from tests.trainers import planned, rank_batch, save, trainer_parts, weights_of, with_columns


class PlainGrpo:
    """A synchronous GRPO loop with torch and transformers only: no FSDP, whole logits of the sampled
    tokens."""

    def __init__(self, model_dir, lr=5e-4, clip=(0.2, 0.28), grad_clip=1.0):
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )
        self.clip, self.grad_clip = clip, grad_clip

    def advantages(self, payload):
        rewards = [t.values["reward"] for t in payload.trajectories]
        if max(rewards) == min(rewards):
            return [0.0] * len(rewards)
        return [(r - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6) for r in rewards]

    def step(self, payloads, parts=None):
        rows = [
            (next(trajectory.segments()), advantage)
            for payload in payloads
            for trajectory, advantage in zip(payload.trajectories, self.advantages(payload), strict=True)
        ]
        num_tokens = sum(int(segment["mask"].sum()) for segment, _ in rows)
        for part in parts or [range(len(rows))]:
            self.loss([rows[i] for i in part], num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, rows, num_tokens):
        def pad(values):
            return torch.nn.utils.rnn.pad_sequence([torch.tensor(v) for v in values], batch_first=True)

        tokens = pad([s["tokens"] for s, _ in rows]).long()
        mask = pad([s["mask"] for s, _ in rows])[:, 1:]
        old = pad([s["logprobs"] for s, _ in rows])[:, 1:]
        advantage = torch.tensor([a for _, a in rows], dtype=torch.float32)[:, None]
        hidden = self.model.model(tokens[:, :-1], use_cache=False).last_hidden_state[mask]
        logprobs = torch.log_softmax(self.model.lm_head(hidden), dim=-1).gather(
            -1, tokens[:, 1:][mask][:, None]
        )[:, 0]
        ratio = (logprobs - old[mask]).exp()
        advantage = advantage.expand(mask.shape)[mask]
        objective = torch.min(ratio * advantage, ratio.clamp(1 - self.clip[0], 1 + self.clip[1]) * advantage)
        return -objective.sum() * (1.0 / num_tokens)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(("max_tokens", "epochs"), [(100_000, 1), (600, 1), (600, 2)])
def test_on_policy_training_equals_a_plain_grpo_loop_bit_for_bit(
    tiny_model_dir, make_trainer, max_tokens, epochs
):
    keys = dict(max_tokens_per_microbatch=max_tokens, ppo_epochs=epochs)
    trainer = make_trainer(trainer_parts(tiny_model_dir, **keys))
    plain = PlainGrpo(tiny_model_dir)
    for step in (1, 2):
        metas, payloads = make_step(step, num_groups=4)
        report = trainer.train(**rank_batch(metas, payloads, num_minibatches=2))
        assert report.tokens == sum(meta.response_tokens for meta in metas)  # each group counts once
        for half in (payloads[:2], payloads[2:]) * epochs:
            lengths = [len(next(t.segments())["tokens"]) - 1 for p in half for t in p.trajectories]
            plain.step(half, cut_padded(lengths, max_tokens, SPLIT_COST_TOKENS["cpu"]))
    theirs = dict(plain.model.named_parameters())
    for name, ours in weights_of(trainer).items():
        assert torch.equal(ours, theirs[name]), name


def test_every_matrix_product_of_a_step_and_a_publish_is_in_float32(tiny_model_dir, make_trainer, tmp_path):
    trainer = make_trainer(trainer_parts(tiny_model_dir))
    with counted_products(tmp_path) as products:
        trainer.train(**rank_batch(*make_step(1, num_groups=2)))
        trainer.gather(1)
    assert {dtype for _, dtype in products} == {"float"}
    assert sum(products.values()) > 20


@pytest.mark.slow
def test_prox_of_unchanged_weights_is_the_sampler_when_the_sampler_was_these_weights(
    tiny_model_dir, make_trainer
):
    settings = trainer_parts(tiny_model_dir, old_logprobs="recompute", temperature=0.7, lr=1e-9)
    trainer = make_trainer(settings)
    metas, payloads = with_true_logprobs(*make_step(5, num_groups=4), tiny_model_dir, temperature=0.7)
    metrics = shown(trainer.train(**rank_batch(metas, payloads, num_minibatches=2)).metrics)
    assert metrics["correction/weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["correction/weight_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["correction/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["correction/clipped_ratio"] == 0.0


def with_true_logprobs(metas, payloads, model_dir, temperature):
    """The same groups with the logprobs that a plain forward gives, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for segment in (s for p in payloads for t in p.trajectories for s in t.segments()):
        with torch.no_grad():
            segment["logprobs"][segment["mask"]] = plain_logprobs(model, segment, temperature)
    return metas, payloads


@pytest.mark.slow
def test_recompute_takes_prox_from_the_windows_first_weights(tiny_model_dir, make_trainer):
    settings = trainer_parts(tiny_model_dir, old_logprobs="recompute", trigger_parameter_sync_step=2, lr=3e-3)
    trainer = make_trainer(settings)
    first = with_true_logprobs(*make_step(1, num_groups=2), tiny_model_dir, temperature=1.0)
    second = with_true_logprobs(*make_step(2, num_groups=2), tiny_model_dir, temperature=1.0)
    trainer.train(**rank_batch(*first, step_in_window=0))
    before = weights_of(trainer)
    report = trainer.train(**rank_batch(*second, step_in_window=1))
    # mu is the initial model, which is also the window's first: w stays 1 while u has moved with the weights.
    assert report.metrics["correction/weight_max"].value == pytest.approx(1.0, abs=1e-4)
    assert report.metrics["correction/ratio_max"].value > 1.05
    assert report.column_s["old_logprob"] > 0
    assert report.metrics["train/old_logprob_tokens"].value == report.tokens
    assert any(not torch.equal(before[name], after) for name, after in weights_of(trainer).items())


@pytest.mark.slow
@pytest.mark.parametrize("head_start_steps", [0, 1])
def test_every_epoch_has_the_prox_of_the_windows_start(tiny_model_dir, make_trainer, head_start_steps):
    """The same weights as with prox logprobs that plain forward passes of the initial weights gave."""
    keys = dict(adv_estimator="gae", ppo_epochs=3, head_start_steps=head_start_steps)
    parts = trainer_parts(tiny_model_dir, old_logprobs="recompute", lr=1e-4, total_optimizer_steps=9, **keys)
    metas, payloads = make_step(1, num_groups=2)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with torch.no_grad():
        plain = {
            group: [plain_logprobs(model, next(t.segments())).numpy() for t in payload.trajectories]
            for group, payload in enumerate(payloads)
        }
    batch = rank_batch(metas, payloads, num_minibatches=2, **keys)
    trainer = make_trainer(parts)
    report = trainer.train(**batch)
    first, second = (step.num_loss_tokens for step in batch["plan"].optimizer_steps)
    # the first of the steps that train the policy gives its own
    scored = report.metrics["train/old_logprob_tokens"].value
    assert scored == (first if head_start_steps else second)
    assert trainer.optimizer.steps_made == 6 - head_start_steps
    assert trainer.critic.optimizer.steps_made == 6
    ours = weights_of(trainer)
    given = make_trainer(parts)
    payloads = with_columns(batch["payloads"], prox=plain)
    given.train(**{**batch, "payloads": payloads}, columns=("prox",))
    for name, theirs in weights_of(given).items():
        torch.testing.assert_close(ours[name], theirs, rtol=0, atol=5e-6, msg=name)


@pytest.mark.slow
def test_an_entropy_bonus_adds_its_gradient_to_the_losses(tiny_model_dir, make_trainer):
    """The gradient with it, minus the gradient without it, is that of plain autograd on the mean entropy."""
    metas, payloads = make_step(6, num_groups=1, n=4)
    gradients = []
    for coefficient in (0.0, 0.5):
        keys = dict(entropy_coeff=coefficient, max_tokens_per_microbatch=60, grad_clip=1e9)
        trainer = make_trainer(trainer_parts(tiny_model_dir, **keys))
        trainer.train(**rank_batch(metas, payloads))
        moments = trainer.optimizer.moments().items()
        gradients.append(
            {name.partition("/")[2]: 10 * m for name, m in moments if name.startswith("exp_avg/")}
        )
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    entropies = []
    for segment in (next(t.segments()) for t in payloads[0].trajectories):
        logits = model(torch.tensor(segment["tokens"], dtype=torch.int64)[None]).logits[0, :-1]
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        entropies.append(entropy[torch.tensor(segment["mask"][1:])])
    (-0.5 * torch.cat(entropies).mean()).backward()
    for name, parameter in model.named_parameters():
        difference = gradients[1][name] - gradients[0][name]
        torch.testing.assert_close(difference, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_metrics_name_weights_and_masks_only_where_there_are_any(tiny_model_dir, make_trainer):
    metas, payloads = make_step(3, num_groups=2)
    plain = shown(make_trainer(trainer_parts(tiny_model_dir)).train(**rank_batch(metas, payloads)).metrics)
    of_training = "loss entropy grad_norm lr skipped_steps"
    of_correction = "ratio_mean ratio_max clipped_ratio clipped_ratio_high clipped_ratio_low kl kl/stale_0"
    assert set(plain) == {
        *(f"train/{name}" for name in of_training.split()),
        *(f"correction/{name}" for name in (*of_correction.split(), "ratio_mean/stale_0")),
    }
    settings = trainer_parts(tiny_model_dir, old_logprobs="recompute", rollout_is_threshold="0_1.1")
    full = shown(make_trainer(settings).train(**rank_batch(metas, payloads)).metrics)
    more = ("weight_mean", "weight_max", "masked_ratio", "effective_ratio")
    assert set(full) - set(plain) == {f"correction/{name}" for name in more}
    assert 0 < full["correction/masked_ratio"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_a_loss_is_added_up_as_its_mode_says_in_any_microbatches(tiny_model_dir, make_trainer, mode):
    """At the window's start u and w are 1, so a token's loss is minus its advantage."""
    metas, payloads = make_step(6, num_groups=2)
    keys = dict(loss_agg_mode=mode, old_logprobs="recompute", rollout_is="none", normalize_advantages=False)
    (plan,) = planned(metas, normalize_advantages=False)
    advantages = [t.advantage for t in plan.optimizer_steps[0].trajectories]
    lengths = [meta.response_tokens for group in metas for meta in group.trajectories]
    losses = [np.full(length, -advantage) for length, advantage in zip(lengths, advantages, strict=True)]
    after = []
    for max_tokens in (8192, 120):
        settings = trainer_parts(tiny_model_dir, max_tokens_per_microbatch=max_tokens, **keys)
        trainer = make_trainer(settings)
        report = trainer.train(step_in_window=0, plan=plan, payloads=dict(enumerate(payloads)))
        expected = aggregate(losses, mode, settings.profile.rollout.max_response_tokens)
        assert report.metrics["train/loss"].value == pytest.approx(expected, rel=1e-5, abs=1e-7)
        moments = trainer.optimizer.moments().items()
        after.append({name: one.clone() for name, one in moments if name.startswith("exp_avg/")})
    assert len(after[0]) > 10
    # a tenth of the gradient; AdamW would turn noise around 0 into whole steps
    for name, whole in after[0].items():
        torch.testing.assert_close(after[1][name], whole, rtol=0, atol=1e-6)


def test_normalized_weights_have_a_mean_of_one_over_the_optimizer_step(tiny_model_dir, make_trainer):
    """Then the loss does not depend on a factor that all weights share: here e, by which mu was taken too
    small."""
    found = []
    for shift in (0.0, 1.0):
        metas, payloads = with_true_logprobs(*make_step(5, num_groups=2), tiny_model_dir, temperature=1.0)
        for segment in (s for p in payloads for t in p.trajectories for s in t.segments()):
            segment["logprobs"][segment["mask"]] -= shift
        keys = dict(old_logprobs="recompute", rollout_is_batch_normalize=True, max_tokens_per_microbatch=150)
        report = make_trainer(trainer_parts(tiny_model_dir, **keys)).train(**rank_batch(metas, payloads))
        assert report.metrics["correction/weight_mean"].value == pytest.approx(math.exp(shift), rel=1e-4)
        assert report.metrics["correction/effective_ratio"].value == pytest.approx(1.0, abs=1e-4)
        found.append(report.metrics["train/grad_norm"].value)
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_a_trajectory_of_two_segments_trains_like_both_apart_with_one_advantage(tiny_model_dir, make_trainer):
    rng = random.Random(0)
    pair = [make_segment(rng, 4, 6, [0]) for _ in range(2)]
    other = make_segment(rng, 4, 5, [0])

    def train(trajectories):
        metas = [replace(make_step(0, num_groups=1)[0][0], trajectories=tuple(map(meta_of, trajectories)))]
        payload = GroupPayload(uid="a", epoch=0, attempt=0, trajectories=tuple(trajectories))
        trainer = make_trainer(trainer_parts(tiny_model_dir))
        report = trainer.train(**rank_batch(metas, [payload]))
        return report, weights_of(trainer)

    def trajectory(segments, reward):
        return trajectory_of(segments, BUILT_IN, reward=reward, finish_reason="stop")

    report, joined = train([trajectory(tuple(pair), 1.0), trajectory((other,), 0.0)])
    assert report.tokens == 6 + 6 + 5
    # By hand: two rewards 1 and 0 give advantages +-0.5 / (sqrt(0.5) + 1e-6); for all tokens of a trajectory.
    plain = PlainGrpo(tiny_model_dir)
    advantage = 0.5 / (math.sqrt(0.5) + 1e-6)
    plain.loss([(pair[0], advantage), (pair[1], advantage), (other, -advantage)], 17).backward()
    torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
    plain.optimizer.step()
    for name, theirs in plain.model.named_parameters():
        assert torch.equal(joined[name], theirs), name


def test_a_gathered_version_does_not_change_when_training_goes_on(tiny_model_dir, make_trainer):
    trainer = make_trainer(trainer_parts(tiny_model_dir, gather_bucket_size_mb=0.3))
    assert trainer.gather(0) > 0
    manifest, buckets = trainer.published(0)
    original = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    trainer.train(**rank_batch(*make_step(1, num_groups=2)))
    list(verified(buckets, manifest))
    assert len(buckets) > 5
    received = dict(Unpacked(buckets))
    assert set(received) == {name for name, _ in original.named_parameters()}
    for name, parameter in original.named_parameters():
        assert torch.equal(received[name], parameter), name
        assert not torch.equal(received[name], trainer.model.locals()[name]), name


@pytest.mark.parametrize("colocate", [True, False])
def test_a_colocated_trainer_alone_returns_its_freed_memory_before_a_worker_has_its_turn(
    tiny_model_dir, make_trainer, monkeypatch, tmp_path, colocate
):
    """After the start and after a gather the loop wakes the workers; after a load they are started or woken,
    too."""
    calls = []
    monkeypatch.setattr(ranks.Ranks, "release_cache", lambda _: calls.append("released"))
    trainer = make_trainer(trainer_parts(tiny_model_dir, colocate=colocate))
    for name, call in {
        "train": lambda: trainer.train(**rank_batch(*make_step(3, num_groups=2))),
        "gather": lambda: trainer.gather(1),
        "save": lambda: save(trainer, tmp_path / "state", 1),
        "load": lambda: trainer.load(tmp_path / "state"),
    }.items():
        calls.append(name)
        call()
    assert all(parameter.grad is None for parameter in trainer.model.parameters.values())
    expected = ["released", "train", "gather", "released", "save", "load", "released"]
    assert calls == [call for call in expected if colocate or call != "released"]


@pytest.mark.parametrize(("device", "calls"), [("cuda:0", 1), ("cpu", 0)])
def test_the_cache_that_is_returned_is_the_gpus(device, calls, monkeypatch):
    made = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: made.append(1))
    rank = ranks.Ranks.__new__(ranks.Ranks)
    rank.device = torch.device(device)
    rank.release_cache()
    assert len(made) == calls


def test_a_manifest_has_the_probe_logprobs_of_a_plain_forward_and_of_the_version_before(
    tiny_model_dir, make_trainer
):
    trainer = make_trainer(trainer_parts(tiny_model_dir, temperature=0.5, probe_sequences=3))
    trainer.gather(7)
    manifest, _ = trainer.published(7)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    tokens = torch.tensor(manifest.probe_tokens)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits / 0.5, dim=-1)[:, :-1]
    expected = logprobs.gather(-1, tokens[:, 1:, None])[..., 0].tolist()
    assert mean_abs_diff(manifest.probe_logprobs, expected) < 1e-5
    assert (manifest.version, len(manifest.probe_tokens), manifest.previous_logprobs) == (7, 3, ())
    trainer.train(**rank_batch(*make_step(1, num_groups=2)))
    trainer.gather(8)
    after, _ = trainer.published(8)
    assert after.previous_logprobs == manifest.probe_logprobs != after.probe_logprobs
    with pytest.raises(ValueError, match="version 7 is not held by rank 0 \\(held: 8\\)"):
        trainer.published(7)


def test_tied_embeddings_travel_once_with_their_alias(tmp_path, make_trainer):
    trainer = make_trainer(trainer_parts(save_tiny_model(tmp_path / "tied", tied=True)))
    trainer.gather(0)
    _, buckets = trainer.published(0)
    specs = [entry.spec for bucket in buckets for entry in bucket.entries]
    assert [s.aliases for s in specs if s.name == "model.embed_tokens.weight"] == [("lm_head.weight",)]
    assert "lm_head.weight" not in {s.name for s in specs}


@pytest.mark.slow
def test_bfloat16_trains_float32_masters_and_publishes_bfloat16(tiny_model_dir, make_trainer):
    trainer = make_trainer(trainer_parts(tiny_model_dir, dtype="bfloat16"))
    before = weights_of(trainer)
    metrics = shown(trainer.train(**rank_batch(*make_step(1, num_groups=2))).metrics)
    assert math.isfinite(metrics["train/grad_norm"])
    trainer.gather(1)
    received = dict(Unpacked(trainer.published(1)[1]))
    for name, after in weights_of(trainer).items():
        assert after.dtype == torch.float32
        assert not torch.equal(before[name], after)
        assert torch.equal(received[name], after.to(torch.bfloat16))


@pytest.mark.slow
def test_moments_that_wait_on_the_host_are_those_of_a_trainer_that_keeps_them(
    tiny_model_dir, make_trainer, monkeypatch, tmp_path
):
    """A CPU is taken for a device with memory of its own."""
    steps = [rank_batch(*make_step(step, num_groups=2)) for step in (1, 2)]
    kept = make_trainer(trainer_parts(tiny_model_dir))
    for step in steps:
        kept.train(**step)
    state = kept.optimizer.moments() | weights_of(kept)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    monkeypatch.setattr(optimizer, "are_offloaded", lambda section, ranks: True)
    num_bytes = {name: moment.nbytes for name, moment in kept.optimizer.moments().items()}
    limit = sum(num_bytes.values()) // 4
    assert limit > 2 * max(num_bytes.values())
    monkeypatch.setattr(optimizer, "MOMENTS_SLICE_BYTES", limit)
    on_device, step = [], torch.optim.AdamW.step

    def counted(adamw):
        slices = resumed.optimizer.slices if resumed is not None else offloaded.optimizer.slices
        on_device.append(
            sum(moment.untyped_storage().nbytes() for part in slices for moment in part.moments().values())
        )
        return step(adamw)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    resumed = None
    offloaded = make_trainer(trainer_parts(tiny_model_dir))
    offloaded.train(**steps[0])
    save(offloaded, tmp_path / "state", 1)
    resumed = make_trainer(trainer_parts(tiny_model_dir))
    resumed.load(tmp_path / "state")
    resumed.train(**steps[1])
    for name, tensor in (resumed.optimizer.moments() | weights_of(resumed)).items():
        assert torch.equal(tensor, expected[name]), name
    assert len(on_device) > 6
    assert 0 < max(on_device) <= limit
    slices = resumed.optimizer.slices
    assert {moment.untyped_storage().nbytes() for part in slices for moment in part.moments().values()} == {0}


def spoiled_step(step, num_groups):
    """The step's first group has a logprob that is not a number."""
    metas, payloads = make_step(step, num_groups)
    next(payloads[0].trajectories[0].segments())["logprobs"][-1] = np.nan
    return metas, payloads


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_skips_its_optimizer_step_as_if_it_had_not_been(
    tiny_model_dir, make_trainer
):
    settings = trainer_parts(tiny_model_dir, lr_schedule="linear", total_optimizer_steps=10)
    metas, payloads = spoiled_step(2, num_groups=4)
    trainer = make_trainer(settings)
    trainer.train(**rank_batch(*make_step(1, num_groups=2)))
    report = trainer.train(**rank_batch(metas, payloads, num_minibatches=2))
    assert (report.skipped_steps, report.skipped_in_a_row) == (1, 0)
    assert report.metrics["train/skipped_steps"].value == 1.0
    assert report.tokens == sum(t.response_tokens for meta in metas for t in meta.trajectories)
    assert math.isfinite(report.metrics["train/grad_norm"].value)
    assert all(math.isfinite(value) for value in shown(report.metrics).values())
    skipping = weights_of(trainer)
    without = make_trainer(settings)
    without.train(**rank_batch(*make_step(1, num_groups=2)))
    without.train(**rank_batch(metas[2:], payloads[2:]))
    for name, after in weights_of(without).items():
        assert torch.equal(skipping[name], after), name
    assert trainer.optimizer.steps_made == without.optimizer.steps_made == 2


def test_skipped_optimizer_steps_are_counted_in_a_row_until_one_is_made(tiny_model_dir, make_trainer):
    trainer = make_trainer(trainer_parts(tiny_model_dir))
    before = weights_of(trainer)
    reports = [trainer.train(**rank_batch(*spoiled_step(step, num_groups=1))) for step in (1, 2)]
    assert [report.skipped_in_a_row for report in reports] == [1, 2]
    assert "train/grad_norm" not in reports[0].metrics
    assert all(torch.equal(before[name], after) for name, after in weights_of(trainer).items())
    assert trainer.train(**rank_batch(*make_step(3, num_groups=1))).skipped_in_a_row == 0


def test_groups_without_any_difference_in_reward_change_nothing(tiny_model_dir, make_trainer):
    trainer = make_trainer(trainer_parts(tiny_model_dir))
    metas, payloads = make_step(1, num_groups=1)
    before = weights_of(trainer)
    assert (
        trainer.train(**rank_batch([equal_rewards(metas[0])], payloads)).metrics["train/grad_norm"].value
        == 0.0
    )
    assert all(torch.equal(before[name], after) for name, after in weights_of(trainer).items())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + 0.25 * math.sqrt(2), 0.5, 0.5 - 0.25 * math.sqrt(2)]),
    ],
)
def test_learning_rate_warms_up_then_follows_its_schedule(schedule, expected):
    trainer = TrainerSection(lr=1.0, warmup_steps=2, lr_schedule=schedule)
    assert [learning_rate(trainer, step, 6) for step in range(6)] == pytest.approx(expected)
