"""Sizes from config.json against models that transformers builds from the same configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from asyncrl_cli.builtin.tiny import tiny_sizes
from asyncrl_cli.models.shape import ShapeUnknown, shape_of, shape_of_directory

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "builtin:tiny": Qwen3Config(**tiny_sizes(64)),
    "qwen3 untied": Qwen3Config(**SMALL),
    "qwen3 tied": Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True),
    "qwen3 with biases": Qwen3Config(**SMALL, attention_bias=True),
    "llama, grouped queries": LlamaConfig(**SMALL),
    "llama, all heads": LlamaConfig(**{**SMALL, "num_key_value_heads": 4}),
    "llama tied, with biases": LlamaConfig(
        **SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen2": Qwen2Config(**SMALL),
    "mistral": MistralConfig(**SMALL),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_and_kv_values_are_those_of_the_real_model(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))
    model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.layer_parameters == sum(
        parameter.numel() for parameter in model.model.layers[0].parameters()
    )
    cache = DynamicCache(config=config)
    model(input_ids=torch.zeros(1, 5, dtype=torch.long), past_key_values=cache, use_cache=True)
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert 5 * shape.kv_values_per_token == cached


def test_builtin_tiny_is_what_it_is_built_as() -> None:
    model = AutoModelForCausalLM.from_config(Qwen3Config(**tiny_sizes(64)))
    assert shape_of("builtin:tiny").parameters == sum(parameter.numel() for parameter in model.parameters())


def test_another_architecture_is_counted_in_the_headers_of_its_files(tmp_path: Path) -> None:
    config = GemmaConfig(**SMALL, head_dim=16)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    shape = shape_of_directory(tmp_path)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.layer_parameters == sum(
        parameter.numel() for parameter in model.model.layers[0].parameters()
    )
    assert "counted in its files" in shape.remarks[0]


def test_another_architecture_without_files_is_unknown(tmp_path: Path) -> None:
    GemmaConfig(**SMALL, head_dim=16).save_pretrained(tmp_path)
    with pytest.raises(ShapeUnknown, match="gemma model without safetensors"):
        shape_of_directory(tmp_path)


def test_a_hub_name_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a plan asks no network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    with pytest.raises(ShapeUnknown, match="the estimate needs its config"):
        shape_of("someone/a-model-that-is-not-here")


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"model_type": "llama", "vocab_size": 3})])
def test_a_damaged_configuration_is_unknown_and_no_crash(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ShapeUnknown, match=r"config\.json"):
        shape_of(str(tmp_path))
