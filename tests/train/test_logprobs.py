"""Logprobs and entropies in chunks of tokens, against the whole logits that the model itself returns."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen3Config

from asyncrl_cli.data.ragged import Ragged
from asyncrl_cli.data.sample_fields import Field
from asyncrl_cli.train import LOGITS_COPIES
from asyncrl_cli.train import logprobs as head_chunks
from asyncrl_cli.train.batch import scoring_microbatch
from asyncrl_cli.train.logprobs import ForwardPass
from asyncrl_cli.train.sampling_masks import KeptTokens

SIZES = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8)
SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8, 9, 7, 9, 3]]
CONFIGS = {
    "tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "untied": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "soft-cap": Gemma2Config(**SIZES, final_logit_softcapping=2.0),
}


def made(name, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").to(dtype).eval()


def whole(model, temperature):
    """Logprobs and entropies of one sequence after the other, by the model's own logits."""
    parts = []
    for tokens in SEQUENCES:
        logits = model(torch.tensor([tokens])).logits[0, :-1].float() / temperature
        distribution = torch.distributions.Categorical(logits=logits)
        parts.append((distribution.log_prob(torch.tensor(tokens[1:])), distribution.entropy()))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def loss_of(logprobs):
    """Any function of all logprobs: tokens have gradients of their own."""
    return (logprobs * torch.linspace(-1, 2, len(logprobs))).exp().mean()


def test_a_batch_without_masks_fills_in_none(monkeypatch):
    monkeypatch.delattr(Field, "filled")
    assert scoring_microbatch(SEQUENCES, torch.device("cpu")).kept is None


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_give_the_values_and_gradients_of_whole_logits(name, chunk_tokens, monkeypatch):
    monkeypatch.setattr(head_chunks, "LOGITS_CHUNK_ELEMENTS", {"cpu": chunk_tokens * SIZES["vocab_size"]})
    model, temperature = made(name), 0.7
    scored = ForwardPass(model, temperature)(scoring_microbatch(SEQUENCES, torch.device("cpu")))
    loss_of(scored.logprobs_N).backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    logprobs, entropies = whole(model, temperature)
    loss_of(logprobs).backward()
    torch.testing.assert_close(scored.logprobs_N, logprobs)
    torch.testing.assert_close(scored.entropy_N, entropies)
    assert not scored.entropy_N.requires_grad
    for parameter, gradient in ours.items():
        torch.testing.assert_close(gradient, dict(model.named_parameters())[parameter].grad, msg=parameter)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize("name", CONFIGS)
def test_with_an_entropy_bonus_the_gradient_is_that_of_autograd_through_whole_logits(
    name, chunk_tokens, monkeypatch
):
    monkeypatch.setattr(head_chunks, "LOGITS_CHUNK_ELEMENTS", {"cpu": chunk_tokens * SIZES["vocab_size"]})
    model, temperature = made(name), 0.7
    microbatch = scoring_microbatch(SEQUENCES, torch.device("cpu"))
    scored = ForwardPass(model, temperature, differentiates_entropy=True)(microbatch)
    assert torch.equal(scored.logprobs_N, ForwardPass(model, temperature)(microbatch).logprobs_N)
    (loss_of(scored.logprobs_N) - loss_of(scored.entropy_N / 4)).backward()
    ours = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    logprobs, entropies = whole(model, temperature)
    (loss_of(logprobs) - loss_of(entropies / 4)).backward()
    plain = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert (torch.cat([*map(torch.flatten, ours)]) - plain).norm() < 1e-6 * plain.norm()


