"""PartialResponse versions open with plain transformers, appear whole, and the oldest go."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from asyncrl_cli.weights.model_files import kept_versions
from asyncrl_cli.weights.senders import keep_version
from tests.packed import pack
from tests.weights.test_buckets import manifest_of


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model_dir(request, tmp_path):
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=request.param,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


def keep(root, version, buckets, model_dir, keep_versions):
    keep_version(root, replace(manifest_of(buckets), version=version), buckets, model_dir, keep_versions)


def test_a_kept_version_opens_with_transformers_and_has_the_published_weights(tmp_path, model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    buckets = pack(dict(model.named_parameters(remove_duplicate=False)), 10_000)
    keep(tmp_path / "weights", 12, buckets, model_dir, "all")
    directory = tmp_path / "weights" / "version-000012"
    assert (directory / "tokenizer.json").read_text() == "{}"
    again = AutoModelForCausalLM.from_pretrained(directory)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(again.get_parameter(name), parameter), name


def test_only_the_newest_versions_stay(tmp_path, model_dir):
    root = tmp_path / "weights"
    buckets = pack(dict(AutoModelForCausalLM.from_pretrained(model_dir).named_parameters()), 10_000)
    assert kept_versions(root) == []
    for version in (0, 1, 2, 2, 3):
        keep(root, version, buckets, model_dir, 2)
    assert kept_versions(root) == [2, 3]
    assert sorted(p.name for p in root.iterdir()) == ["version-000002", "version-000003"]
    keep(root, 4, buckets, model_dir, "all")
    assert kept_versions(root) == [2, 3, 4]
