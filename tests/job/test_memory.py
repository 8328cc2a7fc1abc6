"""The memory estimate against the bytes of real tensors: of a trainer rank, of autograd, of published
buckets, of a KV cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PretrainedConfig, Qwen3Config

from asyncrl_cli.models.shape import shape_of, shape_of_config
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan
from asyncrl_cli.plan.memory import (
    MemoryEstimate,
    activation_bytes_per_token,
    adapter_parameters,
    estimate_memory,
    kv_cache_bytes,
    peak,
)
from asyncrl_cli.plan.memory_fit import cache_warnings, device_needs, shortage, transfer_warnings
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from tests.marks import one_in
from tests.trainers import TrainerParts

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3 untied": Qwen3Config(**SMALL),
    "qwen3 tied": Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL),
}
GIB = 2**30


def planned(model: str, *sets: str, gpus: int = 0) -> tuple[Profile, JobPlan, MemoryEstimate]:
    profile = load("base", ["run.train_steps=4", f'model.path="{model}"', *sets]).profile
    plan = compile_job(
        profile, ClusterResources(nodes=(NodeResources(name="one", cpus=64, gpus=gpus),), elastic_cpus=True)
    )
    return profile, plan, estimate_memory(profile, plan, shape_of(model))


def sizes(estimate: MemoryEstimate, role: str) -> dict[str, int]:
    return {item.what: item.num_bytes for item in estimate.items if item.role == role}


def num_bytes(tensors: object) -> int:
    return sum(tensor.nbytes for tensor in tensors)  # type: ignore[attr-defined]


@pytest.mark.parametrize("config", one_in(3, CONFIGS.values()), ids=CONFIGS)
def test_a_trainers_bytes_are_those_of_its_tensors(config, tmp_path):

    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    profile, _, estimate = planned(
        str(tmp_path), "model.dtype=bfloat16", "async_training.trigger_parameter_sync_step=2"
    )
    trainer = TrainerParts(profile, ProcessPlace(model_dir=str(tmp_path)), 4).made(f"file://{tmp_path}/meet")
    try:
        weights, moments = trainer.model.locals(), trainer.optimizer.moments()
        trainer.gather(0)
        published = trainer.published(0)[0].num_bytes
        trainer.snapshot(0)
        snapshot = num_bytes(
            rows.tensor for name, rows in trainer.snapshots[0][0].items() if not name.startswith("rng/")
        )
    finally:
        trainer.close()
    estimated = sizes(estimate, TRAINER)
    assert estimated["parameters"] == estimated["gradients"] == num_bytes(weights.values())
    assert estimated["optimizer"] == num_bytes(moments.values())
    assert estimated["checkpoint"] == snapshot
    # Buckets begin tensors at multiples of 64 bytes.
    assert estimated["published weights"] == pytest.approx(2 * published, rel=0.01)


@pytest.mark.parametrize("config", one_in(3, CONFIGS.values()), ids=CONFIGS)
def test_the_bytes_of_a_reference_and_a_critic_are_those_of_their_tensors(config, tmp_path):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    teachers = {"math": str(tmp_path), "code": str(tmp_path)}
    profile, _, estimate = planned(
        str(tmp_path),
        'algorithm.adv_estimator="gae"',
        "algorithm.use_kl_in_reward=true",
        f"teacher.path={{math='{tmp_path}',code='{tmp_path}'}}",
        "teacher.column=kind",
    )
    place = ProcessPlace(model_dir=str(tmp_path), teacher_dirs=teachers)
    trainer = TrainerParts(profile, place, 4).made(f"file://{tmp_path}/meet")
    try:
        teachers_bytes = num_bytes(trainer.teachers.models["code"].locals().values())
        reference, critic = trainer.reference.locals(), trainer.critic.locals()
        moments = trainer.critic.optimizer.moments()
    finally:
        trainer.close()
    estimated = sizes(estimate, TRAINER)
    assert estimated["reference"] == num_bytes(reference.values())
    assert estimated["teacher math"] == estimated["teacher code"] == teachers_bytes
    head = num_bytes(tensor for name, tensor in critic.items() if name.startswith("head."))
    assert estimated["critic"] == num_bytes(critic.values()) - head
    assert estimated["critic's optimizer"] == num_bytes(moments.values()) - 2 * head
    assert "reference" not in sizes(planned(str(tmp_path))[2], TRAINER)


def test_the_windows_first_weights_are_kept_only_where_they_are_needed():
    recompute = 'algorithm.old_logprobs="recompute"'
    assert "window's first weights" not in sizes(planned("builtin:tiny", recompute)[2], TRAINER)
    kept = sizes(
        planned("builtin:tiny", recompute, "async_training.trigger_parameter_sync_step=2")[2], TRAINER
    )
    assert kept["window's first weights"] == kept["parameters"]
    assert kept["checkpoint"] == 4 * kept["parameters"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", one_in(3, CONFIGS.values()), ids=CONFIGS)
def test_activations_are_what_autograd_saves(config, dtype):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(input_ids=torch.randint(0, 320, (4, 128)), use_cache=False).last_hidden_state
    assert hidden.requires_grad
    real = sum(storage.nbytes() for storage in saved.values())
    estimated = (
        4
        * 128
        * config.num_hidden_layers
        * activation_bytes_per_token(shape_of_config(config.to_dict()), dtype.itemsize)
    )
    # What is missing lies outside the layers: the last norm.
    assert 0.9 * real < estimated <= real


@pytest.mark.parametrize("config", one_in(3, CONFIGS.values()), ids=CONFIGS)
def test_the_kv_cache_is_that_of_the_slots_at_full_length(config, tmp_path):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lengths = ("rollout.slots=8", "rollout.max_prompt_tokens=32", "rollout.max_response_tokens=64")
    profile, _, estimate = planned(str(tmp_path), *lengths)
    model = AutoModelForCausalLM.from_config(config)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.zeros(8, 96, dtype=torch.long), past_key_values=cache, use_cache=True)
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kv_cache_bytes(profile, estimate.shape) == sizes(estimate, ROLLOUT)["KV cache"] == real
    assert sizes(estimate, ROLLOUT)["weights"] == num_bytes(model.parameters())


@pytest.mark.parametrize(
    ("sets", "buffers"),
    [
        (("rollout.workers=1",), 1),
        (("rollout.workers=3",), 2),  # one drains for a version while the others get the next
        (("rollout.workers=3", "weights.encoding=delta"), 1),  # the other one is the deltas' base
        (("rollout.workers=3", "weights.mode=sync"), 1),
    ],
)
def test_the_workers_of_a_node_hold_two_versions_that_wait_to_be_loaded_unless_they_load_together(
    sets, buffers
):
    items = planned("builtin:tiny", *sets)[2].items
    assert [item.processes for item in items if item.what == "load buffer"] == [buffers]


def test_without_a_second_buffer_a_load_holds_nothing_beside_the_model():
    weights = sizes(planned("builtin:tiny")[2], ROLLOUT)["weights"]
    assert 2**20 < weights < 2**27
    assert sizes(planned("builtin:tiny")[2], ROLLOUT)["load buffer"] == weights
    assert "load buffer" not in sizes(planned("builtin:tiny", "weights.dual_buffer=false")[2], ROLLOUT)


@pytest.mark.parametrize(
    ("sets", "sends_deltas"),
    [
        (("weights.encoding=delta",), True),
        (("weights.encoding=auto", "model.dtype=bfloat16"), True),
        (("weights.encoding=auto",), False),
        (("weights.encoding=auto", "model.dtype=bfloat16", "weights.transport=disk"), False),
    ],
)
def test_deltas_take_a_version_on_each_worker_and_one_more_at_rank_0(sets, sends_deltas):
    plain, encoded = (planned("builtin:tiny", *some)[2] for some in (sets[1:], sets))
    weights, before = sizes(encoded, ROLLOUT)["weights"], sizes(plain, TRAINER)["published weights"]
    assert sizes(encoded, ROLLOUT).get("base of deltas") == (weights if sends_deltas else None)
    assert sizes(encoded, TRAINER)["published weights"] * 2 == before * (3 if sends_deltas else 2)


@pytest.mark.parametrize(
    ("sets", "holders"),
    [
        ((), 4),
        (("lora.rank=4", "lora.sync=adapter"), 4),
        (("lora.rank=4",), 1),  # what is merged is gathered
        (("weights.keep_versions=1",), 1),
        (("weights.transport=disk",), 1),
    ],
)
def test_each_rank_holds_its_rows_of_the_published_versions_or_rank_0_all_of_them(sets, holders):
    whole = sizes(planned("builtin:tiny", *sets)[2], TRAINER)["published weights"]
    items = planned("builtin:tiny", "placement.trainer_workers=4", *sets)[2].items
    (found,) = [item for item in items if item.what == "published weights"]
    assert (found.processes, found.num_bytes) == (holders, whole // holders)


def test_the_base_of_an_adapters_deltas_is_as_large_as_the_adapters():
    profile, _, estimate = planned(
        "builtin:tiny", "lora.rank=4", "lora.sync=adapter", "weights.encoding=delta"
    )
    adapters = 4 * adapter_parameters(profile, estimate.shape)
    assert 0 < adapters == sizes(estimate, ROLLOUT)["base of deltas"]


def test_where_vllm_applies_adapters_they_alone_wait_to_be_loaded():
    sets = ("builtin:tiny", "rollout.engine=vllm", "lora.rank=8", "model.dtype=bfloat16")
    merged, alone, joined = (
        planned(*sets, *more)[2]
        for more in (
            (),
            ("lora.sync=adapter",),
            ("lora.sync=adapter", "rollout.engine_args={enable_lora=false}"),
        )
    )
    values = adapter_parameters(alone.profile, alone.shape)
    assert sizes(merged, ROLLOUT) == sizes(joined, ROLLOUT)
    without = {what: size for what, size in sizes(alone, ROLLOUT).items() if what != "adapters"}
    assert without == {**sizes(merged, ROLLOUT), "load buffer": 4 * values}
    assert sizes(alone, ROLLOUT)["adapters"] == 2 * values
    assert [sizes(one, TRAINER)["published weights"] for one in (alone, joined)] == 2 * [2 * 4 * values]


def test_vllm_holds_what_it_loads_once_as_the_other_engine_does():
    one, other = (
        planned("builtin:tiny", f"rollout.engine={engine}")[2] for engine in ("vllm", "transformers")
    )
    processes = sizes(one, ROLLOUT)["vLLM"]
    assert peak(one.of(ROLLOUT, "host"))[0] - processes == peak(other.of(ROLLOUT, "host"))[0]


def test_ranks_share_what_fsdp_shards_and_nothing_else():
    sets = ("rollout.workers=1", "trainer.ppo_mini_batch_size=32")
    alone, shared = (
        sizes(planned("builtin:tiny", f"placement.trainer_workers={ranks}", *sets, gpus=9)[2], TRAINER)
        for ranks in (1, 8)
    )
    for what in ("parameters", "optimizer", "gradients", "checkpoint", "published weights"):
        assert shared[what] == pytest.approx(alone[what] / 8, rel=1e-4)
    for what in ("activations", "logits", "gathered", "whole gradients"):
        assert shared[what] == alone[what]


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_cpus_every_rank_holds_whole_parameters_and_gradients(ranks, tmp_path):
    """No memory is saved there by gathering layer by layer: see train/policy_model.py."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    model.save_pretrained(tmp_path)
    _, plan, estimate = planned(str(tmp_path), f"placement.trainer_workers={ranks}", "rollout.workers=1")
    found = {item.what: item for item in estimate.of(TRAINER, "device")}
    assert plan.device == "cpu"
    assert (
        found["gathered"].num_bytes
        == found["whole gradients"].num_bytes
        == num_bytes(model.float().parameters())
    )
    assert {item.processes for item in found.values()} == {ranks}


