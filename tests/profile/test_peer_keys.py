"""Other trainers' keys: what is said of each, and that docs/coming-from.md, which has them, is read as it is
and fits our keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.profile.keys import keys, peer_keys
from asyncrl_cli.profile.loaded import load

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
NAMED = {
    # SkyRL's page on fully asynchronous training
    "trainer.policy_mini_batch_size": "trainer.ppo_mini_batch_size",
    "trainer.fully_async.max_staleness_steps": "async_training.staleness_threshold",
    "trainer.fully_async.num_parallel_generation_workers": "rollout.slots",
    "trainer.placement.colocate_all": "placement.colocate",
    "trainer.placement.colocate_policy_ref": "placement.tasks",
    "trainer.placement.policy_num_gpus_per_node": "trainer.n_gpus_per_node",
    "trainer.placement.ref_num_gpus_per_node": "placement.ratios",
    "generator.num_inference_engines": "rollout.workers",
    "generator.inference_engine_tensor_parallel_size": "placement.gpus_per_rollout_worker",
    "trainer.train_batch_size": "trainer.ppo_mini_batch_size",
    "generator.batched": None,
    "generator.async_engine": None,
    "trainer.algorithm.dynamic_sampling.type": "algorithm.filter_groups",
    "generator.n_samples_per_prompt": "rollout.n",
    # verl's page on fully_async; its async_training.*, nnodes and n_gpus_per_node are keys of ours
    "data.train_batch_size": "async_training.trigger_parameter_sync_step",
    "data.gen_batch_size": None,
    "rollout.total_rollout_steps": "run.total_rollout_steps",
    "rollout.test_freq": "eval.every_versions",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "trainer.ppo_mini_batch_size",
    "data.return_raw_chat": None,
    "actor_rollout_ref.rollout.n": "rollout.n",
    "actor_rollout_ref.actor.strategy": None,
    "critic.strategy": None,
    "actor_rollout_ref.hybrid_engine": "placement.colocate",
    "actor_rollout_ref.actor.use_dynamic_bsz": "trainer.max_tokens_per_microbatch",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": "trainer.max_tokens_per_microbatch",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": "trainer.max_tokens_per_microbatch",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.mode": None,
    "actor_rollout_ref.rollout.calculate_log_probs": None,
    # TRL's GRPOConfig
    "num_train_epochs": "run.train_steps",
    "warmup_ratio": "trainer.warmup_steps",
    "vllm_mode": "placement.colocate",
    "report_to": "logging.wandb",
    "output_dir": None,
    # the Async-RL pipeline's page
    "+trainer.sperated_node_tasks": "placement.tasks",
    "+trainer.sperated_node_ratios": "placement.ratios",
    "+actor_rollout_ref.async_pipeline": None,
    "+actor_rollout_ref.rollout.enable_dual_buffer": "weights.dual_buffer",
    "+actor_rollout_ref.rollout.enable_param_async": "weights.mode",
    "+actor_rollout_ref.rollout.param_update_preduce_bucket_size_mb": "weights.gather_bucket_size_mb",
    "+actor_rollout_ref.rollout.param_update_consume_bucket_size_mb": "weights.load_bucket_size_mb",
    "+trainer.generate_ahead_steps": "async_training.staleness_threshold",
}
"""Every key that the three pages name and some of TRL's, and the key here that does its work, read from the
schema's docstrings."""


BOTH_CLIPS = "use algorithm.clip_ratio_low and algorithm.clip_ratio_high (the same value for both)"


