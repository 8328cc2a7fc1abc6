"""builtin:tiny: its tokenizer, its configuration, and what is left of both after a save and a load. In
conversation: what is written can be read, only grows, and only what the model says is learned."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl_cli.builtin.tiny import IGNORED, chat_tokenizer, taught_conversation, tiny_model, tiny_tokenizer


def test_text_survives_the_tokenizer_unchanged():
    tokenizer = tiny_tokenizer("ab ,\n1")
    for text in ("", "a", "ab, 1\nb", "  a  ", "1,1 ,a"):
        tokens = tokenizer.encode(text)
        assert len(tokens) == len(text)
        assert tokenizer.decode(tokens) == text


def test_special_tokens_come_first_and_are_never_added():
    tokenizer = tiny_tokenizer("xyz")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.encode("zyx") == [5, 4, 3]
    assert tokenizer.encode("x?") == [3, 2]
    assert tokenizer.decode([3, 4, 1, 0], skip_special_tokens=True) == "xy"


def test_a_loaded_tokenizer_encodes_as_the_built_one(built, task):
    tokenizer = AutoTokenizer.from_pretrained(built)
    for item in (*task.train, *task.eval):
        tokens = tokenizer.encode(item["prompt"])
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens) == item["prompt"]


def test_embeddings_are_untied_after_a_load(built):
    model = AutoModelForCausalLM.from_pretrained(built)
    assert model.config.tie_word_embeddings is False
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embedding.data_ptr() != head.data_ptr()
    with torch.no_grad():
        before = head.clone()
        embedding.add_(1.0)
    assert torch.equal(head, before)
    assert not torch.allclose(embedding - 1.0, head)


def test_weights_are_float32_and_the_model_stays_tiny(built):
    model = AutoModelForCausalLM.from_pretrained(built)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert 0.4e6 < sum(weight.numel() for weight in model.parameters()) < 0.9e6
    assert model.config.eos_token_id == 1


def test_random_weights_follow_the_seed_and_leave_the_callers_random_state():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = (tiny_model(20, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


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
