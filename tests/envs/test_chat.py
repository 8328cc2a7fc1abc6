"""Conversations over five real chat templates: no sampled id is ever tokenized again, and forks come where
templates rewrite."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from random import Random
from typing import Any, cast

import pytest

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.builtin.tiny import chat_tokenizer
from asyncrl_cli.contracts.environment import Answer, EpisodeFailed
from asyncrl_cli.engines.port import Completion
from asyncrl_cli.envs.chat import Chat
from asyncrl_cli.envs.conversation import Conversation
from tests.envs.chat_models import ALPHABET, MODELS, TEMPLATES, TOOLS, WORDS, ChatModel, Said

BY_NAME = {model.name: model for model in MODELS}


def random_text(rng: Random, most: int = 30) -> str:
    text = "".join(rng.choices([*ALPHABET, *WORDS], k=rng.randrange(1, most)))
    return text.strip() or "x"


def random_said(model: ChatModel, rng: Random, *, tools: bool, thinks: bool) -> Said:
    has_calls = tools and rng.random() < 0.5
    may_think = thinks and rng.random() < 0.6 and (model.thinks_and_calls or not has_calls)
    thinking = random_text(rng) if may_think else ""
    content = random_text(rng) if not has_calls or (model.calls_and_says and rng.random() < 0.4) else ""
    calls = []
    for _ in range(rng.randrange(1, model.max_calls + 1) if has_calls else 0):
        has_arguments = rng.random() < 0.8
        arguments = {"text": random_text(rng), "n": rng.randrange(-9, 999)} if has_arguments else {}
        calls.append((rng.choice(("search", "add_up")), arguments))
    return Said(content, thinking, tuple(calls), broken=has_calls and rng.random() < 0.1)


def respelled(chat: Chat, ids: Sequence[int], rng: Random) -> list[int]:
    """The same text in other tokens than the tokenizer would choose, as a model may sample it."""
    vocabulary, specials = chat.tokenizer.get_vocab(), set(chat.tokenizer.get_added_vocab())
    pieces: list[int] = []
    for token, piece in zip(ids, chat.tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        at = rng.randrange(1, len(piece)) if len(piece) > 1 else 0
        halves = [vocabulary.get(piece[:at]), vocabulary.get(piece[at:])]
        is_whole = piece in specials or piece.startswith("<0x") or None in halves
        is_split = at and not is_whole and rng.random() < 0.3
        pieces += halves if is_split else [token]
    return pieces


class Play:
    """One random conversation, checked at every turn. `num_forks`: as the hand-written rules of the model
    have it."""

    def __init__(self, model: ChatModel, seed: int) -> None:
        self.model, self.rng = model, Random(seed)
        self.chat = Chat(model.tokenizer, model.stop_tokens)
        self.conversation = Conversation(self.chat)
        self.tools = TOOLS if model.has_tools and self.rng.random() < 0.7 else ()
        self.history: list[dict[str, Any]] = []
        self.since: list[Said] = []
        self.sampled: list[list[Completion]] = []
        self.before: list[int] = []

    def run(self) -> None:
        new = [{"role": "user", "content": random_text(self.rng)}]
        if self.model.name != "mistral" and self.rng.random() < 0.3:
            new.insert(0, {"role": "system", "content": random_text(self.rng)})
        for _ in range(self.rng.randrange(1, 9)):
            prompt = self.asked(new)
            new = self.answered(prompt, new)
        assert self.conversation.num_forks == len(self.sampled) - 1
        for segment, completions in zip(self.conversation.segments(), self.sampled, strict=True):
            for name in ("tokens", "versions", "logprobs"):
                found = segment[name][segment["mask"]].tolist()
                assert found == [value for one in completions for value in getattr(one, name)]
            assert not segment["logprobs"][~segment["mask"]].any()

    def asked(self, new: list[dict[str, Any]]) -> list[int]:
        prompt = self.conversation.ask(new, self.tools)
        whole = self.reference([*self.history, *new])
        if not self.sampled or self.model.rewrites(self.since, new, bool(self.tools)):
            assert prompt == whole
            self.sampled.append([])
        else:
            assert prompt[: len(self.before)] == self.before
            added = prompt[len(self.before) :]
            assert whole[-len(added) :] == added
            expected = self.chat.tokenizer(self.model.added(new), add_special_tokens=False)["input_ids"]
            assert added == expected[self.before[-1] in self.model.stop_tokens :]
        return prompt

    def reference(self, messages: list[dict[str, Any]]) -> list[int]:
        prepared = [self.model.prepared(message) for message in messages]
        how = {"add_generation_prompt": True, "return_dict": False}
        return list(self.chat.tokenizer.apply_chat_template(prepared, tools=list(self.tools) or None, **how))

    def answered(self, prompt: list[int], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answers, and returns the messages of the next turn."""
        said = random_said(self.model, self.rng, tools=bool(self.tools), thinks=True)
        text = self.model.write(said, self.chat.tokenizer.decode(prompt), self.rng)
        ids = respelled(self.chat, self.chat.tokenizer(text, add_special_tokens=False)["input_ids"], self.rng)
        text = self.chat.tokenizer.decode(ids)
        is_cut = (
            not (said.calls or said.thinking) and self.model.name != "deepseek r1" and self.rng.random() < 0.2
        )
        end = [] if is_cut else [self.rng.choice(self.model.stop_tokens)]
        tokens = (ids[: self.rng.randrange(1, len(ids) + 1)] if is_cut else ids) + end
        logprobs = [-0.5 * self.rng.randrange(9) for _ in tokens]
        reason = "length" if is_cut else "stop"
        completion = Completion(
            tokens=tokens, logprobs=logprobs, versions=[len(self.since)] * len(tokens), finish_reason=reason
        )
        answer = self.conversation.take(completion)
        self.sampled[-1].append(completion)
        if is_cut:
            said = Said(self.chat.decode(tokens))
        self.check(answer, said, text)
        self.history += [*new, dict(answer.message)]
        self.before = prompt + tokens
        self.since = [said] if new[-1]["role"] == "user" else [*self.since, said]
        return self.next(answer)

    def check(self, answer: Answer, said: Said, text: str) -> None:
        message = answer.message
        assert message.get("reasoning_content", "") == said.thinking
        assert bool(answer.malformed) == said.broken
        if not said.broken:
            assert message["content"] == said.content.strip()
            functions = [call["function"] for call in message.get("tool_calls", ())]
            assert [(one["name"], one["arguments"]) for one in functions] == [*said.calls]
        else:
            assert "tool_calls" not in message
            assert message["content"] == text.rpartition("</think>")[2].strip()

    def next(self, answer: Answer) -> list[dict[str, Any]]:
        calls = answer.message.get("tool_calls", ())
        results = [
            {"role": "tool", "content": random_text(self.rng), "tool_call_id": call["id"]}
            | {"name": call["function"]["name"]}
            for call in calls
        ]
        return results or [{"role": "user", "content": f"{answer.malformed}{random_text(self.rng)}"}]


