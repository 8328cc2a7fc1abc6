"""On-policy distillation: a teacher's advantages against plain forwards, NumPy and the exact divergence;
several teachers; and teachers in processes of their own."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.trajectories import GroupPayload, segment_of, trajectory_of
from asyncrl_cli.train import LOGITS_CHUNK_ELEMENTS
from asyncrl_cli.train.batch import TEACHER
from asyncrl_cli.train.logprobs import Head
from asyncrl_cli.train.teachers import Teachers
from tests.train.reference_losses import vanilla
from tests.train.test_reference import gradients_of
from tests.train.train_samples import VOCAB_SIZE, make_segment, make_step, meta_of, plain_logprobs
from tests.trainers import planned, save, trainer_parts, weights_of, with_columns

TEMPERATURE, COEF = 0.8, 0.3


def from_rewards(estimator, rewards, counts):
    """The advantage of each token by the papers: of one group of trajectories with these rewards and numbers
    of tokens. (A new critic values every state at 0.)"""
    centred = rewards - rewards.mean()
    advantages = {
        "none": 0 * rewards,
        "rloo": np.array([reward - np.delete(rewards, i).mean() for i, reward in enumerate(rewards)]),
        "gae": rewards,
    }.get(estimator, centred / (rewards.std(ddof=1) + 1e-6))
    tokens = np.repeat(advantages, counts)
    return (tokens - tokens.mean()) / tokens.std(ddof=1) if estimator == "gae" else tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator", ["none", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
)
def test_a_teacher_adds_its_log_ratio_to_the_advantages_of_every_estimator(
    tiny_model_dir, other_model_dir, make_trainer, estimator
):
    metas, payloads = make_step(3, num_groups=1, n=4)
    segments = [next(t.segments()) for p in payloads for t in p.trajectories]
    theta, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (tiny_model_dir, other_model_dir)
    )
    logp_N = torch.cat([plain_logprobs(theta, segment, TEMPERATURE) for segment in segments])
    with torch.no_grad():
        teacher_N = torch.cat([plain_logprobs(teacher, segment, TEMPERATURE) for segment in segments])
    log_ratio_N = (teacher_N - logp_N).detach().double().numpy()
    rewards = np.array([meta.reward for meta in metas[0].trajectories])
    assert 0 < rewards.sum() < len(rewards)
    counts = [meta.response_tokens for meta in metas[0].trajectories]
    sequence = {
        "theta": logp_N.detach().double().numpy(),
        "prox": np.concatenate([segment["logprobs"][segment["mask"]] for segment in segments]),
        "advantage": from_rewards(estimator, rewards, counts) + COEF * log_ratio_N,
    }
    losses, slopes = vanilla(sequence, 0.2, 0.28)
    logp_N.backward(torch.tensor(slopes / len(slopes), dtype=torch.float32))

    keys = dict(adv_estimator=estimator, distill_coef=COEF, temperature=TEMPERATURE, grad_clip=1e9)
    parts = trainer_parts(tiny_model_dir, teacher_dirs={"": other_model_dir}, **keys)
    trainer = make_trainer(parts)
    (plan,) = planned(metas, adv_estimator=estimator)
    report = trainer.train(step_in_window=0, plan=plan, payloads=dict(enumerate(payloads)))
    assert report.metrics["distill/kl"].value == pytest.approx(-log_ratio_N.mean(), rel=1e-5)
    assert report.metrics["train/loss"].value == pytest.approx(losses.mean(), rel=1e-4)
    assert report.column_s[TEACHER] > 0
    plain = dict(theta.named_parameters())
    for name, gradient in gradients_of(trainer).items():
        torch.testing.assert_close(gradient, plain[name].grad, rtol=1e-4, atol=1e-6)


def test_the_full_loss_is_the_exact_reverse_kl_of_every_visited_state(
    tiny_model_dir, other_model_dir, make_trainer, monkeypatch
):
    """Its gradient is autograd's of the formula, in one chunk and in several, with rows and with shared
    prefixes."""
    metas, payloads = make_step(3, num_groups=2, n=4)
    segments = [next(t.segments()) for p in payloads for t in p.trajectories]
    theta, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (tiny_model_dir, other_model_dir)
    )
    found = []
    for segment in segments:
        tokens, places = (
            torch.tensor(segment["tokens"])[None],
            torch.tensor(segment["mask"]).nonzero()[:, 0] - 1,
        )
        log_p, log_q = ((m(tokens).logits[0, places] / TEMPERATURE).log_softmax(-1) for m in (theta, teacher))
        found.append((log_p.exp() * (log_p - log_q.detach())).sum(-1))
    expected = torch.cat(found).mean()
    (COEF * expected).backward()
    plain = dict(theta.named_parameters())
    keys = dict(adv_estimator="none", distill_loss="full", distill_coef=COEF, temperature=TEMPERATURE)
    for chunk_tokens, others in ((2**20, {}), (7, {}), (7, {"shared_prefixes": False})):
        monkeypatch.setattr(Head, "chunk_tokens", lambda head, device, most=chunk_tokens: most)
        parts = trainer_parts(
            tiny_model_dir, teacher_dirs={"": other_model_dir}, grad_clip=1e9, **keys, **others
        )
        trainer = make_trainer(parts)
        (plan,) = planned(metas, adv_estimator="none")
        report = trainer.train(step_in_window=0, plan=plan, payloads=dict(enumerate(payloads)))
        assert report.metrics["distill/kl"].value == pytest.approx(expected.item(), rel=1e-5)
        assert report.metrics["train/loss"].value == pytest.approx(COEF * expected.item(), rel=1e-4)
        for name, gradient in gradients_of(trainer).items():
            torch.testing.assert_close(gradient, plain[name].grad, rtol=1e-4, atol=1e-6)


def test_several_chunks_give_the_gradients_of_one_with_entropy_and_divergence_together():
    torch.manual_seed(0)
    weight_VH, hidden_NH = torch.randn(11, 4), torch.randn(9, 4)
    targets_N, teacher_NV = torch.randint(11, (9,)), torch.randn(9, 11).log_softmax(-1)
    found = []
    for most in (2, 100):
        inputs = [hidden_NH.clone().requires_grad_(), weight_VH.clone().requires_grad_()]
        head = Head(lambda h, w=inputs[1]: h @ w.T, (inputs[1],), 11, 0.7, True, teacher_NV)
        scored = head._replace(vocab_size=LOGITS_CHUNK_ELEMENTS["cpu"] // most).score(inputs[0], targets_N)
        total = sum(
            (values * (1 + torch.arange(9.0) / 9) ** power).sum() for power, values in enumerate(scored)
        )
        found.append(torch.autograd.grad(total, inputs))
    logp_NV = (inputs[0] @ inputs[1].T / 0.7).log_softmax(-1)
    parts = logp_NV[range(9), targets_N], -(logp_NV.exp() * logp_NV).sum(-1)
    parts = (*parts, (logp_NV.exp() * (logp_NV - teacher_NV)).sum(-1))
    total = sum((values * (1 + torch.arange(9.0) / 9) ** power).sum() for power, values in enumerate(parts))
    found.append(torch.autograd.grad(total, inputs))
    for several, one, autograd in zip(*found, strict=True):
        torch.testing.assert_close(several, autograd, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one, autograd, rtol=1e-5, atol=1e-5)


def test_each_token_is_compared_with_the_distribution_of_its_prompts_own_teacher(
    tiny_model_dir, other_model_dir, make_trainer
):
    dirs = {"math": str(other_model_dir), "code": str(tiny_model_dir), "prose": str(other_model_dir)}
    keys = dict(adv_estimator="none", distill_loss="full", max_tokens_per_microbatch=25)
    trainer, groups = (
        make_trainer(trainer_parts(tiny_model_dir, teacher_dirs=dirs, **keys)),
        groups_of_two_teachers(),
    )
    same = make_step(0, 1)[0][0]
    metas = [replace(same, trajectories=tuple(map(meta_of, one.trajectories))) for one in groups.values()]
    (plan,) = planned(metas, adv_estimator="none")
    metrics = trainer.train(step_in_window=0, plan=plan, payloads=groups).metrics
    assert metrics["distill/kl/code"].value == pytest.approx(0.0, abs=1e-6)  # the policy itself
    assert metrics["distill/kl/math"].value > 1e-3


def groups_of_two_teachers():
    """Of several trajectories, some of several segments."""
    rng, groups = random.Random(5), {}
    for index, (name, lengths) in enumerate(
        (("math", [(3, 8), (30,)]), ("code", [(5,), (2, 2, 19)]), ("math", [(7,), (4,)]))
    ):
        trajectories = tuple(
            trajectory_of(
                tuple(make_segment(rng, 4, n, [0]) for n in tokens),
                BUILT_IN,
                reward=0.0,
                finish_reason="stop",
                teacher_name=name,
            )
            for tokens in lengths
        )
        groups[index] = GroupPayload(uid=str(index), epoch=0, attempt=0, trajectories=trajectories)
    return groups


def test_each_prompt_is_scored_by_the_teacher_that_it_names(tiny_model_dir, other_model_dir, make_trainer):
    dirs = {"math": str(other_model_dir), "code": str(tiny_model_dir)}
    parts = trainer_parts(tiny_model_dir, teacher_dirs=dirs, max_tokens_per_microbatch=25)
    trainer, groups = make_trainer(parts), groups_of_two_teachers()
    found = trainer.teachers.score(list(groups.values()), [])
    models = {n: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for n, path in dirs.items()}
    for arrays, payload in zip(found, groups.values(), strict=True):
        for ours, trajectory in zip(arrays, payload.trajectories, strict=True):
            model = models[trajectory.values["teacher_name"]]
            with torch.no_grad():
                parts = [plain_logprobs(model, segment) for segment in trajectory.segments()]
            np.testing.assert_allclose(ours, np.concatenate(parts), atol=1e-5)


def test_each_teachers_divergence_is_that_of_its_own_prompts(tiny_model_dir, other_model_dir, make_trainer):
    dirs = {"math": str(other_model_dir), "code": str(tiny_model_dir), "prose": str(other_model_dir)}
    parts = trainer_parts(
        tiny_model_dir, teacher_dirs=dirs, adv_estimator="none", max_tokens_per_microbatch=25
    )
    trainer, groups = make_trainer(parts), groups_of_two_teachers()
    same = make_step(0, 1)[0][0]
    metas = [replace(same, trajectories=tuple(map(meta_of, one.trajectories))) for one in groups.values()]
    (plan,) = planned(metas, adv_estimator="none")
    metrics = trainer.train(step_in_window=0, plan=plan, payloads=groups).metrics
    theta, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (tiny_model_dir, other_model_dir)
    )
    math_segments = [segment for i in (0, 2) for t in groups[i].trajectories for segment in t.segments()]
    with torch.no_grad():
        here, there = (torch.cat([plain_logprobs(m, s) for s in math_segments]) for m in (theta, teacher))
    assert metrics["distill/kl/math"].value == pytest.approx((here - there).mean().item(), rel=1e-4)
    assert metrics["distill/kl/code"].value == pytest.approx(0.0, abs=1e-6)  # the policy itself
    assert "distill/kl/prose" not in metrics  # no prompt has it


@pytest.mark.slow
def test_adapters_learn_the_same_from_a_teacher_in_processes_of_its_own(
    tiny_model_dir, other_model_dir, make_trainer
):
    """Three steps; scored by step, so that columns are made in the batches of the trainer's."""
    shared = dict(
        teacher_dirs={"": other_model_dir}, adv_estimator="none", rank=4, lr=1e-3, total_optimizer_steps=3
    )
    weights, divergences = [], []
    for tasks in (None, (("train",), (TEACHER,), ("rollout",))):
        trainer = make_trainer(trainer_parts(tiny_model_dir, tasks=tasks, **shared))
        assert (trainer.teachers is None) is (tasks is not None)
        apart = Teachers(trainer.profile, trainer_parts(tiny_model_dir, **shared).place, trainer.ranks)
        for number in range(3):
            metas, payloads = make_step(number, num_groups=4)
            columns = {TEACHER: dict(enumerate(apart.score(payloads, [])))} if tasks else {}
            groups = with_columns(dict(enumerate(payloads)), **columns)
            (plan,) = planned(metas, adv_estimator="none")
            report = trainer.train(step_in_window=0, plan=plan, payloads=groups, columns=(*columns,))
            divergences.append(report.metrics["distill/kl"].value)
        weights.append(weights_of(trainer))
    assert divergences[:3] == divergences[3:]
    assert all(torch.equal(weights[1][name], one) for name, one in weights[0].items())