def refusal(*sets: str, environ: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        load("base", sets, environ=environ or {})
    return refused.value


@pytest.mark.parametrize("key", NAMED)
def test_a_key_of_the_peers_pages_is_refused_with_ours(key: str) -> None:
    error, ours = refusal(f"{key}=1"), NAMED[key]
    if ours is None:
        assert "has no counterpart" in error.message
        assert "use " not in error.hint
    else:
        assert f"'s name for {ours}" in error.message
        assert f"use {ours}" in error.hint


def test_a_key_is_known_without_its_first_parts_and_not_mistaken_for_ours() -> None:
    full = "fully_async.max_staleness_steps"
    for bare in ("test_freq", "max_staleness_steps", full, "generate_ahead_steps", "train_batch_size"):
        assert any(ours in refusal(f"{bare}=1").message for ours in ("verl's", "SkyRL's"))
    assert refusal("staleness_threshold=1").hint == "did you mean async_training.staleness_threshold?"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("algorithm.clip_ratio", BOTH_CLIPS),
        ("trainer.eps_clip", BOTH_CLIPS),
        ("algorithm.num_iterations", "use trainer.ppo_epochs (the same)"),
        ("trainer.lrr", "did you mean trainer.lr?"),
        ("trainer.policy.optimizer_config.lr", "did you mean trainer.lr?"),
        ("trainer.model.ac", "use trainer.activation_checkpointing"),
        ("rollout.batch_size", "use trainer.ppo_mini_batch_size (groups in both)"),
    ],
)
def test_another_trainers_name_below_a_section_of_ours_is_known_if_it_means_one_thing(
    key: str, hint: str
) -> None:
    assert refusal(f"{key}=1").hint == hint
    assert not refusal("logging.interval=1").hint.startswith("use"), (
        "of checkpoints there, of evals elsewhere"
    )


@pytest.mark.parametrize(
    ("guess", "ours"),
    [
        ("trainer_gpus", "placement.trainer_workers"),
        ("placement.gpus_per_trainer", "placement.trainer_workers"),
        ("trainer.workers", "placement.trainer_workers"),
        ("placement.rollout_gpus", "rollout.workers"),
        ("gpus_per_rollout", "placement.gpus_per_rollout_worker"),
        ("num_gpus", "placement.gpus"),
    ],
)
def test_a_guess_of_how_many_gpus_leads_to_the_key_that_says_it(guess: str, ours: str) -> None:
    error = refusal(f"{guess}=2")
    assert f"unknown key {guess}" in error.message
    assert error.hint.startswith((f"use {ours}", f"did you mean {ours}?"))


def test_all_keys_of_a_table_and_of_several_sets_are_named(tmp_path: Path) -> None:
    theirs = '[actor_rollout_ref.rollout]\nmode = "async"\nname = "vllm"\ntemperature = 1.0\n'
    theirs += "[rollout]\ntest_freq = 5\n"
    (tmp_path / "own.toml").write_text(f'extends = "base"\n{theirs}')
    with pytest.raises(ConfigError, match="4 problems") as refused:
        load(str(tmp_path / "own.toml"), environ={})
    for key in ("mode", "name", "temperature"):
        assert f"unknown key actor_rollout_ref.rollout.{key}" in refused.value.message
    both = refusal("trainer.total_epochs=1", "rollout.test_freq=5").message
    assert "trainer.total_epochs" in both
    assert "rollout.test_freq" in both


def test_a_key_in_the_environment_is_known_too() -> None:
    assert "use eval.every_versions" in refusal(environ={"ASYNCRL_ROLLOUT__TEST_FREQ": "5"}).hint


def test_every_row_leads_to_a_key_of_ours_or_says_why_there_is_none() -> None:
    for row in peer_keys():
        assert set(row.ours) <= keys().keys(), row
        assert row.ours or row.note, row
    named = [(row.peer, row.theirs) for row in peer_keys()]
    assert len(set(named)) == len(named)


def test_every_line_of_the_pages_tables_is_a_row() -> None:
    keys_there = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        name, _, text = section.partition("\n")
        if "| there | here |" in text:
            keys_there[name] = re.findall(r"^\| `([^`]+)` \| .* \|$", text, re.MULTILINE)
            # heading and rule
            assert len(keys_there[name]) == sum(line.startswith("|") for line in text.splitlines()) - 2
    assert list(keys_there) == [
        "verl",
        "SkyRL",
        "AReaL",
        "prime-rl",
        "TRL",
        "NeMo-RL",
        "slime",
        "Other names",
    ]
    for name, theirs in keys_there.items():
        assert [row.theirs for row in peer_keys() if row.peer == name] == theirs