def play(model: ChatModel, num_turns: int, seed: int) -> int:
    """Random conversations of `num_turns` turns in all; the number of forks."""
    turns = forks = 0
    while turns < num_turns:
        game = Play(model, seed := seed + 1)
        game.run()
        turns, forks = turns + game.conversation.num_turns, forks + game.conversation.num_forks
    return forks


@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
def test_no_sampled_id_changes_over_random_turns_and_forks_are_where_the_template_rewrites(
    model: ChatModel,
) -> None:
    forks = play(model, 40, seed=0)
    assert (forks == 0) == (model.name in ("llama3", "gemma"))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
def test_no_sampled_id_changes_over_200_random_turns_of_each_template(model: ChatModel) -> None:
    play(model, 200, seed=10_000)


def chat_of(name: str, template: str | None = None) -> Chat:
    """The model's chat, with another template or with its own."""
    model = BY_NAME[name]
    tokenizer = copy(model.tokenizer)
    tokenizer.chat_template = template or tokenizer.chat_template
    return Chat(tokenizer, model.stop_tokens)


def completion_of(chat: Chat, text: str, reason: Any = "stop") -> Completion:
    tokens = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    return Completion(
        tokens=tokens, logprobs=[0.0] * len(tokens), versions=[0] * len(tokens), finish_reason=reason
    )


def test_an_answer_that_is_cut_off_while_it_thinks_says_nothing_and_its_call_is_malformed() -> None:
    chat = chat_of("qwen3")
    prompt = chat.render([{"role": "user", "content": "hi"}], TOOLS)
    answer = chat.parse(prompt, completion_of(chat, "<think>\nlet me", "length"), TOOLS)
    assert answer.message == {"role": "assistant", "content": "", "reasoning_content": "let me"}
    answer = chat.parse(prompt, completion_of(chat, '<tool_call>\n{"name": "sea', "length"), TOOLS)
    assert answer.malformed
    assert answer.message["content"].startswith("<tool_call>")


@pytest.mark.parametrize(
    "call",
    [
        '{"name": 3, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "search", "arguments": [1]}',
        "[]",
        '{"name": ' + "[" * 100_000,
    ],
)
def test_a_call_that_names_no_tool_or_no_arguments_is_malformed(call: str) -> None:
    chat = chat_of("qwen3")
    prompt = chat.render([{"role": "user", "content": "hi"}], TOOLS)
    assert chat.parse(prompt, completion_of(chat, f"<tool_call>{call}</tool_call>"), TOOLS).malformed


