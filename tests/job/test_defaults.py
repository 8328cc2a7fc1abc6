"""Defaults that follow from the job's device and the model's sizes: the dtype, and limits on the time of what
takes long."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.local_store import LocalStore

from asyncrl_cli.base.errors import ConfigError, ExecutorLost
from asyncrl_cli.contracts.ports import LoopSnapshot
from asyncrl_cli.job import driver_run
from asyncrl_cli.job.driver_ranks import RayScorer, RayTrainer
from asyncrl_cli.job.driver_rollout import RayRolloutWorker
from asyncrl_cli.job.driver_run import Run
from asyncrl_cli.models.shape import ModelShape, parameters_of, shape_of_config
from asyncrl_cli.plan import processor
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import for_device, for_job
from asyncrl_cli.profile.keys import values_of
from asyncrl_cli.profile.loaded import Loaded, load
from asyncrl_cli.profile.resolved import changed, from_document, to_document, to_toml
from asyncrl_cli.profile.schema import CheckpointSection

from .crew import nodes, small_profile

LIMITS = ("placement.start_timeout_s", "trainer.step_timeout_s", "checkpoint.timeout_s")
# Qwen2.5-32B: 32,763,876,352 parameters by its model card's sizes
SIZES_32B = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "vocab_size": 152064}
HEADS = {"num_attention_heads": 40, "num_key_value_heads": 8}
LONG = (
    "rollout.max_prompt_tokens=1024",
    "rollout.max_response_tokens=8192",
    "trainer.ppo_mini_batch_size=256",
    "rollout.n=8",
)


def qwen_32b() -> ModelShape:
    return shape_of_config({"model_type": "qwen2", **HEADS, **SIZES_32B})


def limits_of(loaded: Loaded) -> list[float]:
    profile = loaded.profile
    return [profile.placement.start_timeout_s, profile.trainer.step_timeout_s, profile.checkpoint.timeout_s]


def on_gpus(loaded: Loaded, gpus: int) -> Loaded:
    loaded = for_device(loaded, "cuda")
    teachers = parameters_of(loaded.profile.teacher.paths.values(), qwen_32b())
    return for_job(loaded, compile_job(loaded.profile, nodes((64, gpus))), qwen_32b(), teachers=teachers)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_the_dtype_is_the_devices_unless_it_is_given(device, dtype):
    resolved = for_device(load("base"), device)
    assert (resolved.profile.model.dtype, resolved.origins["model.dtype"]) == (dtype, f"default for {device}")
    for given in ("float32", "bfloat16"):
        assert for_device(load("base", [f"model.dtype={given}"]), device).profile.model.dtype == given


def test_a_default_stays_out_of_a_profile_file_and_in_the_runs_document():
    resolved = for_device(load("base"), "cuda")
    assert "dtype" not in to_toml(resolved.profile, resolved.origins)
    document = to_document(resolved.profile, resolved.origins)
    assert (document["profile"]["model"]["dtype"], document["origins"]["model.dtype"]) == (
        "bfloat16",
        "default for cuda",
    )


def test_keys_that_exclude_the_devices_dtype_are_refused_as_if_it_was_given():
    apart = [
        'placement.tasks=[["train"],["prox"],["rollout"]]',
        "algorithm.old_logprobs=recompute",
        "lora.rank=8",
    ]
    with pytest.raises(ConfigError, match=r"model.dtype = \"bfloat16\""):
        for_device(load("base", apart), "cuda")
    assert for_device(load("base", apart), "cpu").profile.model.dtype == "float32"


def test_nothing_of_a_run_sees_an_unresolved_dtype(tmp_path, monkeypatch):
    seen: list[str] = []

    async def prepare(profile: Any, *args: Any) -> None:
        seen.append(profile.model.dtype)
        raise ConfigError("enough")

    monkeypatch.setattr(driver_run, "prepare", prepare)
    monkeypatch.setattr(driver_run, "local_cluster", lambda: nodes((8, 2)))
    loaded = load("base")
    run = Run(loaded.profile, loaded.origins, runs_dir=tmp_path, name="otter", ui="none")
    with pytest.raises(ConfigError, match="enough"):
        asyncio.run(run.run())
    assert seen == ["bfloat16"]
    assert run.origins["model.dtype"] == "default for cuda"


def test_a_resumed_run_keeps_its_dtype_on_another_device(tmp_path, monkeypatch):
    loaded = load("base")  # as an earlier release wrote it, or a run on CPUs
    run = Run(loaded.profile, loaded.origins, runs_dir=tmp_path, ui="none", checkpoint=SimpleNamespace())  # type: ignore[arg-type]
    run.resolve_for("cuda")
    assert run.profile.model.dtype == "float32"


def test_a_resumed_run_keeps_its_learning_rate_and_sizes_and_derives_time_limits_anew(tmp_path):
    # as an earlier release wrote it, whose defaults did not follow from the model
    before = load("base", ["model.path=some/model", "trainer.lr=2e-4"])
    document = to_document(before.profile, {**before.origins, "trainer.lr": "default"})
    loaded = from_document(document)
    run = Run(loaded.profile, loaded.origins, runs_dir=tmp_path, ui="none", checkpoint=SimpleNamespace())  # type: ignore[arg-type]
    run.resolve_for("cpu")
    plan = compile_job(run.profile, nodes((4, 0)))
    assert run.resolve_for_model(plan, qwen_32b()) == ()
    values = values_of(before.profile)
    assert {key for key, value in values_of(run.profile).items() if value != values[key]} == set(LIMITS)
    fresh = Run(loaded.profile, loaded.origins, runs_dir=tmp_path, ui="none")
    fresh.resolve_for_model(plan, qwen_32b())
    assert fresh.profile.trainer.lr == 1e-6


def test_limits_count_the_teachers_by_their_own_sizes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **HEADS, **SIZES_32B}))
    plain = limits_of(on_gpus(load("base", LONG), 8))
    teaching = [*LONG, f"teacher.path={tmp_path}"]
    taught = limits_of(on_gpus(load("base", teaching), 8))
    # another 131 GB of files at 100 MB/s; a forward pass of 2 FLOPs per value of 256 * 8 * 9,216 tokens, by
    # the 4 ranks of the trainer
    assert taught[0] - plain[0] == pytest.approx(1310, abs=10)
    forward_s = 2 * 256 * 8 * 9216 * 32_763_876_352 / (4 * 40e12)
    assert taught[1] - plain[1] == pytest.approx(forward_s, abs=10)
    assert taught[2] == plain[2]  # checkpoints do not contain teachers


def test_limits_of_a_large_model_follow_from_its_bytes_and_tokens():
    start_s, step_s, checkpoint_s = limits_of(on_gpus(load("base", LONG), 8))
    # 32.76e9 parameters: 131 GB of files in float32, and 393 GB of weights and moments, at 100 MB/s
    assert (start_s, checkpoint_s) == (600 + 1310, 300 + 3930)
    # 256 * 8 trajectories of 9,216 tokens: 12 operations for each parameter and half of all pairs in 64
    # layers, by 4 ranks
    operations = 12 * 256 * 8 * 9216 * (32.76e9 + 64 * 5120 * 9216)
    assert step_s == pytest.approx(600 + operations / (4 * 40e12), abs=20)


def test_a_small_models_limits_are_as_they_were():
    tiny = shape_of_config({"model_type": "qwen2", "num_attention_heads": 4, **dict.fromkeys(SIZES_32B, 16)})
    loaded = for_job(load("base"), compile_job(load("base").profile, nodes((4, 0))), tiny)
    assert limits_of(loaded) == pytest.approx([600, 600, 300], abs=10)


def test_given_limits_stay_and_a_resume_with_other_ranks_derives_the_others_anew():
    first = on_gpus(load("base", [*LONG, "checkpoint.timeout_s=20"]), 8)
    assert limits_of(first)[2] == 20
    again = on_gpus(
        changed(from_document(to_document(first.profile, first.origins)), ["trainer.step_timeout_s=99"]), 16
    )
    assert limits_of(again) == [limits_of(first)[0], 99, 20]
    resumed = on_gpus(from_document(to_document(first.profile, first.origins)), 16)
    assert limits_of(resumed)[1] - 600 == pytest.approx((limits_of(first)[1] - 600) / 2, abs=20)


def of_model(parameters: int, *sets: str, device: str = "cpu") -> Loaded:
    """A profile that names a pretrained model, with its defaults: a model of about `parameters`."""
    sizes = {"num_attention_heads": 4, "hidden_size": 4, "intermediate_size": 1, "num_hidden_layers": 1}
    shape = shape_of_config({"model_type": "llama", **sizes, "vocab_size": parameters // 8})
    loaded = for_device(load("partial-rollout", ["model.path=some/model", *sets]), device)
    return for_job(loaded, compile_job(loaded.profile, nodes((16, 8 if device == "cuda" else 0))), shape)


def test_a_profile_that_only_names_a_pretrained_model_gets_its_learning_rate_and_sizes():
    tiny = load("partial-rollout").profile
    assert (tiny.trainer.lr, tiny.trainer.ppo_mini_batch_size, tiny.eval.prompts) == (5e-4, 16, 512)
    of_size = {10**6: 5e-4, 135 * 10**6: 2e-5, 5 * 10**8: 5e-6, 15 * 10**8: 2e-6, 7 * 10**9: 1e-6}
    assert {size: of_model(size).profile.trainer.lr for size in of_size} == of_size
    assert of_model(135 * 10**6, "lora.rank=8").profile.trainer.lr == 2e-4
    resolved = of_model(135 * 10**6)
    profile = resolved.profile
    sizes = (
        profile.trainer.ppo_mini_batch_size,
        profile.trainer.max_tokens_per_microbatch,
        profile.eval.prompts,
    )
    assert sizes == (4, 2048, 64)
    assert resolved.origins["trainer.lr"].endswith(" parameters, without LoRA")
    assert resolved.origins["eval.prompts"] == "default for a pretrained model on CPUs"
    assert of_model(10**9, device="cuda").profile.trainer.ppo_mini_batch_size == 16
    given = of_model(10**9, "trainer.lr=3e-6", "trainer.ppo_mini_batch_size=7").profile.trainer
    assert (given.lr, given.ppo_mini_batch_size) == (3e-6, 7)
    # of a model on the hub nothing is known before it is there
    unknown = for_device(load("base", ["model.path=some/model"]), "cpu")
    assert (unknown.profile.trainer.lr, unknown.origins["trainer.lr"]) == (
        1e-6,
        "default for a pretrained model of unknown size",
    )
    adapters = for_device(load("base", ["model.path=some/model", "lora.rank=8"]), "cpu")
    assert adapters.profile.trainer.lr == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("features", "dtype"), [(("avx2", "amx_bf16"), "bfloat16"), (("avx512_bf16",), "float32")]
)
def test_a_pretrained_model_on_cpus_with_matrix_units_is_bfloat16(features, dtype, monkeypatch):
    monkeypatch.setattr(processor, "matrix_features", lambda: features)
    assert of_model(10**8).profile.model.dtype == dtype
    assert of_model(10**8, "model.dtype=float32").profile.model.dtype == "float32"
    assert for_device(load("base"), "cpu").profile.model.dtype == "float32"


def test_a_learning_rate_out_of_proportion_to_the_model_causes_a_warning():
    assert of_model(135 * 10**6, "trainer.lr=2e-4").warnings == ()
    (warning,) = of_model(135 * 10**6, "trainer.lr=5e-4").warnings
    assert warning.startswith("trainer.lr = 0.0005 can ruin a pretrained model of 135,000,0")
    assert warning.endswith("without the key it would be 2e-05")
    assert of_model(135 * 10**6, "trainer.lr=5e-4", "lora.rank=8").warnings == ()


class Hanging:
    """An actor that never answers."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(
            remote=lambda *args: asyncio.sleep(60), options=lambda **_: getattr(self, method)
        )


