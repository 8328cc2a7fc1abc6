"""Tensors as a model's own files have them: against what save_pretrained writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl_cli.models.saved_form import SavedForm, skeleton
from asyncrl_cli.models.shape import LAYER

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "Qwen3Config": ({"head_dim": 16}, False),
    "Qwen3MoeConfig": ({"head_dim": 16, "moe_intermediate_size": 16, "num_experts": 4}, True),
    "MixtralConfig": ({"num_local_experts": 4}, True),
    "GptOssConfig": ({"head_dim": 16, "num_local_experts": 4}, False),
    # One dense layer, one with experts, and a float32 buffer beside them.
    "Glm4MoeConfig": (
        {
            "head_dim": 16,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "tie_word_embeddings": True,
        },
        True,
    ),
}


@pytest.fixture(params=MODELS)
def saved(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[PreTrainedModel, SavedForm, dict[str, torch.Tensor]]:
    changes, converts = MODELS[request.param]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, request.param)(**SIZES, **changes))
    model.save_pretrained(tmp_path)
    form = SavedForm(skeleton(tmp_path, trust_remote_code=False))
    assert form.converts == converts
    return model, form, load_file(tmp_path / "model.safetensors")


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_tensors_are_those_that_save_pretrained_writes(saved):
    model, form, in_files = saved
    own = {name: tensor for name, tensor in model.state_dict().items() if name in form.memory}
    assert_equal(form.to_files(own), in_files)
    assert {name: tensor.shape for name, tensor in form.to_files(form.memory).items()} == {
        n: t.shape for n, t in in_files.items()
    }


def test_a_layer_at_a_time_makes_the_same_tensors(saved):
    model, form, in_files = saved
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name in form.memory:
        layer = LAYER.search(name)
        parts.setdefault(name[: layer.end()] if layer else "", {})[name] = model.state_dict()[name]
    assert len(parts) == 3
    assert_equal(
        {name: tensor for part in parts.values() for name, tensor in form.to_files(part).items()}, in_files
    )


def test_they_come_back_as_the_model_has_them(saved):
    model, form, in_files = saved
    own, back = model.state_dict(), form.to_memory(in_files)
    assert back.keys() >= form.memory.keys()
    assert_equal(back, {name: own[name] for name in back})