class LargestTensors(TorchDispatchMode):
    """Counts how many float32 tensors of `numel` elements are alive at once."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.alive, self.most = numel, 0, 0
        self.storages = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() == 4 * self.numel:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.storages:
                    self.storages.add(storage._cdata)
                    self.alive += 1
                    self.most = max(self.most, self.alive)
                    weakref.finalize(storage, self.freed, storage._cdata)
        return made

    def freed(self, storage):
        self.storages.discard(storage)
        self.alive -= 1


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize("has_bonus", [False, True])
@pytest.mark.parametrize("has_teacher", [False, True])
def test_masks_give_the_values_and_gradients_of_the_kept_tokens_alone(
    chunk_tokens, has_bonus, has_teacher, monkeypatch
):
    monkeypatch.setattr(head_chunks, "LOGITS_CHUNK_ELEMENTS", {"cpu": chunk_tokens * SIZES["vocab_size"]})
    model, temperature, generator = made("soft-cap"), 0.7, torch.Generator().manual_seed(1)
    microbatch = scoring_microbatch(SEQUENCES, torch.device("cpu"))
    kept = [  # the third has one token, the fourth the whole vocabulary
        sorted({target, *torch.randint(61, (n % 9,), generator=generator).tolist()}) if n != 3 else []
        for n, target in enumerate(microbatch.targets_N.tolist(), -2)
    ]
    masks = KeptTokens.of([Ragged.of(kept)], torch.device("cpu"))
    forward = ForwardPass(model, temperature, differentiates_entropy=has_bonus)
    teacher = torch.randn(len(kept), 61, generator=generator).log_softmax(-1) if has_teacher else None
    scored = forward(replace(microbatch, kept=masks), teacher)

    logits = torch.cat([model(torch.tensor([one])).logits[0, :-1] / temperature for one in SEQUENCES])
    logprobs, entropies, divergences = [], [], []
    for n, (row, target, ids) in enumerate(zip(logits, microbatch.targets_N.tolist(), kept, strict=True)):
        ids = ids or list(range(61))
        distribution = torch.distributions.Categorical(logits=row[ids])
        logprobs.append(distribution.log_prob(torch.tensor(ids.index(target))))
        entropies.append(distribution.entropy())
        if has_teacher:
            other = torch.distributions.Categorical(logits=teacher[n][ids])
            divergences.append(torch.distributions.kl_divergence(distribution, other))
    expected, entropy = torch.stack(logprobs), torch.stack(entropies)
    divergence = torch.stack(divergences) if has_teacher else torch.zeros(1)
    if has_teacher:
        torch.testing.assert_close(scored.divergence_N, divergence)
    torch.testing.assert_close(scored.logprobs_N, expected)
    torch.testing.assert_close(scored.entropy_N, entropy)
    assert any(len(ids) == 1 for ids in kept)
    assert all(scored.logprobs_N[n] == 0 for n, ids in enumerate(kept) if len(ids) == 1)
    found = []
    ours = (scored.logprobs_N, scored.entropy_N, scored.divergence_N if has_teacher else divergence)
    for values, entropy_N, divergence_N in (ours, (expected, entropy, divergence)):
        model.zero_grad(set_to_none=True)
        loss = loss_of(values) - (loss_of(entropy_N / 4) if has_bonus else 0)
        (loss + loss_of(divergence_N / 8)).backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert (found[0] - found[1]).norm() < 1e-5 * found[1].norm()


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("is_differentiated", [False, True])
def test_no_more_copies_of_the_logits_are_alive_than_a_plan_counts(is_differentiated, is_masked, monkeypatch):
    tokens = sum(len(one) - 1 for one in SEQUENCES)
    monkeypatch.setattr(head_chunks, "LOGITS_CHUNK_ELEMENTS", {"cpu": tokens * SIZES["vocab_size"]})
    forward = ForwardPass(made("untied"), 0.7, differentiates_entropy=is_differentiated)
    microbatch = scoring_microbatch(SEQUENCES, torch.device("cpu"))
    if is_masked:
        kept = Ragged.of([[target, 7] for target in microbatch.targets_N.tolist()])
        microbatch = replace(microbatch, kept=KeptTokens.of([kept], torch.device("cpu")))
    with LargestTensors(tokens * SIZES["vocab_size"]) as counted:
        scored = forward(microbatch)
        (loss_of(scored.logprobs_N) - (loss_of(scored.entropy_N) if is_differentiated else 0)).backward()
    assert 1 < counted.most <= LOGITS_COPIES


@pytest.mark.slow
def test_gradients_of_chunks_in_bfloat16_are_added_up_in_float32(monkeypatch):
    """A sum of many chunks in bfloat16 would lose its small parts; here it is as near to float32 as whole
    logits are."""
    heads = {}
    for dtype, chunk_tokens in ((torch.float32, 1000), (torch.bfloat16, 1000), (torch.bfloat16, 1)):
        monkeypatch.setattr(head_chunks, "LOGITS_CHUNK_ELEMENTS", {"cpu": chunk_tokens * SIZES["vocab_size"]})
        model = made("untied", dtype)
        batch = scoring_microbatch(
            [[i * j % 61 for i in range(60)] for j in range(1, 9)], torch.device("cpu")
        )
        ForwardPass(model, 1.0)(batch).logprobs_N.mean().backward()
        heads[dtype, chunk_tokens] = model.lm_head.weight.grad.float()
    exact = heads.pop((torch.float32, 1000))
    errors = {key: (head - exact).norm().item() for key, head in heads.items()}
    assert errors[torch.bfloat16, 1] < 1.2 * errors[torch.bfloat16, 1000]
