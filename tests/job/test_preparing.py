"""Prompts that do not fit are refused before Ray starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.errors import ConfigError, PreflightError
from asyncrl_cli.job.preparing import check_prompt_lengths
from asyncrl_cli.models.tiny import tiny_tokenizer


def profile_of(max_prompt_tokens: int) -> Any:
    return SimpleNamespace(
        rollout=SimpleNamespace(max_prompt_tokens=max_prompt_tokens),
        model=SimpleNamespace(trust_remote_code=False),
        task=SimpleNamespace(source="jsonl:x.jsonl"),
    )


def task_of(train: list[str], held_out: list[str]) -> Any:
    items = [
        [{"uid": f"{split}-{i}", "prompt": text} for i, text in enumerate(texts)]
        for split, texts in (("t", train), ("e", held_out))
    ]
    return SimpleNamespace(train=items[0], eval=items[1])


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    tiny_tokenizer("0123456789=äö").save_pretrained(tmp_path)
    return tmp_path


def test_the_longest_prompt_of_both_splits_is_named_with_its_length(model_dir: Path) -> None:
    task = task_of(["1" * 8, "1" * 9], ["2" * 12])
    with pytest.raises(ConfigError, match=r"prompt e-0 has 12 tokens, rollout\.max_prompt_tokens is 8 \(2 prompts") as caught:
        check_prompt_lengths(profile_of(8), task, model_dir)
    assert "--set rollout.max_prompt_tokens=12" in caught.value.hint


def test_tokens_are_counted_and_not_bytes(model_dir: Path) -> None:
    check_prompt_lengths(profile_of(8), task_of(["ä" * 8, "1" * 8], []), model_dir)


def test_a_tokenizer_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="tokenizer"):
        check_prompt_lengths(profile_of(8), task_of(["1"], []), tmp_path)
