"""Models that cannot be opened, and prompts that do not fit, are refused before Ray starts; by a dry run,
too."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.builtin.tiny import tiny_tokenizer
from asyncrl_cli.cli.app import run
from asyncrl_cli.contracts.environment import RewardSpec
from asyncrl_cli.contracts.item import make_item
from asyncrl_cli.job.driver_preparation import check_layers, check_prompts
from asyncrl_cli.job.driver_prompt_checks import (
    check_further_here,
    check_prompt_lengths,
    check_teachers,
    checked_tokenizer,
    tokens,
)
from asyncrl_cli.job.driver_prompts import PromptFeed
from asyncrl_cli.profile.algorithm_section import TeacherSection
from asyncrl_cli.profile.schema import LoraSection, Profile, TrainerSection
from asyncrl_cli.tasks.task import Task


def profile_of(max_prompt_tokens: int, overlong_prompts: str = "error") -> Any:
    return SimpleNamespace(
        rollout=SimpleNamespace(max_prompt_tokens=max_prompt_tokens),
        model=SimpleNamespace(trust_remote_code=False),
        task=SimpleNamespace(source="jsonl:x.jsonl", overlong_prompts=overlong_prompts),
    )


def task_of(train: list[Any], held_out: list[str]) -> Any:
    items = [
        [{"uid": f"{split}-{i}", "prompt": text} for i, text in enumerate(texts)]
        for split, texts in (("t", train), ("e", held_out))
    ]
    return SimpleNamespace(train=items[0], eval=items[1], eval_sets={})


@pytest.fixture
def tokenizer() -> Any:
    return tiny_tokenizer("0123456789=äö")


def test_the_longest_prompt_of_both_splits_is_named_with_its_length(tokenizer):
    task = task_of(["1" * 8, "1" * 9], ["2" * 12])
    with pytest.raises(
        ConfigError, match=r"prompt e-0 has 12 tokens, rollout\.max_prompt_tokens is 8 \(2 prompts"
    ) as caught:
        check_prompt_lengths(profile_of(8), task, partial(tokens, tokenizer))
    assert "--set rollout.max_prompt_tokens=12" in caught.value.hint


def test_overlong_prompts_are_dropped_and_counted_and_the_first_one_is_named(tokenizer):
    def dropped(train: list[str], held_out: list[str], **sets: Any) -> Task:
        given = task_of(train, held_out)
        task = Task(
            name="digits", train=given.train, eval=given.eval, reward=RewardSpec(kind="none"), eval_sets=sets
        )
        return check_prompt_lengths(profile_of(8, "drop"), task, partial(tokens, tokenizer))

    def uids(items: Any) -> list[str]:
        return [item["uid"] for item in items]

    hard = [{"uid": "h-0", "prompt": "3" * 9}, {"uid": "h-1", "prompt": "3"}]
    task = dropped(["1" * 8, "1" * 9, "1", "2" * 30], ["2" * 12, "3"], hard=hard)
    assert (uids(task.train), uids(task.eval), uids(task.eval_sets["hard"])) == (
        ["t-0", "t-2"],
        ["e-1"],
        ["h-1"],
    )
    assert task.num_overlong == 4
    (note,) = task.notes
    assert "left out 4 prompts" in note
    assert note.endswith("first prompt t-1 with 9")
    assert PromptFeed([make_item("1", "1", {})], seed=0, num_overlong=4).figures() == {"prompts/overlong": 4}
    untouched = dropped(["1"], ["2"])
    assert (untouched.num_overlong, untouched.notes, len(untouched.train)) == (0, (), 1)
    for name, task in (("training", (["1" * 9], ["1"])), ("evals", (["1"], ["1" * 9, "2" * 10]))):
        with pytest.raises(ConfigError, match=f"all . prompts for {name} are longer than 8 tokens") as caught:
            dropped(*task)
        assert "--set rollout.max_prompt_tokens=" in caught.value.hint


def test_a_curriculum_is_refused_where_no_prompt_comes_again():
    keys = {"model": {"path": "builtin:untaught"}, "task": {"curriculum": 0.5}, "run": {"train_steps": 2}}
    profile = Profile.model_validate({**keys, "trainer": {"ppo_mini_batch_size": 2}})
    items = [{"uid": str(index), "prompt": "1"} for index in range(4)]
    task = Task(name="digits", train=items, eval=(), reward=RewardSpec(kind="none"))
    with pytest.raises(ConfigError, match="4 groups of 4 prompts, so none comes a second time") as caught:
        check_prompts(profile, task, None)
    assert "(--set task.train_prompts=2)" in caught.value.hint
    check_prompts(profile, replace(task, train=items[:3]), None)


def test_tokens_are_counted_and_not_bytes(tokenizer):
    check_prompt_lengths(profile_of(8), task_of(["ä" * 8, "1" * 8], []), partial(tokens, tokenizer))


def test_layers_that_the_model_lacks_are_refused_before_workers_start(tmp_path):
    kinds = {"plain": (LlamaForCausalLM, LlamaConfig), "joined": (Qwen3MoeForCausalLM, Qwen3MoeConfig)}
    shape = {
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    for name, (model, config) in kinds.items():
        model(config(num_key_value_heads=2, **shape)).save_pretrained(tmp_path / name)
    profile = Profile(lora=LoraSection(rank=2, target_modules=("q_proj", "qkv"), sync="adapter"))
    with pytest.raises(ConfigError, match=r"lora\.target_modules: the model has no linear layer qkv"):
        check_layers(profile, tmp_path / "plain")
    able = Profile(lora=LoraSection(rank=2, target_modules=("q_proj",), sync="adapter"))
    check_layers(able, tmp_path / "plain")
    with pytest.raises(
        ConfigError, match=r'lora\.sync = "adapter": the tensors of .*joined are joined in memory'
    ):
        check_layers(able, tmp_path / "joined")
    replays = Profile(trainer=TrainerSection(router_replay=True))
    check_layers(replays, tmp_path / "joined")
    with pytest.raises(ConfigError, match="a llama model has no experts whose choice could be replayed"):
        check_layers(replays, tmp_path / "plain")


def test_a_teacher_of_another_tokenizer_or_a_prompt_without_one_is_refused(tmp_path):
    policy, same, other = saved(tmp_path / "policy"), saved(tmp_path / "same"), saved(tmp_path / "other")
    tiny_tokenizer("=9876543210").save_pretrained(other)
    metadata = [{"kind": "math"}, {"kind": {"of": "prose"}}]
    train = [{"uid": f"t-{i}", "metadata": one} for i, one in enumerate(metadata)]

    def check(column: str, num_items: int, **teachers: Path) -> None:
        section = TeacherSection(path={name: str(path) for name, path in teachers.items()}, column=column)
        task: Any = SimpleNamespace(train=train[:num_items])
        check_teachers(Profile(teacher=section), task, policy, section.paths)

    check("kind", 1, math=same, code=policy)
    with pytest.raises(PreflightError, match=r"teacher\.path\.code: .*other has another tokenizer") as caught:
        check("kind", 1, math=same, code=other)
    assert "10 of the policy's 14 tokens" in caught.value.message
    assert "the policy's family" in caught.value.hint
    with pytest.raises(ConfigError, match=r'teacher\.column = "kind": prompt t-1 has .*prose') as caught:
        check("kind", 2, math=same, code=policy)
    assert caught.value.hint == "teachers are math, code"
    for path, is_fitting in ((same, True), (other, False)):
        both = Profile(model={"path": str(policy)}, teacher={"path": str(path)})
        for is_elsewhere in (False, True):  # asyncrl plan and train; submit
            with nullcontext() if is_fitting else pytest.raises(PreflightError, match="another tokenizer"):
                check_further_here(both, is_elsewhere=is_elsewhere)


def test_a_plan_finds_a_prompt_that_is_too_long_for_a_pretrained_model(tmp_path, capsys):
    directory, rows = saved(tmp_path / "policy"), tmp_path / "rows.jsonl"
    prompts = [*(f"{n}=" for n in range(100)), "1" * 40]
    lines = (json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts)
    rows.write_text("\n".join(lines), encoding="utf-8")
    sets = (
        f"model.path={directory}",
        f"task.source=jsonl:{rows}",
        "eval.prompts=8",
        "task.rehearsal_items=2",
    )
    limits = ("rollout.max_prompt_tokens=30", "rollout.max_response_tokens=8")
    assert run(["plan", "-p", "base", *(f"--set={one}" for one in (*sets, *limits))]) == 2
    assert "has 40 tokens, rollout.max_prompt_tokens is 30" in capsys.readouterr().err


def test_each_message_of_a_prompt_counts(tokenizer):
    chat = [{"role": "system", "content": "1" * 5}, {"role": "user", "content": "2" * 4}]
    with pytest.raises(ConfigError, match="prompt t-1 has 9 tokens"):
        check_prompt_lengths(profile_of(8), task_of(["1" * 8, chat], []), partial(tokens, tokenizer))


def saved(directory: Path, **changes: Any) -> Path:
    """A model of two tiny layers as save_pretrained writes it, with `changes` in its config.json."""
    tokenizer = tiny_tokenizer("0123456789=")
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def test_a_tokenizer_that_cannot_be_loaded_or_is_of_another_model_is_told(tmp_path):
    model = saved(tmp_path / "model")
    tiny_tokenizer(map(chr, range(0x100, 0x140))).save_pretrained(model)
    with pytest.raises(PreflightError, match=r"the tokenizer in .* has 67 tokens, the model 32"):
        checked_tokenizer(Profile(), model)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(PreflightError, match=r"the tokenizer in .* cannot be loaded"):
        checked_tokenizer(Profile(), model)


def own(model: Path) -> list[str]:
    """Settings for a model and prompts of ours, beside it."""
    lines = [json.dumps({"prompt": f"{number}=", "answer": "1"}) for number in range(10, 80)]
    (model.parent / "prompts.jsonl").write_text("\n".join(lines))
    return [
        f"model.path={model}",
        f"task.source=jsonl:{model.parent / 'prompts.jsonl'}",
        "task.reward=exact-match",
        "eval.prompts=4",
    ]


REFUSED: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "an unknown kind": (
        {"model_type": "zebra"},
        "",
        "config.json cannot be read as a configuration .*zebra",
        3,
    ),
    "a vision model": ({"model_type": "vit"}, "", "type .vit., which is not a causal language model", 3),
    "heads that do not divide": (
        {"num_attention_heads": "two"},
        "",
        "config.json cannot be read as a configuration .*num_attention_heads",
        3,
    ),
    "weights of another size": ({"hidden_size": 32}, "", r"has shape .*by config\.json", 3),
    "too few positions": ({"max_position_embeddings": 64}, "", "= [0-9]+, but the model has 64 positions", 2),
    "GPUs that are not there": ({}, "placement.device=cuda", "ask for 2 GPUs|0 GPUs", 3),
}


@pytest.mark.parametrize(("changes", "key", "message", "code"), REFUSED.values(), ids=REFUSED)
def test_what_a_run_cannot_open_is_refused_by_a_dry_run(changes, key, message, code, tmp_path, capsys):
    sets = [*own(saved(tmp_path / "model", **changes)), *([key] if key else [])]
    options = [word for entry in sets for word in ("--set", entry)]
    assert (
        run(["train", "-p", "partial-rollout", "--dry-run", "--runs-dir", str(tmp_path / "runs"), *options])
        == code
    )
    said = capsys.readouterr()
    assert re.search(f"error: .*{message}", said.err)
    assert "this is a bug" not in said.err
    assert not (tmp_path / "runs").exists()


def test_a_model_that_can_be_opened_is_planned(tmp_path, capsys):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    model = saved(tmp_path / "model", rope_parameters=rope, max_position_embeddings=64)
    options = [word for entry in own(model) for word in ("--set", entry)]
    assert run(["train", "-p", "partial-rollout", "--dry-run", *options]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--address", "x"], 2, "--address x: not HOST:PORT"),
        (["--address", "ray://head:10001"], 2, "must run inside the cluster"),
        pytest.param(["--set", "model.path=/nonexistent/model"], 3, "does not exist", marks=pytest.mark.slow),
        pytest.param(["--set", "model.path=builtin:large"], 2, "there is no", marks=pytest.mark.slow),
        pytest.param(
            ["--set", "rollout.max_response_tokens=4096"],
            2,
            "the model has 2048 positions",
            marks=pytest.mark.slow,
        ),
        (
            ["--set", "task.source=builtin:guess", "--set", "algorithm.overlong_buffer_tokens=8"],
            2,
            "may have several responses",
        ),
        (["--name", "taken"], 4, "a run of that name exists"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(arguments, code, message, tmp_path, capsys):
    (tmp_path / "taken").mkdir()
    command = ["train", "-p", "partial-rollout", "--runs-dir", str(tmp_path), *arguments]
    for dry in (["--dry-run"], []):
        assert run([*command, *dry]) == code
        assert message in capsys.readouterr().err
        assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
