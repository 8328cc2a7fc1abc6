"""A run with LoRA is exported merged, or as peft's adapter: both score as the trainer does. A critic is not
exported."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.builtin.tiny import tiny_tokenizer
from asyncrl_cli.export.exported import export
from asyncrl_cli.models.model_files import keep_model_files
from tests.export.conftest import SEQUENCE, checkpoint, model_with_tokenizer, open_run, profile_of, train
from tests.trainers import trainer_parts

LORA = {"rank": 3, "alpha": 6.0}


@pytest.fixture
def lora_run(tmp_path):
    """The run's directory after two steps, its base model's, and the trainer's logprobs of SEQUENCE."""
    model_dir = model_with_tokenizer(tmp_path / "base", tied=True)
    profile = profile_of(model_dir).model_copy(
        update={"lora": profile_of(model_dir).lora.model_copy(update=LORA)}
    )
    directory = open_run(tmp_path / "runs", "otter", profile)
    keep_model_files(model_dir, directory)
    trainer = trainer_parts(model_dir, lr=1e-2, **LORA).made(f"file://{tmp_path}/rendezvous")
    try:
        for step in (1, 2):
            train(trainer, step)
        trainer.snapshot(2)
        checkpoint(directory, 2, lambda path: trainer.write(2, path, False))
        return directory, model_dir, trainer.model.logprobs([SEQUENCE])[0]
    finally:
        trainer.close()


def scores(model) -> list[float]:
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([SEQUENCE[:-1]])).logits[0], -1)
    return [row[token].item() for row, token in zip(logprobs, SEQUENCE[1:], strict=True)]


@pytest.mark.slow
def test_adapters_are_merged_or_written_as_peft_has_them(lora_run):
    directory, model_dir, ours = lora_run
    before = scores(AutoModelForCausalLM.from_pretrained(model_dir))
    assert max(abs(a - b) for a, b in zip(ours, before, strict=True)) > 1e-3, "something was learned"
    whole = export("otter", runs_dir=directory.parent, max_file_bytes=10**9)
    assert scores(AutoModelForCausalLM.from_pretrained(whole.path)) == pytest.approx(ours, abs=1e-5)
    alone = export("otter", runs_dir=directory.parent, max_file_bytes=10**9, adapter=True)
    assert alone.path.name == "step-000002-adapter"
    told = json.loads((alone.path / "adapter_config.json").read_text())
    tensors = load_file(alone.path / "adapter_model.safetensors")
    assert (told["r"], told["lora_alpha"], told["base_model_name_or_path"]) == (3, 6.0, str(model_dir))
    assert "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight" in tensors
    assert alone.parameters == sum(tensor.numel() for tensor in tensors.values())
    peft = pytest.importorskip("peft")
    opened = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), alone.path)
    assert scores(opened) == pytest.approx(ours, abs=1e-5)


@pytest.mark.slow
def test_another_base_model_is_refused(lora_run, tmp_path):
    directory, *_ = lora_run
    other = tmp_path / "other"
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, head_dim=8)
    )
    model.save_pretrained(other)
    tiny_tokenizer("abcdefgh").save_pretrained(other)
    with pytest.raises(
        RefusedError, match=r"not the run's base model: model\.layers\.0\.mlp\.down_proj\.weight is missing"
    ):
        export("otter", runs_dir=directory.parent, max_file_bytes=10**9, model=other)


@pytest.mark.slow
def test_a_critic_is_left_out(tmp_path):
    model_dir = model_with_tokenizer(tmp_path / "base")
    profile = profile_of(model_dir)
    directory = open_run(tmp_path / "runs", "otter", profile)
    keep_model_files(model_dir, directory)
    trainer = trainer_parts(model_dir, adv_estimator="gae").made(f"file://{tmp_path}/rendezvous")
    try:
        trainer.snapshot(2)
        checkpoint(directory, 2, lambda path: trainer.write(2, path, False))
    finally:
        trainer.close()
    exported = export("otter", runs_dir=directory.parent, max_file_bytes=10**9)
    found, initial = (load_file(place / "model.safetensors") for place in (exported.path, model_dir))
    assert found.keys() == initial.keys()
    assert all(torch.equal(found[name], weight) for name, weight in initial.items())


@pytest.mark.slow
def test_whole_weights_are_no_adapter(make_run):
    made = make_run()
    with pytest.raises(RefusedError, match="whole weights, not adapters"):
        export("otter", runs_dir=made.runs_dir, max_file_bytes=10**9, adapter=True)
