"""Messages -> tokens, in the tokenizer's chat template if it has one: for the workers that sample, and to check lengths before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from asyncrl_cli.envs.port import EpisodeFailed, Message


def load_tokenizer(model_dir: str | Path, *, trust_remote_code: bool) -> Any:
    return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)


def prompt_of(item: Mapping[str, Any]) -> tuple[Message, ...]:
    return ({"role": "user", "content": item["prompt"]},)


def render_prompts(tokenizer: PreTrainedTokenizerBase, items: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return render(tokenizer, [prompt_of(item) for item in items])


def render(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
    """Tokens of each conversation, up to where the model is to answer."""
    if not conversations:
        return []
    if tokenizer.chat_template is not None:
        chats = [list(messages) for messages in conversations]
        rendered = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    else:
        rendered = tokenizer(["".join(message["content"] for message in messages) for messages in conversations])["input_ids"]
    return [list(tokens) for tokens in rendered]


def render_more(
    tokenizer: PreTrainedTokenizerBase, seen: Sequence[Message], response: str, last_token: int, new: Sequence[Message]
) -> list[int]:
    """Tokens that `new` messages add after the response to `seen`; what was sampled is never tokenized again.

    Raises EpisodeFailed where the chat template would change what the model has seen already.
    """
    if tokenizer.chat_template is None:
        return list(tokenizer("".join(message["content"] for message in new), add_special_tokens=False)["input_ids"])
    begun = _text(tokenizer, seen) + response
    whole = _text(tokenizer, [*seen, {"role": "assistant", "content": response}, *new])
    if not whole.startswith(begun):
        raise EpisodeFailed("the model's chat template rewrites earlier turns, so that no further turn can be added")
    added = list(tokenizer(whole.removeprefix(begun), add_special_tokens=False)["input_ids"])
    return added[1:] if added[:1] == [tokenizer.eos_token_id] == [last_token] else added


def _text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
