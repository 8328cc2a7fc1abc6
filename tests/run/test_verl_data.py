"""A Parquet file as verl's DAPO has it, trained as it is: messages, an answer in a field, math-verify. The
run is on-policy, its weights travel to two workers over the disk, and its last checkpoint is exported."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl_cli.builtin.tiny import tiny_tokenizer
from asyncrl_cli.cli.app import run as asyncrl
from tests.run.commands import LIMIT_S, SMALL, finish, lines, start

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for message in messages %}{{ '<' if message.role == 'system' else '>' }}{{ message.content "
    "}}{% endfor %}="
)


def row(index: int) -> dict[str, Any]:
    first, second = index % 5, index // 5
    system = [{"role": "system", "content": "9"}] if index % 2 else []
    return {
        "data_source": ("math_dapo", "gsm8k")[index % 2],
        "prompt": [*system, {"role": "user", "content": f"{first}+{second}"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(first + second), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"row-{index}"},
    }


def save_model(directory: Path) -> None:
    """One layer with random weights, and a tokenizer that marks a system message by < and a user's by >."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer("0123456789+=<>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    eos = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=1024, eos_token_id=eos, bos_token_id=None, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def trained(directory: Path) -> tuple[set[str], int]:
    """A whole run `verl`. Returns the names of all versions that were on the disk, and how many were there at
    a time."""
    save_model(directory / "model")
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row(index) for index in range(24)]), directory / "train.parquet"
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(24)]), directory / "val.parquet")
    sets = (
        *SMALL,
        f"model.path={directory / 'model'}",
        f"task.source=parquet:{directory / 'train.parquet'}",
        f"task.eval_path={directory / 'val.parquet'}",
        "model.dtype=float32",
        "task.answer_key=reward_model.ground_truth",
        "task.reward=math-verify",
        "task.answer_format=anywhere",  # the model writes digits, and no word around them
        "task.reward_timeout_s=60",
        "eval.prompts=1",
        "rollout.n=8",
        "rollout.max_response_tokens=3",
        "rollout.workers=2",
        "run.train_steps=6",
        "weights.transport=disk",
        "weights.keep_versions=all",
        "logging.samples_every_steps=1",
        "logging.samples_per_step=0",
        # two teachers, chosen by a column, which only measure: both are the policy's first weights
        "teacher.path={math_dapo='model',gsm8k='model'}",
        "teacher.column=data_source",
        "algorithm.distill_coef=0",
    )
    words = ("--profile", "on-policy-pipeline", "--name", "verl", "--ui", "plain")
    process = start(directory, "train", *words, sets=sets)
    seen, most, deadline_s = set[str](), 0, time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        there = set[str]()
        with suppress(FileNotFoundError):  # before the first version, and after the last
            there = {
                name
                for name in os.listdir(directory / "runs" / "verl" / "weights")
                if name.startswith("version-")
            }
        seen, most = seen | there, max(most, len(there))
        time.sleep(0.01)
    code, _, err = finish(process)
    assert code == 0, err
    return seen, most


def test_a_file_in_verls_layout_trains_every_version_arrives_over_the_disk_and_the_last_one_is_exported(
    tmp_path, monkeypatch, capsys
):
    seen, most = trained(tmp_path)
    run = tmp_path / "runs" / "verl"
    assert_learned_from_verls_rows(run)
    assert_on_policy(run)
    assert_every_version_arrived(run, seen, most)

    monkeypatch.chdir(tmp_path)
    assert asyncrl(["export", "verl"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run}/exports/step-000006\n"
    assert "version 6 (step 6) of run 'verl'" in said.err
    exported = load_file(run / "exports" / "step-000006" / "model.safetensors")
    kept = load_file(run / "versions" / "version-000006" / "model.safetensors")
    assert exported.keys() == kept.keys()
    assert all(torch.equal(exported[name], kept[name]) for name in kept)


def assert_learned_from_verls_rows(run):
    steps = lines(run / "metrics.jsonl")
    # some responses to a prompt were right, and others wrong
    assert any(step["train/grad_norm"] > 0 for step in steps)
    samples = [sample for path in sorted((run / "samples").glob("*.jsonl")) for sample in lines(path)]
    right = [sample for sample in samples if sample["reward"] == 1]
    assert 0 < len(right) < len(samples)
    assert {sample["reward"] for sample in samples} == {0, 1}
    for sample in samples:
        prompt = sample["text"].partition("=")[0]
        first, _, second = prompt.rpartition(">")[2].partition("+")
        assert prompt.startswith("<9>") == (int(first) + 5 * int(second)) % 2


def assert_on_policy(run):
    steps = lines(run / "metrics.jsonl")
    assert steps[-1]["ledger/trained"] == 24
    assert abs(steps[0]["distill/kl"]) < 1e-5 < abs(steps[-1]["distill/kl"])
    assert max(step["fully_async/partial/max_partial_span"] for step in steps) == 0
    assert max(step["staleness/max"] for step in steps) == 0
    assert json.loads((run / "status.json").read_text())["phase"] == "done"


def assert_every_version_arrived(run, seen, most):
    loaded = [event for event in lines(run / "events.jsonl") if event["event"] == "loaded"]
    for worker in ("rollout-0", "rollout-1"):
        assert [event["version"] for event in loaded if event["worker"] == worker] == list(range(7))
    assert all(event["logprob_abs_diff"] <= 1e-5 for event in loaded)
    assert seen <= {f"version-00000{version}" for version in range(7)}
    assert 1 <= most <= 2
    assert not (run / "weights").exists()