SNAPSHOT = LoopSnapshot(step=1, version=0, at_window_boundary=True, loop_state={})
BATCH: Any = SimpleNamespace(step=3, step_in_window=0, window=0, groups=(), columns={})


@pytest.mark.parametrize(
    ("key", "call"),
    [
        ("placement.start_timeout_s", lambda trainer, worker, critic: trainer.prepare()),
        ("placement.start_timeout_s", lambda trainer, worker, critic: worker.start()),
        ("trainer.step_timeout_s", lambda trainer, worker, critic: trainer.train(BATCH)),
        ("trainer.step_timeout_s", lambda trainer, worker, critic: critic.learn(BATCH)),
        ("checkpoint.timeout_s", lambda trainer, worker, critic: trainer.snapshot(1)),
        ("checkpoint.timeout_s", lambda trainer, worker, critic: trainer.write(Path("nowhere"), SNAPSHOT)),
        ("checkpoint.timeout_s", lambda trainer, worker, critic: trainer.restore(Path("nowhere"))),
    ],
)
def test_a_call_that_hangs_names_the_key_of_its_own_limit(key, call, tmp_path):
    shares: Any = lambda batch, names, profile: ([], [], [[]])  # noqa: E731
    profile = small_profile(placement={"start_timeout_s": 0.05}, trainer={"step_timeout_s": 0.05})
    profile = profile.model_copy(update={"checkpoint": CheckpointSection(timeout_s=0.05)})

    async def main() -> None:
        trainer = RayTrainer(lambda: [Hanging()], profile, LocalStore(), samples_dir=tmp_path)
        worker, critic = (
            RayRolloutWorker("rollout-0", Hanging, profile, LocalStore()),
            RayScorer("critic", lambda: [Hanging()], profile, LocalStore()),
        )
        trainer.shares = critic.shares = shares  # type: ignore[method-assign]
        trainer.chosen_samples = lambda *args: ([], None)  # type: ignore[method-assign, assignment, return-value]
        await call(trainer, worker, critic)

    with pytest.raises(ExecutorLost, match=f"took longer than {key} = 0.05 s") as lost:
        asyncio.run(main())
    assert lost.value.hint.endswith(f"--set {key}=...")
