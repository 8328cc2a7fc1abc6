"""How builtin:tiny writes conversations: roles and tool calls around single characters, in as few tokens as
possible.

    <user>47+83*65<model><call>calculate expression=83*65<eos><result>5395<model><call>answer value=5442<eos>

Each tag in angle brackets is one token, and so is each of the task's `words` (frequent texts). A call is
`<call>`, the tool's name, a space, and its arguments as `key=value`, separated by commas, so no argument may
contain a comma. `CHAT_TEMPLATE` writes this format and `RESPONSE_TEMPLATE` reads it, for transformers'
`apply_chat_template` and `parse_response`. Earlier messages are never rendered differently later, so the
tokens of a conversation only grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl_cli.builtin.tiny import EOS, IGNORED, SPECIAL_TOKENS, Taught, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = Mapping[str, Any]
"""A chat message in the form that templates expect: `role`, `content`, and `tool_calls` with arguments by
name."""

USER, MODEL, CALL, RESULT = "<user>", "<model>", "<call>", "<result>"
CHAT_TOKENS = (*SPECIAL_TOKENS, USER, MODEL, CALL, RESULT)
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""Error messages of tools may contain any of them."""

CHAT_TEMPLATE = """
{%- for message in messages -%}
    {%- if message.role == "assistant" -%}
        {{- "<model>" -}}
        {%- generation -%}
            {{- message.content or "" -}}
            {%- for call in message.tool_calls or [] -%}
                {{- "<call>" + call.function.name + " " -}}
                {%- for key, value in call.function.arguments.items() -%}
                    {{- ("" if loop.first else ",") + key + "=" + value | string -}}
                {%- endfor -%}
            {%- endfor -%}
            {{- "<eos>" -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- ("<result>" if message.role == "tool" else "<user>") + message.content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<model>" -}}
{%- endif -%}
"""

RESPONSE_TEMPLATE: dict[str, Any] = {
    "start_anchor": MODEL,
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": EOS},
        "tool_calls": {
            "open_pattern": rf"{CALL}(?P<name>\w*) ?",
            "close_pattern": rf"{EOS}|(?={CALL})",
            "content": "kv-lines",
            "content_args": {"line_sep": ",", "kv_sep": "="},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def chat_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """builtin:tiny's tokenizer for conversations: every printable ASCII character, and each of `words`, is a
    token."""
    tokenizer = tiny_tokenizer(CHARACTERS, special=CHAT_TOKENS, words=words)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer


def taught_conversation(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]) -> Taught:
    """A conversation as a lesson: the assistant's messages are learned, everything else is only input."""
    written = tokenizer.apply_chat_template(
        list(messages), return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, mask = written["input_ids"], written["assistant_masks"]
    return tokens, [token if is_said else IGNORED for token, is_said in zip(tokens, mask, strict=True)]
