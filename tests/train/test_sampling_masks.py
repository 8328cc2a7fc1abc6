"""Sampling masks: what the engine sampled and what the trainer trains are one distribution, against the
model's own logits with everything else left out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult
from asyncrl_cli.data.ragged import Ragged
from asyncrl_cli.data.sample_fields import BUILT_IN, KEPT_TOKENS
from asyncrl_cli.data.trajectories import GroupPayload, segment_of, trajectory_of
from asyncrl_cli.engines.port import Completion
from asyncrl_cli.measure.values import shown
from asyncrl_cli.train.sampling_masks import KeptTokens
from asyncrl_cli.weights.receivers import SharedWeights
from tests.engines import tiny
from tests.engines.made import prompts, sampling, transformers_engine
from tests.packed import pack
from tests.train.train_samples import meta_of
from tests.trainers import rank_batch, trainer_parts

pytestmark = pytest.mark.slow
TEMPERATURE = 0.8
HOWS = {
    "top-p and top-k": dict(top_p=0.95, top_k=20),
    "min-p alone": dict(min_p=0.2),
    "top-p alone": dict(top_p=0.9),
    "all three": dict(top_p=0.9, top_k=9, min_p=0.05),
    "one token": dict(top_k=1),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.make_model(scale=2.5), tmp_path_factory.mktemp("model"))


def groups_of(completions: dict[int, list[Completion]]) -> tuple[list[GroupResult], list[GroupPayload]]:
    """By prompt; every second response is right."""
    metas, payloads = [], []
    for number, group in completions.items():
        prompt, trajectories = prompts(number + 1)[number], []
        for index, one in enumerate(group):
            added = len(prompt)
            segment: dict[str, Any] = dict(
                segment_of(prompt + one.tokens, [0.0] * added + one.logprobs, [-1] * added + one.versions)
            )
            for name, values in one.fields.items():
                segment[name] = BUILT_IN[name].array_of(values, len(one.tokens))
            trajectories.append(
                trajectory_of([segment], BUILT_IN, reward=float(index % 2), finish_reason="stop")
            )
        key = AttemptKey(f"p{number}", 0, 0)
        meta = GroupResult(
            key=key,
            trajectories=tuple(map(meta_of, trajectories)),
            failures=(),
            failed_tokens=0,
            payload=None,
        )
        metas.append(meta)
        payloads.append(GroupPayload(uid=key.uid, epoch=0, attempt=0, trajectories=tuple(trajectories)))
    return metas, payloads


def sampled(model_dir: Path, **how: Any) -> tuple[list[GroupResult], list[GroupPayload]]:
    """Two groups of four, by a real engine."""

    async def all_of() -> dict[int, list[Completion]]:
        async with transformers_engine(model_dir) as engine:
            asked = sampling(24, temperature=TEMPERATURE, returns_kept=True, **how)
            return {
                number: await asyncio.gather(
                    *(engine.generate(f"{number}/{i}", prompts(2)[number], asked, i) for i in range(4))
                )
                for number in range(2)
            }

    return groups_of(asyncio.run(all_of()))


def without_masks(payloads: list[GroupPayload]) -> list[GroupPayload]:
    return [
        replace(one, trajectories=tuple(replace(each, per_sampled={}) for each in one.trajectories))
        for one in payloads
    ]


def plain_logprobs(model: Any, segment: Any) -> torch.Tensor:
    """Token by token: its scaled logit among those kept, all others left out."""
    tokens = torch.tensor(segment["tokens"], dtype=torch.int64)
    logits_TV = model(tokens[None]).logits[0].float() / TEMPERATURE
    places = segment["mask"].nonzero()[0]
    kept = (
        segment[KEPT_TOKENS].tolist()
        if KEPT_TOKENS in segment
        else [[*range(logits_TV.shape[1])]] * len(places)
    )
    return torch.stack(
        [
            logits_TV[t - 1][tokens[t]] - logits_TV[t - 1][ids].logsumexp(0)
            for t, ids in zip(places, kept, strict=True)
        ]
    )


def segments_of(payloads: list[GroupPayload]) -> list[Any]:
    return [segment for one in payloads for each in one.trajectories for segment in each.segments()]


def largest_deviation(trainer: Any, payloads: list[GroupPayload]) -> float:
    """Of the importance ratios from 1, over all tokens."""
    columns = trainer.model.column(dict(enumerate(payloads)))
    theirs = np.concatenate([one["logprobs"][one["mask"]] for one in segments_of(payloads)])
    ours = np.concatenate([array for number in range(len(payloads)) for array in columns[number]])
    return float(np.abs(np.expm1(ours - theirs)).max())


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_at_the_sampler_s_weights_every_ratio_is_1_and_gradients_are_those_of_plain_torch(
    model_dir, make_trainer, how
):
    metas, payloads = sampled(model_dir, **how)
    segments = segments_of(payloads)
    lengths = np.concatenate([one[KEPT_TOKENS].lengths for one in segments])
    assert lengths.max() <= how.get("top_k", 64)
    for one in segments:
        for token, kept in zip(one["tokens"][one["mask"]], one[KEPT_TOKENS].tolist(), strict=True):
            assert token in kept
    for shared_prefixes in (True, False):
        trainer = make_trainer(
            trainer_parts(model_dir, temperature=TEMPERATURE, shared_prefixes=shared_prefixes)
        )
        assert largest_deviation(trainer, payloads) < 1e-5
        if how != HOWS["one token"]:
            assert largest_deviation(trainer, without_masks(payloads)) > 1e-3
        batch = trainer.model.step_batches(rank_batch(metas, payloads)["plan"], dict(enumerate(payloads)))[0]
        for microbatch in batch.microbatches:
            trainer.model.gathered.before_backward(is_last=microbatch is batch.microbatches[-1])
            weights = torch.linspace(-1, 2, sum(batch.counts_P))[microbatch.order_N]
            (trainer.model.scored(microbatch).logprobs_N * weights).sum().backward()
        plain = AutoModelForCausalLM.from_pretrained(model_dir).eval()
        expected = torch.cat([plain_logprobs(plain, one) for one in segments])
        (expected * torch.linspace(-1, 2, len(expected))).sum().backward()
        largest = max(float(p.grad.norm()) for p in plain.parameters())
        assert (largest == 0) == (how == HOWS["one token"])
        for name, parameter in plain.named_parameters():
            ours = trainer.model.parameters[name].grad.full_tensor()
            assert float((ours - parameter.grad).norm()) <= 1e-5 * max(largest, 1.0), name


def test_without_the_field_the_gradient_is_another(model_dir, make_trainer):
    metas, payloads = sampled(model_dir, top_p=0.95, top_k=20)
    gradients = []
    for groups in (payloads, without_masks(payloads)):
        trainer = make_trainer(trainer_parts(model_dir, temperature=TEMPERATURE))
        trainer.model.gathered.before_backward(is_last=True)
        (batch,) = trainer.model.step_batches(rank_batch(metas, groups)["plan"], dict(enumerate(groups)))
        trainer.model.scored(batch.microbatches[0]).logprobs_N.sum().backward()
        gradients.append(
            torch.cat([p.grad.full_tensor().flatten() for p in trainer.model.parameters.values()])
        )
    assert float((gradients[0] - gradients[1]).norm()) > 0.05 * float(gradients[1].norm())


@pytest.mark.parametrize(
    "keys", [{}, {"rank": 4}, {"old_logprobs": "rollout"}], ids=["prox", "lora", "no prox"]
)
def test_policy_prox_and_reference_take_the_sampler_s_mask_in_a_train_step(model_dir, make_trainer, keys):
    metas, payloads = sampled(model_dir, top_p=0.95, top_k=20)
    found = {}
    for name, groups in (("masks", payloads), ("none", without_masks(payloads))):
        parts = trainer_parts(
            model_dir,
            ref_dir=model_dir,
            use_kl_loss=True,
            temperature=TEMPERATURE,
            **keys,
        )
        trainer = make_trainer(parts)
        report = trainer.train(**rank_batch(metas, groups))
        found[name] = shown(report.metrics)
    assert found["masks"]["correction/kl"] < 1e-9 < 1e-3 < found["none"]["correction/kl"]
    assert found["masks"]["ref/kl"] < 1e-9
    assert found["masks"]["train/entropy"] < found["none"]["train/entropy"]


def test_a_response_that_another_version_continues_keeps_the_masks_of_both(model_dir, make_trainer, tmp_path):
    model = tiny.make_model(scale=2.5)
    newer = tiny.weights_after(model, 1)

    async def continued() -> tuple[Completion, Completion]:
        how = dict(temperature=TEMPERATURE, top_p=0.9, returns_kept=True)
        async with transformers_engine(model_dir) as engine:
            for seed in range(20):
                begun = await engine.generate("a", prompts(1)[0], sampling(9, **how), seed)
                if begun.finish_reason == "length":
                    break
            await engine.load(SharedWeights(pack(newer, 300_000)), 1, "drain")
            begun = replace(begun, finish_reason="abort")
            return begun, await engine.generate("b", prompts(1)[0], sampling(24, **how), 3, so_far=begun)

    begun, whole = asyncio.run(continued())
    assert whole.versions == [0] * 9 + [1] * (len(whole.tokens) - 9)
    assert len(whole.fields[KEPT_TOKENS]) == len(whole.tokens) > 9
    for before, after in zip(begun.fields[KEPT_TOKENS], whole.fields[KEPT_TOKENS], strict=False):
        assert list(before) == list(after)
    _, payloads = groups_of({0: [whole]})
    model.load_state_dict(newer)
    trainer = make_trainer(trainer_parts(tiny.save(model, tmp_path / "newer"), temperature=TEMPERATURE))
    ((ours,),) = trainer.model.column({0: payloads[0]}).values()
    (segment,) = segments_of(payloads)
    with torch.no_grad():
        np.testing.assert_allclose(ours, plain_logprobs(model, segment).numpy(), atol=1e-5)
    log_ratios = np.abs(ours - np.array(whole.logprobs, np.float32))
    assert log_ratios[9:].max() < 1e-5
    assert np.isfinite(ours).all()
    assert log_ratios[:9].max() > 1e-3


def test_tokens_are_left_out_row_by_row_and_none_of_a_row_without_a_mask():
    rows: list[tuple[int, ...]] = [(), (), (3, 5), (0,), (), (1, 2, 7)]
    left_out = KeptTokens.of([Ragged.of(rows)], torch.device("cpu")).left_out(torch.zeros(len(rows), 8))
    assert left_out.tolist() == [[bool(row) and token not in row for token in range(8)] for row in rows]