def test_a_trajectory_longer_than_the_budget_counts_whole():
    budget = sizes(planned("builtin:tiny", "trainer.max_tokens_per_microbatch=1024")[2], TRAINER)
    long = (
        "trainer.max_tokens_per_microbatch=1024",
        "rollout.max_prompt_tokens=49",
        "rollout.max_response_tokens=2000",
    )
    assert sizes(planned("builtin:tiny", *long)[2], TRAINER)["activations"] == 2 * budget["activations"]


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 640), (2, 320), (3, 320)])
def test_a_microbatch_has_no_more_tokens_than_its_ranks_part_of_an_optimizer_step(ranks, tokens):
    """2 groups of 2 trajectories, of at most 160 tokens to be predicted: 8,192 tokens, the default, never
    come together."""
    step = (
        "trainer.ppo_mini_batch_size=2",
        "rollout.n=2",
        "rollout.max_prompt_tokens=61",
        "rollout.max_response_tokens=100",
    )
    _, _, estimate = planned("builtin:tiny", *step, f"placement.trainer_workers={ranks}")
    (how,) = (item.how for item in estimate.items if item.what == "activations")
    assert how.startswith(f"{tokens} tokens of a microbatch")


def test_a_head_that_is_not_trained_has_no_gradient():
    trained, frozen = (sizes(planned("builtin:tiny", f"lora.rank={rank}")[2], TRAINER) for rank in (0, 8))
    shape = shape_of("builtin:tiny")
    assert trained["logits"] - frozen["logits"] == 4 * shape.vocab_size * shape.hidden_size


