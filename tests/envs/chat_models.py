"""Five models as `Chat` sees them: their published chat templates (templates/), small tokenizers with their
special tokens, and, written by hand, what they say, what each template adds for a further turn, and when it
rewrites what came before."""
# ruff: noqa: RUF001, E501 (DeepSeek's tokens have full-width bars)

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
ALPHABET = 'etaoin shrdlu ETAOIN .,:;!?-_()[]{}"\\/\n\t0123456789 äßéñ žЖд 中文字 עב 🙂👩‍🚀 \u200d'
# fmt: off
WORDS = ["the", "number", "of", " calls", " arguments", "name", "value", "ing", "  ", "\n\n", '{"', '"}',
         "日本", "русский", "🙂"]
# fmt: on
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does – what it says.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
    for name in ("search", "add_up")
)


@dataclass(frozen=True)
class Said:
    """What a model means to say in a turn. `broken`: the call's JSON is cut short."""

    content: str = ""
    thinking: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    broken: bool = False


@dataclass(frozen=True)
class ChatModel:
    """`write(said, prompt text, rng)`: the text of the answer. `added(new messages)`: the text that they add
    after the answer, from the token that closes it on. `rewrites(history of (Said | message))`: whether the
    template changes what came before."""

    name: str
    template: str
    specials: Sequence[str]
    stops: Sequence[str]
    bos: str | None
    is_bytes: bool
    write: Callable[[Said, str, Random], str]
    added: Callable[[Sequence[dict[str, Any]]], str]
    rewrites: Callable[[Sequence[Said], Sequence[dict[str, Any]], bool], bool]
    has_tools: bool = True
    max_calls: int = 3
    thinks_and_calls: bool = True
    calls_and_says: bool = True
    prepared: Callable[[dict[str, Any]], dict[str, Any]] = lambda message: message

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return tokenizer_of(self.name)

    @property
    def stop_tokens(self) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids(list(self.stops))


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A BPE tokenizer of the model's kind (byte-level, or characters with byte fallback as sentencepiece's),
    with its tokens."""
    model = next(model for model in MODELS if model.name == name)
    corpus = ["".join(Random(seed).choices(WORDS + list(ALPHABET), k=400)) for seed in range(20)]
    backend = (
        byte_level(corpus) if model.is_bytes else with_byte_fallback(corpus, prepends_space=name == "mistral")
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=model.bos, eos_token=model.stops[0]
    )
    tokenizer.add_tokens(list(model.specials), special_tokens=name != "qwen3")
    tokenizer.add_tokens(list(model.stops), special_tokens=True)
    tokenizer.chat_template = (TEMPLATES / model.template).read_text(encoding="utf-8")
    return tokenizer


def byte_level(corpus: Sequence[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    initial = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=600, initial_alphabet=initial, show_progress=False)
    )
    return backend


def with_byte_fallback(corpus: Sequence[str], *, prepends_space: bool) -> Tokenizer:
    """As sentencepiece makes them; rare characters are tokens of bytes."""
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=600, limit_alphabet=70, show_progress=False)
    trained.train_from_iterator([text.replace(" ", "▁") for text in corpus], trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(
        models.BPE(vocab, [tuple(merge) for merge in model["merges"]], byte_fallback=True, unk_token="<unk>")
    )
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prepends_space else spaces
    )
    strip = [decoders.Strip(" ", 1, 0)] if prepends_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def thought(said: Said) -> str:
    return f"<think>\n{said.thinking}\n</think>\n\n" if said.thinking else ""


def in_json(name: str, arguments: dict[str, Any], key: str, rng: Random) -> str:
    """A call as JSON, not always written as a template would write it."""
    how: dict[str, Any] = {"ensure_ascii": rng.random() < 0.5}
    how |= rng.choice([{}, {"indent": 1}, {"separators": (",", ":")}])
    return json.dumps({"name": name, key: arguments}, **how)


def broken_off(text: str, said: Said) -> str:
    return text[: text.rindex("}")] if said.broken else text


def qwen_text(said: Said, prompt: str, rng: Random) -> str:
    calls = "\n".join(
        f"<tool_call>\n{broken_off(in_json(*call, 'arguments', rng), said)}\n</tool_call>"
        for call in said.calls
    )
    return thought(said) + said.content + ("\n" if said.content and calls else "") + calls


def qwen_added(new: Sequence[dict[str, Any]]) -> str:
    results = "".join(f"\n<tool_response>\n{message['content']}\n</tool_response>" for message in new)
    turn = (
        f"<|im_start|>user{results}" if new[0]["role"] == "tool" else f"<|im_start|>user\n{new[0]['content']}"
    )
    return f"<|im_end|>\n{turn}<|im_end|>\n<|im_start|>assistant\n"


def qwen_rewrites(said: Sequence[Said], new: Sequence[dict[str, Any]], tools: bool) -> bool:
    """Thinking since the last question is dropped at the next question. `said`: the answers since then."""
    return new[0]["role"] == "user" and any(answer.thinking for answer in said)


def llama_text(said: Said, prompt: str, rng: Random) -> str:
    calls = "".join(broken_off(in_json(*call, "parameters", rng), said) for call in said.calls)
    return thought(said) + said.content + (rng.choice(["", "<|python_tag|>"]) + calls if calls else "")


def llama_added(new: Sequence[dict[str, Any]]) -> str:
    def turn(message: dict[str, Any]) -> str:
        is_tool = message["role"] == "tool"
        text = json.dumps(message["content"], ensure_ascii=False) if is_tool else message["content"].strip()
        return f"<|start_header_id|>{'ipython' if is_tool else 'user'}<|end_header_id|>\n\n{text}<|eot_id|>"

    return f"<|eot_id|>{''.join(map(turn, new))}<|start_header_id|>assistant<|end_header_id|>\n\n"


def mistral_text(said: Said, prompt: str, rng: Random) -> str:
    calls = ", ".join(in_json(*call, "arguments", rng) for call in said.calls)
    return thought(said) + said.content + (f"[TOOL_CALLS] {broken_off(f'[{calls}]', said)}" if calls else "")


def mistral_added(new: Sequence[dict[str, Any]]) -> str:
    def turn(message: dict[str, Any]) -> str:
        if message["role"] == "tool":
            return (
                f'[TOOL_RESULTS] {{"content": {message["content"]}, "call_id": '
                f'"{message["tool_call_id"]}"}}[/TOOL_RESULTS]'
            )
        return f"[INST] {message['content']}[/INST]"

    return f"</s>{''.join(map(turn, new))}"


def mistral_rewrites(said: Sequence[Said], new: Sequence[dict[str, Any]], tools: bool) -> bool:
    """The tools are written before the last question: at the next one they move."""
    return new[0]["role"] == "user" and tools


def gemma_added(new: Sequence[dict[str, Any]]) -> str:
    turns = "".join(f"<start_of_turn>user\n{message['content'].strip()}<end_of_turn>\n" for message in new)
    return f"<end_of_turn>\n{turns}<start_of_turn>model\n"


def deepseek_text(said: Said, prompt: str, rng: Random) -> str:
    begun = f"{said.thinking}\n</think>\n\n" if prompt.endswith("<think>\n") else thought(said)
    bodies = (
        broken_off(json.dumps(arguments, ensure_ascii=rng.random() < 0.5), said)
        for _, arguments in said.calls
    )
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{body}\n```<｜tool▁call▁end｜>"
        for (name, _), body in zip(said.calls, bodies, strict=True)
    )
    return begun + said.content + (f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else "")


def deepseek_added(new: Sequence[dict[str, Any]]) -> str:
    return f"<｜end▁of▁sentence｜><｜User｜>{new[0]['content']}<｜Assistant｜><think>\n"


def deepseek_rewrites(said: Sequence[Said], new: Sequence[dict[str, Any]], tools: bool) -> bool:
    """Every answer's thinking is dropped at once, with the <think> of its prompt; but not that of an answer
    to tools' results."""
    return len(said) < 2 or bool(said[-1].calls and not said[-1].broken)


