"""Items -> prompt tokens: one way for the workers that sample and for whoever checks lengths before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase, items: Sequence[Mapping[str, Any]], *, use_chat_template: bool = True
) -> list[list[int]]:
    """`use_chat_template`: a prompt becomes a user's message in the tokenizer's chat template, if it has one."""
    if not items:
        return []
    if use_chat_template and tokenizer.chat_template is not None:
        conversations = [[{"role": "user", "content": item["prompt"]}] for item in items]
        return [
            list(tokens) for tokens in tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=False)
        ]
    return [list(tokens) for tokens in tokenizer([item["prompt"] for item in items])["input_ids"]]