def test_ranks_that_divide_a_long_trajectory_hold_their_share_of_it():
    long = "rollout.max_prompt_tokens=49 rollout.max_response_tokens=4048 placement.trainer_workers=4"
    sets = ("trainer.max_tokens_per_microbatch=1024", *long.split())
    alone, shared = (
        sizes(planned("builtin:tiny", *sets, f"trainer.sequence_parallel_size={size}")[2], TRAINER)
        for size in (1, 2)
    )
    assert alone["activations"] == 2 * shared["activations"]
    assert alone["optimizer"] == shared["optimizer"]


def test_offloaded_moments_are_on_the_host_but_for_the_optimizers_step():
    kept, offloaded = (
        planned("builtin:tiny", f"trainer.offload_optimizer={is_offloaded}", gpus=2)[2]
        for is_offloaded in ("false", "true")
    )
    moments = sizes(kept, TRAINER)["optimizer"]
    assert kept.always_bytes(TRAINER) - offloaded.always_bytes(TRAINER) == moments
    assert peak(offloaded.of(TRAINER, "host"))[0] - peak(kept.of(TRAINER, "host"))[0] == moments
    updates = [item.num_bytes for item in offloaded.of(TRAINER, "device") if item.phase == "update"]
    assert updates == [moments * 3 // 2]


@pytest.mark.parametrize(
    ("kind", "sizes", "heads", "limit_gib"),
    [("qwen2", (3584, 18944, 28), (28, 4), 70), ("qwen3", (5120, 25600, 64), (64, 8), 80)],
    ids=["Qwen2.5-7B", "Qwen3-32B"],
)
def test_large_models_with_responses_of_28k_tokens_fit_where_layers_are_computed_again(
    kind, sizes, heads, limit_gib
):
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    config = dict(zip(names, (*sizes, *heads), strict=True))
    shape = shape_of_config({"model_type": kind, "vocab_size": 152064, **config})
    peaks = {}
    for recompute in ("none", "full"):
        sets = f"placement.gpus=128 model.dtype=bfloat16 trainer.activation_checkpointing={recompute}"
        lengths = "rollout.max_prompt_tokens=2048 rollout.max_response_tokens=28672"
        profile, plan, _ = planned("builtin:tiny", *sets.split(), *lengths.split(), gpus=128)
        assert plan.role(TRAINER).workers == 64
        peaks[recompute] = peak(estimate_memory(profile, plan, shape).of(TRAINER, "device"))[0] / GIB
    assert peaks["full"] < limit_gib < peaks["none"]


def test_a_peak_is_what_always_stays_and_the_most_expensive_phase():
    estimate = planned("builtin:tiny")[2]
    items = {item.what: item for item in estimate.of(ROLLOUT, "device")}
    made = replace(
        estimate,
        items=(
            replace(items["weights"], phase="always", num_bytes=10),
            replace(items["prefill"], phase="step", num_bytes=3),
            replace(items["sampling"], phase="step", num_bytes=4),
            replace(items["KV cache"], phase="start", num_bytes=5),
        ),
    )
    assert peak(made.of(ROLLOUT, "device"))[0] == 17


def test_gpus_that_are_too_small_are_named():
    long = ("trainer.max_tokens_per_microbatch=4194304", "rollout.max_response_tokens=40000")
    estimate = replace(planned("builtin:tiny", *long, "rollout.slots=8", gpus=2)[2], available_bytes=80 * GIB)
    needs = device_needs(estimate)
    assert [(need.roles, need.fits) for need in needs] == [((TRAINER,), False), ((ROLLOUT,), True)]
    refusal = shortage(device_needs(estimate))
    assert refusal is not None
    assert "trainer needs about" in refusal.message
    assert shortage(device_needs(replace(estimate, available_bytes=None))) is None


def test_a_cache_that_the_engine_would_cut_is_warned_of():
    profile, plan, estimate = planned("builtin:tiny", "rollout.slots=64", gpus=2)
    cache, weights = sizes(estimate, ROLLOUT)["KV cache"], sizes(estimate, ROLLOUT)["weights"]
    available = weights + int(cache * 1.5)
    warnings = cache_warnings(estimate_memory(profile, plan, shape_of("builtin:tiny"), available))
    assert any("rollout.slots = 48 fits" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("sets", "warned"),
    [
        ((), "weights.timeout_s=880"),
        (("weights.transport=disk",), "weights.timeout_s=880"),
        (("weights.timeout_s=450",), None),
    ],
)
def test_a_version_that_a_node_cannot_have_in_time_is_warned_of(sets, warned):
    estimate = planned("builtin:tiny", "model.dtype=bfloat16", *sets)[2]
    warnings = transfer_warnings(replace(estimate, shape=replace(estimate.shape, parameters=220 * 10**9)))
    assert [warned in one for one in warnings] == ([True] if warned else []), warnings
    assert not transfer_warnings(estimate)


def test_colocated_sides_share_a_gpu():
    estimate = planned("builtin:tiny", "placement.colocate=true", gpus=2)[2]
    (need,) = device_needs(estimate)
    assert need.roles == (TRAINER, ROLLOUT)
    assert need.num_bytes == peak(estimate.of(TRAINER, "device"))[0] + peak(estimate.of(ROLLOUT, "device"))[0]
    assert need.fits is None


def test_a_lent_worker_shares_the_ranks_gpu_with_one_of_its_own():
    estimate = planned("builtin:tiny", "placement.lend=true", gpus=2)[2]
    shared, own = device_needs(estimate)
    (plain,) = [need for need in device_needs(planned("builtin:tiny", gpus=2)[2]) if ROLLOUT in need.roles]
    assert (shared.roles, own.roles) == ((TRAINER, "lent"), (ROLLOUT,))
    assert own.num_bytes == plain.num_bytes
    assert shared.num_bytes == peak(estimate.of(TRAINER, "device"))[0] + plain.num_bytes


def test_a_lent_worker_that_sleeps_holds_merged_weights_and_no_adapters():
    sets = ("placement.lend=true", "rollout.engine=vllm", "lora.rank=4", "lora.sync=adapter")
    estimate = planned("builtin:tiny", *sets, gpus=2)[2]
    assert "adapters" in sizes(estimate, ROLLOUT)
    assert "adapters" not in sizes(estimate, "lent")


def test_a_tensor_parallel_worker_shares_weights_and_cache():
    one = sizes(planned("builtin:tiny", gpus=2)[2], ROLLOUT)
    two = sizes(
        planned("builtin:tiny", "placement.gpus_per_rollout_worker=2", 'placement.ratio="1:1"', gpus=4)[2],
        ROLLOUT,
    )
    assert (two["weights"], two["KV cache"]) == (one["weights"] // 2, one["KV cache"] // 2)


def test_on_cpus_snapshot_versions_and_store_lie_beside_a_train_step():
    _, _, estimate = planned("builtin:tiny")
    (need,) = device_needs(estimate)
    beside = {"activations", "logits", "checkpoint", "published weights", "object store"}
    assert beside <= {item.what for item in need.items}