def deepseek_prepared(message: dict[str, Any]) -> dict[str, Any]:
    """As this template wants it: arguments as text, no content beside calls, thinking within the content."""
    if "tool_calls" in message:
        functions = [call["function"] for call in message["tool_calls"]]
        texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
        calls = [
            call | {"function": call["function"] | {"arguments": text}}
            for call, text in zip(message["tool_calls"], texts, strict=True)
        ]
        return {**message, "content": None, "tool_calls": calls}
    return inline(message)


def inline(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that do not know `reasoning_content`."""
    thinking = message.get("reasoning_content")
    if not thinking:
        return message
    return message | {"content": f"<think>\n{thinking}\n</think>\n\n{message['content']}"}


def never(said: Sequence[Said], new: Sequence[dict[str, Any]], tools: bool) -> bool:
    return False


MODELS = (
    ChatModel(
        "qwen3", "qwen3.jinja", ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|im_start|>"),
        ("<|im_end|>", "<|endoftext|>"), None, True, qwen_text, qwen_added, qwen_rewrites,
    ),
    ChatModel(
        "llama3", "llama3.jinja", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"), "<|begin_of_text|>", True, llama_text, llama_added, never,
        max_calls=1, thinks_and_calls=False, calls_and_says=False, prepared=inline,
    ),
    ChatModel(
        "mistral", "mistral.jinja",
        ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ("</s>",), "<s>", False, mistral_text, mistral_added, mistral_rewrites,
        thinks_and_calls=False, calls_and_says=False, prepared=inline,
    ),
    ChatModel(
        "gemma", "gemma.jinja", ("<bos>", "<start_of_turn>"), ("<end_of_turn>", "<eos>"), "<bos>", False, qwen_text, gemma_added, never,
        has_tools=False, prepared=inline,
    ),
    ChatModel(
        "deepseek r1", "deepseek_r1.jinja",
        ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
         "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
         "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ("<｜end▁of▁sentence｜>",), "<｜begin▁of▁sentence｜>", True, deepseek_text, deepseek_added, deepseek_rewrites,
        calls_and_says=False, prepared=deepseek_prepared,
    ),
)  # fmt: skip