def test_the_expected_gradient_is_that_of_the_reverse_kl(tiny_model_dir, other_model_dir, make_trainer):
    """One state, and every token of the vocabulary sampled there once: with the importance weights of a
    uniform sampler, their mean is the exact expectation."""
    prompt = [3, 1, 4, 1, 5]
    segments = [
        segment_of([*prompt, token], [0.0] * 5 + [-math.log(VOCAB_SIZE)], [-1] * 5 + [0])
        for token in range(VOCAB_SIZE)
    ]
    ended = {"reward": 0.0, "finish_reason": "stop"}
    trajectories = tuple(trajectory_of((segment,), BUILT_IN, **ended) for segment in segments)
    payload = GroupPayload(uid="0", epoch=0, attempt=0, trajectories=trajectories)
    metas = [replace(make_step(0, 1)[0][0], trajectories=tuple(map(meta_of, trajectories)))]
    keys = dict(adv_estimator="none", loss_mode="reinforce", grad_clip=1e9)
    trainer = make_trainer(trainer_parts(tiny_model_dir, teacher_dirs={"": other_model_dir}, **keys))
    (plan,) = planned(metas, adv_estimator="none")
    trainer.train(step_in_window=0, plan=plan, payloads={0: payload})
    theta, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (tiny_model_dir, other_model_dir)
    )
    log_p, log_q = (model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for model in (theta, teacher))
    (log_p.exp() * (log_p - log_q.detach())).sum().backward()
    plain = dict(theta.named_parameters())
    for name, gradient in gradients_of(trainer).items():
        torch.testing.assert_close(gradient, plain[name].grad, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_resume_with_another_teacher_is_refused(tiny_model_dir, other_model_dir, make_trainer, tmp_path):
    def parts(teacher):
        return trainer_parts(tiny_model_dir, adv_estimator="none", teacher_dirs={"": teacher})

    save(make_trainer(parts(other_model_dir)), tmp_path / "state")
    make_trainer(parts(other_model_dir)).load(tmp_path / "state")
    with pytest.raises(RefusedError, match="a teacher that had other weights"):
        make_trainer(parts(tiny_model_dir)).load(tmp_path / "state")
