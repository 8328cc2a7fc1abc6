"""Tensors as a model's own files have them: against what save_pretrained writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl_cli.models.saved_form import SavedForm, skeleton
from asyncrl_cli.models.shape import LAYER

SIZES: dict[str, Any] = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=2)
SIZES |= dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "Qwen3Config": ({"head_dim": 16}, False),
    "Qwen3MoeConfig": ({"head_dim": 16, "moe_intermediate_size": 16, "num_experts": 4}, True),
    "MixtralConfig": ({"num_local_experts": 4}, True),
    "GptOssConfig": ({"head_dim": 16, "num_local_experts": 4}, False),
    # One dense layer, one with experts, and a float32 buffer beside them.
    "Glm4MoeConfig": (
        {"head_dim": 16, "moe_intermediate_size": 16, "n_routed_experts": 4}
        | {"first_k_dense_replace": 1, "tie_word_embeddings": True},
        True,
    ),
}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("kind", MODELS)
def test_tensors_are_those_that_save_pretrained_writes_and_come_back_as_the_model_has_them(
    kind: str, tmp_path: Path
) -> None:
    changes, converts = MODELS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SIZES, **changes))
    model.save_pretrained(tmp_path)
    form, in_files = (
        SavedForm(skeleton(tmp_path, trust_remote_code=False)),
        load_file(tmp_path / "model.safetensors"),
    )
    assert form.converts == converts
    own = {name: tensor for name, tensor in model.state_dict().items() if name in form.memory}
    assert_equal(form.to_files(own), in_files)
    shapes = {name: tensor.shape for name, tensor in form.to_files(form.memory).items()}
    assert shapes == {name: tensor.shape for name, tensor in in_files.items()}
    # a layer at a time makes the same tensors
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in own.items():
        layer = LAYER.search(name)
        layers.setdefault(name[: layer.end()] if layer else "", {})[name] = tensor
    assert len(layers) == 3
    converted = [form.to_files(layer).items() for layer in layers.values()]
    assert_equal({name: tensor for items in converted for name, tensor in items}, in_files)
    back = form.to_memory(in_files)
    assert back.keys() >= form.memory.keys()
    assert_equal(back, {name: model.state_dict()[name] for name in back})