class Counting:
    """A tokenizer that notes how long the texts are that it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.lengths = tokenizer, list[int]()

    def __call__(self, text: str, **how: Any) -> Any:
        self.lengths.append(len(text))
        return self.tokenizer(text, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize(
    "ask", [lambda chat, text: chat.encode(text), lambda chat, text: chat.render([user(text)])]
)
def test_of_a_text_that_is_far_too_long_only_a_part_is_tokenized(ask: Any) -> None:
    counting = Counting(MODELS[0].tokenizer)
    chat = Chat(cast(Any, counting), MODELS[0].stop_tokens, max_tokens=1000)
    assert len(ask(chat, "0123456789" * 10**6)) > 2000
    assert sum(counting.lengths) <= 2**16


def test_a_text_that_may_fit_has_all_its_tokens_however_many_characters_they_have() -> None:
    text, limit = "the number of calls " * 5000, 12_000
    plain = Chat(MODELS[0].tokenizer).render([user(text)])
    assert limit < len(plain) <= 2 * limit < len(text)
    assert Chat(MODELS[0].tokenizer, max_tokens=limit).render([user(text)]) == plain


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_text_that_is_no_unicode_fails_its_trajectory_alone() -> None:
    chat = chat_of("qwen3")
    asked: list[Any] = [{"role": "user", "content": "hi"}]
    said = chat.parse(chat.render(asked, TOOLS), completion_of(chat, "yes"), TOOLS).message
    tokens = chat.render(asked, TOOLS) + completion_of(chat, "yes").tokens
    with pytest.raises(EpisodeFailed) as failed:
        chat.bridge(tokens, [*asked, said], [{"role": "user", "content": "\ud800"}], TOOLS)
    assert failed.value.kind == "template"


def test_the_characters_that_a_vocabulary_lacks_are_named_once_each() -> None:
    chat = Chat(chat_tokenizer("345"))
    assert (chat.unknown("3é4日5é"), chat.unknown("345")) == ("é日", "")


def test_calls_are_text_where_no_tools_were_offered() -> None:
    chat = chat_of("qwen3")
    text = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    answer = chat.parse(chat.render([{"role": "user", "content": "hi"}]), completion_of(chat, text))
    assert (answer.message, answer.malformed) == ({"role": "assistant", "content": text}, "")


def test_a_template_that_does_not_close_its_answers_is_continued_by_what_follows_them() -> None:
    plain = (
        "{% for m in messages %}({{ m.role }}) {{ m.content }}\n{% endfor %}{% if add_generation_prompt "
        "%}(assistant) {% endif %}"
    )
    chat = chat_of("qwen3", plain)
    conversation = Conversation(chat)
    prompt = conversation.ask([{"role": "user", "content": "hi"}])
    conversation.take(said := completion_of(chat, "yes<|im_end|>"))
    again = conversation.ask([{"role": "user", "content": "and?"}])
    assert again[: len(prompt) + len(said.tokens)] == prompt + said.tokens
    assert chat.tokenizer.decode(again[len(prompt) + len(said.tokens) :]) == "(user) and?\n(assistant) "


def test_the_builtin_model_can_be_offered_tools() -> None:
    chat = Chat(chat_tokenizer(["thanks"]))
    chat.check_turns()
    chat.check_tools()
    conversation = Conversation(chat)
    conversation.ask([{"role": "user", "content": "2*3"}], TOOLS)
    answer = conversation.take(completion_of(chat, "<call>search text=2*3,n=4<eos>"))
    function = answer.message["tool_calls"][0]["function"]
    assert function == {"name": "search", "arguments": {"text": "2*3", "n": 4}}
    prompt = conversation.ask([{"role": "tool", "content": "6"}], TOOLS)
    assert chat.tokenizer.decode(prompt) == "<user>2*3<model><call>search text=2*3,n=4<eos><result>6<model>"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ((TEMPLATES / "gemma.jinja").read_text(encoding="utf-8"), "does not write tool calls"),
        (
            "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function }}{% "
            "endfor %}{% endfor %}",
            "an unknown form",
        ),
    ],
)
def test_a_model_that_cannot_be_offered_tools_is_refused_with_the_reason(template: str, why: str) -> None:
    with pytest.raises(
        PreflightError, match=f"cannot be offered tools: its chat template .*{why}"
    ) as refused:
        chat_of("gemma", template).check_tools()
    assert "builtin:tools" in (refused.value.hint or "")


def test_a_template_that_refuses_a_second_turn_is_refused_before_the_run() -> None:
    with pytest.raises(PreflightError, match=r"a second turn is not possible: .*only one"):
        chat_of(
            "gemma", "{% if messages|length > 1 %}{{ raise_exception('only one') }}{% endif %}"
        ).check_turns()
