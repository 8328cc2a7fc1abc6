"""A rank's model from its files alone, and layers that are computed again, against the model as transformers
loads it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config

from asyncrl_cli.models.saved_form import SavedForm, skeleton
from asyncrl_cli.profile.schema import ProcessPlace, Profile, TrainerSection
from asyncrl_cli.train import keeps_whole_gradients, sharded_model
from asyncrl_cli.train.batch import scoring_microbatch
from asyncrl_cli.train.logprobs import ForwardPass
from asyncrl_cli.train.policy_model import PolicyModel
from asyncrl_cli.train.ranks import Ranks

SIZES = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=3)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8)
CONFIGS = {
    "tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "untied": Qwen3Config(**SIZES, tie_word_embeddings=False, dtype="bfloat16"),
    "buffers": Gemma3TextConfig(**SIZES, query_pre_attn_scalar=8),
}
SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5]]


@pytest.fixture
def ranks(tmp_path):
    made = Ranks(Profile(), ProcessPlace(model_dir=""), rank=0, init_method=f"file://{tmp_path}/rendezvous")
    yield made
    made.close()


def gradients_of(gathered, checked):
    """Of the mean logprob, by name; bytes that autograd kept for the backward pass; flops of all matrix
    products."""
    batch, kept = scoring_microbatch(SEQUENCES, torch.device("cpu")), 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with FlopCounterMode(display=False) as flops:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            scored = gathered(lambda: ForwardPass(checked, 1.0)(batch))
        scored.logprobs_N.mean().backward()
    gradients = {name: parameter.grad.to_local() for name, parameter in checked.named_parameters()}
    return gradients, kept, flops.get_total_flops()


def test_each_rank_logs_the_attention_and_the_packing_that_it_has_chosen(ranks, tmp_path, caplog):
    AutoModelForCausalLM.from_config(CONFIGS["tied"]).save_pretrained(tmp_path / "model")
    caplog.set_level("INFO", logger="asyncrl_cli")
    PolicyModel(Profile(), str(tmp_path / "model"), ranks)
    assert "rank 0: attention sdpa, microbatches padded, shared prefixes computed once" in caplog.messages


@pytest.mark.parametrize("shard_size", ["1KB", "50GB"], ids=["several files", "one file"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_reads_its_rows_as_transformers_loads_the_model(
    name, shard_size, ranks, tmp_path, monkeypatch
):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(
        tmp_path / "model", max_shard_size=shard_size
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    monkeypatch.delattr(sharded_model, "rows_of_whole")
    model, empty = (skeleton(tmp_path / "model", trust_remote_code=False) for _ in range(2))
    sharded_model.sharded(model, model, tmp_path / "model", Profile(), SavedForm(empty), ranks)
    expected = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    ours = dict(model.named_parameters()) | dict(model.named_buffers())
    assert ours.keys() == expected.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(
            getattr(tensor, "_local_tensor", tensor), expected[key], rtol=0, atol=0, msg=key
        )
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == (name != "untied")


def test_a_decoder_with_a_head_of_its_own_keeps_the_heads_values(ranks, tmp_path, monkeypatch):
    AutoModelForCausalLM.from_config(CONFIGS["untied"]).save_pretrained(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    monkeypatch.delattr(sharded_model, "rows_of_whole")
    model, empty = (skeleton(tmp_path / "model", trust_remote_code=False) for _ in range(2))
    own = torch.nn.Linear(16, 1)
    before = own.weight.detach().clone()
    content = torch.nn.ModuleDict({"decoder": model.model, "head": own})
    sharded_model.sharded(model, content, tmp_path / "model", Profile(), SavedForm(empty), ranks)
    assert torch.equal(content["head"].weight.to_local(), before)
    for name, parameter in theirs.model.named_parameters():
        assert torch.equal(model.model.get_parameter(name).to_local(), parameter), name


@pytest.mark.slow
def test_layers_that_are_computed_again_give_the_same_gradients_for_less_memory(ranks, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["tied"]).save_pretrained(tmp_path / "model")
    found, kept, flops = {}, {}, {}
    for recompute in ("none", "selective", "full"):
        model, empty = (skeleton(tmp_path / "model", trust_remote_code=False) for _ in range(2))
        profile = Profile(trainer=TrainerSection(activation_checkpointing=recompute))
        gathered = sharded_model.sharded(model, model, tmp_path / "model", profile, SavedForm(empty), ranks)
        found[recompute], kept[recompute], flops[recompute] = gradients_of(gathered, model)
    for name, gradient in found["none"].items():
        torch.testing.assert_close(found["selective"][name], gradient, msg=name)
        torch.testing.assert_close(found["full"][name], gradient, msg=name)
    assert kept["full"] < kept["none"] / 3
    assert flops["none"] == flops["selective"] < 0.85 * flops["full"]


@pytest.mark.parametrize(
    ("told", "ranks", "device_gib", "kept"),
    [
        (None, 8, 80, True),
        (None, 8, 48, False),
        (None, 1, 80, False),
        (True, 8, 48, True),
        (False, 8, 80, False),
        (True, 1, 80, False),
    ],
)
def test_whole_gradients_are_kept_on_gpus_where_they_take_an_eighth_of_one_at_most(
    told, ranks, device_gib, kept
):
    """1.7 billion parameters have 6.3 GiB of gradients in float32."""
    sizes = {"parameters": 1_700_000_000, "device_bytes": device_gib * 2**30}
    assert keeps_whole_gradients(told, ranks=ranks, **sizes) == kept


def test_gradients_that_are_kept_are_summed_over_ranks_at_the_last_microbatch_alone(
    ranks, tmp_path, monkeypatch
):
    AutoModelForCausalLM.from_config(CONFIGS["tied"]).save_pretrained(tmp_path / "model")
    model, empty = (skeleton(tmp_path / "model", trust_remote_code=False) for _ in range(2))
    gathered = sharded_model.sharded(model, model, tmp_path / "model", Profile(), SavedForm(empty), ranks)
    calls = []
    for name in ("requires_gradient_sync", "reshard_after_forward", "reshard_after_backward"):
        monkeypatch.setattr(
            type(gathered), f"set_{name}", lambda self, value, name=name: calls.append((name, value))
        )
    gathered.keeps_whole = False  # as on a GPU, where parameters are not kept
    for is_last in (False, False, True):
        gathered.before_backward(is_last=is_last)
    assert calls == [("requires_gradient_sync", is_last) for is_last in (False, False, True)]
    gathered.sums_once = False
    gathered.before_backward(is_last=True)
    assert len(calls) == 3
