"""Parses a model's answers: thinking, content and tool calls.

A response template of transformers (`PreTrainedTokenizerBase.parse_response`) describes the form of calls. It
is the tokenizer's own, if its directory has one (`response_template` in tokenizer_config.json), or else the
first of FORMS that correctly reads back a call written by the model's chat template. So the form is chosen by
a test, not by the model's name.
"""
# ruff: noqa: RUF001 (DeepSeek's tokens have full-width bars)

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from asyncrl_cli.base.errors import first_line
from asyncrl_cli.contracts.environment import Answer, Message, ToolSchema

THINK, THINK_END = "<think>", "</think>"
UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)
"""What transformers' parsers and `json` raise on malformed answers; RecursionError comes from a thousand
brackets."""
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""For forms whose opening contains the tool's name."""
Spec = Mapping[str, Any]
"""A response template of transformers, or its field `tool_calls`."""


def _in_json(arguments: str) -> dict[str, object]:
    function = {"name": "{content.name}", "arguments": f"{{content.{arguments}}}"}
    return {"content": "json", "transform": {"type": "function", "function": function}}


FORMS: Mapping[str, Spec] = {
    "hermes, qwen": {"open": "<tool_call>", "close": "</tool_call>", **_in_json("arguments")},
    "qwen coder": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
        "transform": _NAMED,
    },
    "glm": {
        "open_pattern": r"<tool_call>(?P<name>[^<\n]+)\n?",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        },
        "transform": _NAMED,
    },
    "llama 3": {
        "open_pattern": r'\A\s*(?:<\|python_tag\|>)?\s*(?=\{\s*"(?:name|type)")',
        **_in_json("parameters"),
    },
    "mistral": {
        "open": "[TOOL_CALLS]",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    },
    "mistral 3": {
        "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[{]+)(?:\[ARGS\])?",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        "content": "json",
        "transform": _NAMED,
    },
    "deepseek v3, r1": {
        "open_pattern": r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        r"(?P<name>[^\n]+)\n```json\n",
        "close_pattern": r"\n```<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?",
        "content": "json",
        "transform": _NAMED,
    },
    "deepseek v3.1": {
        "open_pattern": r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?P<name>[^<\n]+)<｜tool▁sep｜>",
        "close_pattern": r"<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?",
        "content": "json",
        "transform": _NAMED,
    },
}
"""The field `tool_calls` of a response template, by the models that use this form."""


class Parser:
    """Parses the answers of one model. `prompt` and `written`: a question, and the call EXAMPLE in answer to
    it, as its chat template writes them; they determine the form of calls. `written` is "" if the template
    writes no calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: str, written: str) -> None:
        self._tokenizer = tokenizer
        self._own: Spec | None = getattr(tokenizer, "response_template", None)
        self._with_calls: Spec | None = None
        for spec in [self._own] if self._own else map(_template, FORMS.values()):
            try:
                calls = self._parsed(spec, written, prompt, ()).get("tool_calls", ()) if written else ()
            except UNREADABLE:
                continue
            if [call["function"] for call in calls] == [EXAMPLE["function"]]:
                self._with_calls = spec
                break
        self.reads_calls = self._with_calls is not None

    def answer(
        self, text: str, whole: str, finish_reason: str, prompt: str, tools: Sequence[ToolSchema]
    ) -> Answer:
        """`text`: the answer without special tokens. `whole`: with them, but without the one that ended it.
        `prompt`: the end of the prompt. Calls are parsed only if `tools` were offered."""
        malformed = ""
        if tools and self._with_calls is not None:
            try:
                message = self._parsed(self._with_calls, whole, prompt, tools)
                return Answer(text=text, message=message, finish_reason=finish_reason)
            except UNREADABLE as error:
                malformed = first_line(error)
        # The answer without its calls.
        if self._own:
            fields = {name: field for name, field in self._own["fields"].items() if name != "tool_calls"}
            message = self._parsed({**self._own, "fields": fields}, whole, prompt, ())
        else:
            message = {"role": "assistant", "content": whole.strip()}
            if prompt.rstrip().endswith(THINK) or message["content"].startswith(THINK):
                thinking, _, content = message["content"].removeprefix(THINK).partition(THINK_END)
                message["content"] = content.strip()
                if thinking.strip():
                    message["reasoning_content"] = thinking.strip()
        return Answer(text=text, message=message, finish_reason=finish_reason, malformed=malformed)

    def _parsed(self, spec: Spec, whole: str, prompt: str, tools: Sequence[ToolSchema]) -> Message:
        """The message. Raises one of UNREADABLE if a call cannot be read."""
        if not self._own:  # our templates need only the answer's beginning, if the prompt has it
            prompt = THINK if prompt.rstrip().endswith(THINK) else ""
        read = self._tokenizer.parse_response(whole, dict(spec), prefix=prompt, tools=list(tools) or None)
        message = {**read, "role": "assistant", "content": (read.get("content") or "").strip()}
        if "tool_calls" in message:
            number = zlib.crc32(f"{prompt}{whole}".encode(errors="replace")) % 10**7
            calls = enumerate(message["tool_calls"])
            message["tool_calls"] = [_checked(call, f"{number:07}{index:02}") for index, call in calls]
        return message


EXAMPLE: Message = {
    "id": "call00000",  # Mistral's templates demand 9 letters and digits
    "type": "function",
    "function": {"name": "name", "arguments": {"key": "value"}},
}
"""A call, and below the tool that it calls, with which chat templates are tested."""
EXAMPLE_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "name",
        "description": "An example.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "A text."}},
            "required": ["key"],
        },
    },
}


def _template(calls: Spec) -> Spec:
    """A response template for answers that think between <think> and </think>, with calls of this form."""
    unstripped = {"repeats": True, "join": "", "content_args": {"strip": False}}
    fields = {
        "content": unstripped,
        "reasoning_content": {"open": THINK, "close": THINK_END, "repeats": True, "join": "\n"},
        "tool_calls": {"repeats": not calls.get("transform_each"), **calls},
    }
    return {"start_anchor_pattern": r"\A", "defaults": {"role": "assistant"}, "fields": fields}


def _checked(call: Message, id: str) -> Message:
    """The call with its id. Raises ValueError unless it names a tool and has arguments by name."""
    function = call["function"]
    name, arguments = function["name"], function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"a tool call names no tool, but {name!r}")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {name} are not a JSON object, but {arguments!r}")
    return {"id": id, "type": "function", "function": {"name": name.strip(), "arguments": dict(arguments)}}
