"""LoRA: adapters alone are trained and kept, whole weights are published; held against plain arithmetic, and
against peft."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.models.shape import shape_of
from asyncrl_cli.plan.memory import adapter_parameters
from asyncrl_cli.profile.schema import LoraSection
from asyncrl_cli.train.policy_model import add_adapters
from asyncrl_cli.weights.buckets import Unpacked
from asyncrl_cli.weights.receivers import BaseFiles
from tests.packed import pack
from tests.train.train_samples import make_step
from tests.trainers import rank_batch, save, trainer_parts

LORA = {"rank": 4, "alpha": 8.0, "lr": 1e-2}


def train(trainer, steps: int = 3) -> None:
    for step in range(1, steps + 1):
        trainer.train(**rank_batch(*make_step(step, 4)))


def published(trainer) -> dict[str, torch.Tensor]:
    trainer.gather(1)
    return trainer.publication.packing.tensors()


@pytest.mark.slow
def test_adapters_alone_are_trained_and_whole_weights_are_published_that_score_as_the_trainer_does(
    tiny_model_dir, make_trainer, tmp_path
):
    initial = load_file(tiny_model_dir / "model.safetensors")
    trainer = make_trainer(trainer_parts(tiny_model_dir, **LORA))
    before = published(trainer)
    assert all(torch.equal(before[name], initial[name]) for name in initial), "an adapter is nothing at first"
    train(trainer)
    after, adapters = published(trainer), trainer.model.locals()
    assert {name.rpartition(".lora_")[2] for name in adapters} == {"A.weight", "B.weight"}
    assert sum(map(torch.numel, adapters.values())) < sum(map(torch.numel, initial.values())) / 2
    assert {key.partition("/")[2] for key in trainer.state_tensors()} == adapters.keys()
    counted = adapter_parameters(trainer.profile, shape_of(str(tiny_model_dir)))
    assert counted == sum(map(torch.numel, adapters.values())), "what plan's memory estimate counts"
    for name, weight in initial.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in adapters:
            a, b = (adapters[f"{stem}.lora_{part}.weight"].double() for part in "AB")
            assert not torch.equal(after[name], weight)
            torch.testing.assert_close(after[name].double(), weight.double() + 2.0 * b @ a, rtol=0, atol=1e-6)
        else:
            assert torch.equal(after[name], weight), name
    ours = trainer.model.logprobs([[3, 1, 4, 1, 5, 9]])
    for path in tiny_model_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = {name: tensor.clone() for name, tensor in after.items()}
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = make_trainer(trainer_parts(tmp_path)).model.logprobs([[3, 1, 4, 1, 5, 9]])
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)


@pytest.mark.slow
def test_adapters_sent_alone_and_merged_by_a_worker_are_bit_for_bit_what_would_have_been_sent(
    tiny_model_dir, make_trainer
):
    trainers = [
        make_trainer(trainer_parts(tiny_model_dir, sync=sync, **LORA)) for sync in ("merged", "adapter")
    ]
    for trainer in trainers:
        train(trainer)
        trainer.gather(1)
    (whole, buckets), (small, adapters) = (trainer.published(1) for trainer in trainers)
    assert small.num_bytes < whole.num_bytes / 2
    assert small.probe_logprobs == whole.probe_logprobs
    base = BaseFiles(trainers[1].profile, tiny_model_dir)
    expected = dict(Unpacked(buckets))
    for sent in (adapters, buckets):  # another trainer, by the gateway, sends whole weights
        found = dict(Unpacked(base.whole(iter(sent))))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match=r"weights that the base model does not have: model\.layers\.9"):
        list(base.whole(pack({"model.layers.9.lora_A.weight": torch.zeros(4, 2)}, 1000)))


def test_chosen_modules_get_adapters_and_a_wrong_name_is_refused_with_the_right_ones(tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    add_adapters(model, LoraSection(rank=2, target_modules=("q_proj", "v_proj")), 0)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {name.split(".")[-3] for name in trained} == {"q_proj", "v_proj"}
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with pytest.raises(ConfigError, match="no linear layer query_key_value") as refused:
        add_adapters(model, LoraSection(rank=2, target_modules=("query_key_value",)), 0)
    assert "it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in refused.value.hint


@pytest.mark.slow
def test_a_resume_on_another_base_model_or_without_adapters_is_refused(
    tiny_model_dir, other_model_dir, make_trainer, tmp_path
):
    trainer = make_trainer(trainer_parts(tiny_model_dir, **LORA))
    train(trainer, steps=1)
    save(trainer, tmp_path / "checkpoint", 1)
    make_trainer(trainer_parts(tiny_model_dir, **LORA)).load(tmp_path / "checkpoint")
    with pytest.raises(RefusedError, match="a base model that had other weights"):
        make_trainer(trainer_parts(other_model_dir, **LORA)).load(tmp_path / "checkpoint")
    save(make_trainer(trainer_parts(tiny_model_dir)), tmp_path / "whole", 1)
    with pytest.raises(RefusedError, match=r"checkpoint is of another model: .*lora_A\.weight is absent"):
        make_trainer(trainer_parts(tiny_model_dir, **LORA)).load(tmp_path / "whole")


@pytest.mark.slow
def test_the_reference_has_no_adapters(tiny_model_dir, make_trainer):
    trainer = make_trainer(trainer_parts(tiny_model_dir, use_kl_loss=True, **LORA))
    assert not [name for name in trainer.reference.parameters if ".lora_" in name]
    train(trainer, steps=1)


@pytest.mark.slow
def test_values_and_gradients_are_pefts(tiny_model_dir):
    peft = pytest.importorskip("peft")
    ours, base = (AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32) for _ in range(2))
    add_adapters(ours, LoraSection(rank=4, alpha=8.0, target_modules=("q_proj", "down_proj")), 0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    theirs = peft.get_peft_model(base, config)
    drawn = torch.Generator().manual_seed(1)
    mine = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    for parameter in mine.values():
        parameter.data.normal_(std=0.1, generator=drawn)
    saved = {f"base_model.model.{name}": p.detach().clone() for name, p in mine.items()}
    assert not peft.set_peft_model_state_dict(theirs, saved).unexpected_keys
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    outputs = [model(input_ids=tokens).logits for model in (ours, theirs)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    for logits in outputs:
        logits.square().mean().backward()
    gradients = {
        name.replace(".default", "").removeprefix("base_model.model."): p.grad
        for name, p in theirs.named_parameters()
    }
    for name, parameter in mine.items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-6)