def test_a_row_is_read_as_the_page_has_it() -> None:
    found = {row.theirs: row for row in peer_keys()}
    assert found["data.val_files"].ours == ("eval.sets", "task.eval_path")
    note = "groups are always admitted one by one"
    assert found["data.gen_batch_size"] == ("verl", "data.gen_batch_size", (), note)
    note = "merged at each sync, or sent alone (`lora.sync`)"
    assert found["lora_r"] == ("TRL", "lora_r", ("lora.rank",), note)
    assert found["lora_alpha"] == ("TRL", "lora_alpha", ("lora.alpha",), "")


def test_the_profiles_of_the_page_are_profiles(tmp_path: Path) -> None:
    blocks = [block.partition("```")[0] for block in PAGE.read_text().split("```toml\n")[1:]]
    for block in blocks:
        (tmp_path / "own.toml").write_text(block if "extends" in block else f'extends = "base"\n{block}')
        load(str(tmp_path / "own.toml"), environ={})
    assert len(blocks) == 2


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("transfer_queue.enable", 'use data_plane.backend (true is "transferqueue")'),
        ("transfer_queue.backend.SimpleStorage.num_data_storage_units", "use data_plane.storage_units"),
        ("transfer_queue.controller.sampler", "use data_plane.backend"),
        ("async_rl.transfer_queue.num_storage_units", "use data_plane.storage_units"),
        ("async_rl.transfer_queue.storage_cpus_per_unit", "use data_plane.storage_cpus_per_unit"),
        ("async_rl.transfer_queue.controller_cpus", "use data_plane.storage_cpus_per_unit"),
        ("async_rl.transfer_queue.num_controllers", "there is always one"),
        ("async_rl.transfer_queue.num_global_batch", "use async_training.staleness_threshold"),
        ("async_rl.max_staleness", "use async_training.max_staleness"),
        ("actor_rollout_ref.rollout.enable_async_weight_updates", "use weights.mode"),
        ("trainer.v1.sampler.max_off_policy_threshold", "use async_training.max_staleness"),
        ("trainer.v1.separate_async.parameter_sync_step", "use async_training.trigger_parameter_sync_step"),
        ("orchestrator.group_size", "use rollout.n"),
        ("generator.inference_engine.num_engines", "use rollout.workers"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "no Megatron"),
        ("actor.megatron.pipeline_model_parallel_size", "no Megatron"),
        ("trainer.policy.megatron_config.expert_model_parallel_size", "no Megatron"),
        ("generator.inference_engine.expert_parallel_size", "no expert parallelism"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size", "no pipeline parallelism"),
        ("actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend", "no SGLang"),
        ("sglang.mem_fraction_static", "no SGLang"),
        ("data.image_key", "no vision"),
        ("actor_rollout_ref.rollout.quantization", "no FP8 rollouts"),
    ],
)
def test_what_the_peers_have_now_and_what_there_is_not_has_a_hint(key: str, said: str) -> None:
    assert said in refusal(f"{key}=1").hint


def test_an_engine_that_there_is_not_leads_to_those_that_there_are() -> None:
    assert "vllm" in refusal("rollout.engine=sglang").hint


@pytest.mark.parametrize(
    ("given", "whole"),
    [("[0.5,0.25,0.25]", (2, 1, 1)), ("[0.25,0.25,0.5]", (1, 1, 2)), ("[0.333,0.333,0.333]", (1, 1, 1))],
)
def test_verls_fractions_of_resources_are_read(given: str, whole: tuple[int, ...]) -> None:
    tasks = 'placement.tasks=[["train"],["prox"],["rollout"]]'
    loaded = load(
        "stale-samples", [tasks, "algorithm.old_logprobs=recompute", f"placement.ratios={given}"], environ={}
    )
    assert loaded.profile.placement.ratios == whole


@pytest.mark.parametrize("wrong", ["[0.5,0.0,0.5]", "[0.5,-0.5,1.0]", "[1.5,0.5,1]"])
def test_ratios_that_divide_nothing_are_refused(wrong: str) -> None:
    assert "an integer of at least 1" in refusal(f"placement.ratios={wrong}").message
