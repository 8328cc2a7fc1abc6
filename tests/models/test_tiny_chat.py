"""builtin:tiny in conversation: what is written can be read, only grows, and only what the model says is
learned."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from asyncrl_cli.builtin.tiny import IGNORED, chat_tokenizer, taught_conversation

ADD = {"name": "add", "parameters": {"properties": {"left": {"type": "integer"}, "note": {"type": "string"}}}}


def call(tool: str, **arguments) -> dict:
    return {"type": "function", "function": {"name": tool, "arguments": arguments}}


TALK = [
    {"role": "user", "content": "1+2 <3"},
    {"role": "assistant", "content": "so", "tool_calls": [call("add", left=-12, note="a=b c"), call("stop")]},
    {"role": "tool", "content": "error: 'no'\n"},
    {"role": "assistant", "content": "higher than 3"},
    {"role": "user", "content": "and?"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer(["higher", "add left="]).save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def written(tokenizer, messages) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_roles_words_and_characters_are_one_token_each(tokenizer):
    tokens = [tokenizer.decode([token]) for token in written(tokenizer, TALK[3:])]
    assert tokens == ["<model>", "higher", *" than 3", "<eos>", "<user>", *"and?", "<model>"]
    assert tokenizer.eos_token_id == 1
    assert tokenizer.unk_token_id not in written(tokenizer, TALK)


def test_a_conversation_only_grows(tokenizer):
    before: list[int] = []
    for end in (1, 3, 5):
        now = written(tokenizer, TALK[:end])
        assert now[: len(before)] == before
        before = now


def test_what_the_template_writes_is_read_back(tokenizer):
    for number in (1, 3):
        begun, ended = (
            written(tokenizer, TALK[:number]),
            tokenizer.apply_chat_template(TALK[: number + 1], return_dict=False),
        )
        assert (
            tokenizer.parse_response(ended[len(begun) :], prefix=begun, tools=[{"function": ADD}])
            == TALK[number]
        )


def test_calls_that_are_no_calls_are_read_all_the_same(tokenizer):
    def read(text: str):
        return [call["function"] for call in tokenizer.parse_response(text, prefix="")["tool_calls"]]

    assert read("<call>") == [{"name": "", "arguments": {}}]
    assert read("<call>add 3<call>x y=") == [
        {"name": "add", "arguments": {}},
        {"name": "x", "arguments": {"y": ""}},
    ]


def test_only_what_the_model_says_is_learned(tokenizer):
    tokens, labels = taught_conversation(tokenizer, TALK)
    assert tokens == tokenizer.apply_chat_template(TALK, return_dict=False)
    learned = tokenizer.decode([label for label in labels if label != IGNORED])
    assert learned == "so<call>add left=-12,note=a=b c<call>stop <eos>higher than 3<eos>"
    assert all(label in (IGNORED, token) for token, label in zip(tokens, labels, strict=True))
