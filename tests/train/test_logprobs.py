"""Logprobs and entropies in chunks of tokens, against the whole logits that the model itself returns."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen3Config

from asyncrl_cli.train import logprobs as head_chunks
from asyncrl_cli.train.batch import scoring_microbatch
from asyncrl_cli.train.logprobs import ForwardPass

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
