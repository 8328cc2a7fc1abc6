"""A Parquet file as verl's DAPO has it, trained as it is: messages, an answer in a field, math-verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl_cli.models.tiny import tiny_tokenizer
from tests.run.commands import lines, train

pytestmark = pytest.mark.slow

TEMPLATE = "{% for message in messages %}{{ '<' if message.role == 'system' else '>' }}{{ message.content }}{% endfor %}="


def row(index: int) -> dict[str, Any]:
    first, second = index % 5, index // 5
    system = [{"role": "system", "content": "9"}] if index % 2 else []
    return {
        "data_source": "math_dapo",
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
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    eos = tokenizer.eos_token_id
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, eos_token_id=eos, bos_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)


def test_a_file_in_verls_layout_trains(tmp_path):
    save_model(tmp_path / "model")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(index) for index in range(24)]), tmp_path / "train.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(24)]), tmp_path / "val.parquet")
    sets = (
        f"model.path={tmp_path / 'model'}",
        f"task.source=parquet:{tmp_path / 'train.parquet'}",
        f"task.eval_path={tmp_path / 'val.parquet'}",
        "task.answer_key=reward_model.ground_truth",
        "task.reward=math-verify",
        "task.reward_timeout_s=60",
        "eval.prompts=1",
        "rollout.n=8",
        "rollout.max_response_tokens=3",
        "run.train_steps=6",
        "logging.samples_every_steps=1",
        "logging.samples_per_step=0",
    )
    code, _, err = train(tmp_path, "partial-rollout", "verl", *sets)
    assert code == 0, err
    run = tmp_path / "runs" / "verl"
    steps = lines(run / "metrics.jsonl")
    assert steps[-1]["ledger/trained"] == 24
    assert any(step["train/grad_norm"] > 0 for step in steps)  # some responses to a prompt were right, and others wrong
    samples = [sample for path in sorted((run / "samples").glob("*.jsonl")) for sample in lines(path)]
    right = [sample for sample in samples if sample["reward"] == 1]
    assert 0 < len(right) < len(samples)
    assert {sample["reward"] for sample in samples} == {0, 1}
    for sample in samples:
        prompt = sample["text"].partition("=")[0]
        first, _, second = prompt.rpartition(">")[2].partition("+")
        assert prompt.startswith("<9>") == (int(first) + 5 * int(second)) % 2
