"""The embedded engine and the trainer compute what a model's own attention does, whatever features it has.

Tiny random models of many families. The expected logprobs are those of a plain forward of transformers' own
(eager) attention.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.models.attention import choose_attention
from tests.engines import tiny
from tests.engines.made import sampling, transformers_engine
from tests.train.conftest import make_trainer as make_trainer
from tests.trainers import trainer_parts

SIZES: dict[str, Any] = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
SIZES |= dict(bos_token_id=None, eos_token_id=tiny.EOS, pad_token_id=0)
SMALL: dict[str, Any] = {"slots": 4, "max_response_tokens": 24}
HEAD = {"head_dim": 16}
WINDOW = {"sliding_window": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}

FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", HEAD, "sdpa"),
    "qwen3": ("Qwen3Config", HEAD, "sdpa"),
    "soft-cap: gemma2": ("Gemma2Config", HEAD | WINDOW | {"query_pre_attn_scalar": 16}, "eager"),
    "windows: gemma3": ("Gemma3TextConfig", HEAD | WINDOW | MIXED | {"query_pre_attn_scalar": 16}, "sdpa"),
    "sinks: gpt-oss": (
        "GptOssConfig",
        HEAD | WINDOW | MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "eager",
    ),
    "window: mistral": ("MistralConfig", HEAD | WINDOW, "sdpa"),
    "window in some layers: qwen2": (
        "Qwen2Config",
        WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
        "sdpa",
    ),
    "phi3": ("Phi3Config", {}, "sdpa"),
    # Sizes for vLLM on CPUs (test_experts.py): heads of 32 are the smallest that it computes, experts of 48
    # it pads.
    "experts: qwen3-moe": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 32, "num_experts": 4}, "sdpa"),
}


def make_model(family: str) -> PreTrainedModel:
    """Large weights: small ones make attention so flat that a soft-cap or a window hardly shows."""
    name, own_sizes, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**SIZES, **own_sizes), attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")):
                parameter.mul_(40.0)
            elif name.endswith("sinks"):
                parameter.normal_()
            elif parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.eval()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def sequences() -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(2, 64) for _ in range(length)] for length in (12, 40, 25)]


def own_logprobs(model: PreTrainedModel, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        logprobs = torch.log_softmax(
            model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float(), -1
        )
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def mean_diff(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) > 0
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


def test_the_trainers_logprobs_are_those_of_the_models_own_attention(
    family, tmp_path, make_trainer: Callable[..., Any]
):
    model = make_model(family)
    trainer = make_trainer(trainer_parts(tiny.save(model, tmp_path / "model")))
    assert trainer.model.attention == FAMILIES[family][2]
    for tokens, logprobs in zip(sequences(), trainer.model.logprobs(sequences()), strict=True):
        assert mean_diff(logprobs, own_logprobs(model, tokens)) < 1e-5


@pytest.mark.slow
async def test_the_embedded_engine_samples_and_scores_by_the_models_own_attention(family, tmp_path):
    """Prompts and responses longer than the windows, several at once, in one packed batch."""
    model = make_model(family)
    async with transformers_engine(tiny.save(model, tmp_path / "model"), **SMALL) as engine:
        assert engine.sampled_tokens == 0
        running = [engine.generate(f"r{i}", prompt, sampling(24), i) for i, prompt in enumerate(sequences())]
        completions, scores = await asyncio.gather(*running), (await engine.score(sequences(), 1.0)).logprobs
    for prompt, completion, scored in zip(sequences(), completions, scores, strict=True):
        expected = own_logprobs(model, prompt + completion.tokens)
        assert mean_diff(completion.logprobs, expected[len(prompt) - 1 :]) < 1e-5
        assert mean_diff(scored, own_logprobs(model, prompt)) < 1e-5


@pytest.mark.parametrize("family", ["soft-cap: gemma2"])
def test_what_sdpa_leaves_out_is_seen_in_fresh_weights_that_hardly_show_it(family):
    """At the start of training on random weights its logprobs differ by less than any alarm; later they would
    not."""
    name, own_sizes, expected = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**SIZES, **own_sizes), attn_implementation="eager"
    ).eval()
    own = own_logprobs(model, sequences()[1])
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([sequences()[1]])).logits[0, :-1], -1)
    sdpas = logprobs.gather(1, torch.tensor(sequences()[1][1:])[:, None])[:, 0].tolist()
    assert mean_diff(sdpas, own) < 1e-4
    model.set_attn_implementation("eager")
    with patch.object(model, "set_attn_implementation", wraps=model.set_attn_implementation) as chosen:
        assert choose_attention(model) == expected
    assert chosen.call_args.args == (expected,)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "soft-cap: gemma2", "experts: qwen3-moe"])
async def test_trainer_and_engine_score_alike_in_either_dtype(
    family, dtype, tmp_path, make_trainer: Callable[..., Any]
):
    directory = tiny.save(make_model(family), tmp_path / "model")
    trainer = make_trainer(trainer_parts(directory, dtype=dtype))
    async with transformers_engine(directory, dtype=dtype, **SMALL) as engine:
        scored = (await engine.score(sequences(), 1.0)).logprobs
    # A mixture of experts rounds by how many tokens come to an expert: the trainer has one token less.
    largest = 2e-3 if family.startswith("experts") and dtype == "bfloat16" else 1e-6
    for ours, theirs in zip(trainer.model.logprobs(sequences()), scored, strict=True):
        assert mean_diff(ours, theirs) < largest


async def test_a_model_with_attention_that_cannot_be_exchanged_is_refused_by_the_engine(tmp_path: Path):
    config = transformers.BloomConfig(
        vocab_size=64, hidden_size=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=tiny.EOS
    )
    directory = tiny.save(AutoModelForCausalLM.from_config(config), tmp_path / "model")
    with pytest.raises(PreflightError, match="cannot batch a bloom model") as told:
        async with transformers_engine(directory, **SMALL):
            pass
    assert told.value.hint == "--set rollout.engine=vllm"
