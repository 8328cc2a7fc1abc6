"""`model.chat_template`: another chat template for a model, in a directory of links to the model's files.

`builtin:tools` lets a model whose own template knows no tools be offered tools. It turns tools, calls and
results into text of ordinary messages, in the form of Hermes and Qwen, and leaves the rest to the model's own
template:

    tools              described before the system message, or before the first user message
    assistant's calls  <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    results            <tool_response>...</tool_response> in a user message; several in one, because some templates demand turns
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.base.paths import expand, missing_hint
from asyncrl_cli.base.safe_files import MIB, load_json, read_text, reason
from asyncrl_cli.base.storage import appearing_directory

TOOLS = "builtin:tools"
TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
REPLACED = (TEMPLATE, "chat_template.json", SETTINGS)

CHATML = """{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + eos_token + "\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""
"""For a model that has no template."""

WITH_TOOLS = """{%- set rewritten = namespace(messages=[], results="", about="") -%}
{%- if tools -%}
    {%- set rewritten.about = "You may call functions. They are, one per line:\\n<tools>\\n" -%}
    {%- for tool in tools -%}{%- set rewritten.about = rewritten.about + (tool | tojson) + "\\n" -%}{%- endfor -%}
    {%- set rewritten.about = rewritten.about + "</tools>\\nTo call one, write its name and arguments as JSON:\\n<tool_call>\\n"
        + '{"name": "<name>", "arguments": {"<argument>": "<value>"}}' + "\\n</tool_call>\\n\\n" -%}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "tool" -%}
        {%- set rewritten.results = rewritten.results + "<tool_response>\\n" + content + "\\n</tool_response>\\n" -%}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}
            {%- set rewritten.messages = rewritten.messages + [{"role": "user", "content": rewritten.results}] -%}
            {%- set rewritten.results = "" -%}
        {%- endif -%}
    {%- elif message.role == "assistant" -%}
        {%- set answer = namespace(text=content) -%}
        {%- for call in message.tool_calls or [] -%}
            {%- set arguments = call.function.arguments -%}
            {%- set answer.text = answer.text + ("\\n" if answer.text else "") + '<tool_call>\\n{"name": '
                + (call.function.name | tojson) + ', "arguments": ' + (arguments if arguments is string else arguments | tojson)
                + "}\\n</tool_call>" -%}
        {%- endfor -%}
        {%- set rewritten.messages = rewritten.messages + [{"role": "assistant", "content": answer.text}] -%}
    {%- else -%}
        {%- set rewritten.messages = rewritten.messages + [{"role": message.role, "content": rewritten.about + content}] -%}
        {%- set rewritten.about = "" -%}
    {%- endif -%}
{%- endfor -%}
{%- set messages = rewritten.messages -%}
{%- set tools = none -%}
"""


def with_template(directory: Path, chosen: str | None, cache: Path) -> Path:
    """The model's directory, or one in `cache` that has the template `chosen` (TOOLS or a file) and links to
    the model's files.

    Raises ConfigError or PreflightError, which name the key.
    """
    if chosen is None:
        return directory
    settings = (
        load_json(directory / SETTINGS, dict[str, Any], error=PreflightError)
        if (directory / SETTINGS).exists()
        else {}
    )
    template = WITH_TOOLS + _own_template(directory, settings) if chosen == TOOLS else _read(chosen)
    # The template that reads answers belongs to the replaced one.
    kept = {
        key: value for key, value in settings.items() if key not in ("chat_template", "response_template")
    }
    files = sorted(
        path for path in directory.iterdir() if path.name not in REPLACED and not path.name.startswith(".")
    )
    content = json.dumps([str(directory), [path.name for path in files], kept, template], sort_keys=True)
    made = cache / f"templated-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    if made.is_dir():
        return made
    try:
        with appearing_directory(made) as working:
            for path in files:
                os.symlink(path.absolute(), working / path.name)
            (working / SETTINGS).write_text(json.dumps(kept, indent=2), encoding="utf-8")
            (working / TEMPLATE).write_text(template, encoding="utf-8")
    except OSError as error:
        if not made.is_dir():  # else another run has made it meanwhile
            why = f"model.cache_dir: {cache} cannot be written: {reason(error)}"
            raise PreflightError(
                why, hint="set model.cache_dir to a directory that you can write to"
            ) from error
    return made


def _own_template(directory: Path, settings: dict[str, Any]) -> str:
    """The model's own template; ChatML if it has none."""
    if (directory / TEMPLATE).exists():
        return read_text(directory / TEMPLATE, max_bytes=MIB)
    found = settings.get("chat_template")
    if isinstance(found, list):  # several with names
        found = next(
            (one.get("template") for one in found if isinstance(one, dict) and one.get("name") == "default"),
            None,
        )
    return found if isinstance(found, str) else CHATML


def _read(chosen: str) -> str:
    path = expand(chosen)
    if chosen.startswith("builtin:"):
        raise ConfigError(
            f'model.chat_template: there is no "{chosen:.80}"', hint=f'"{TOOLS}", or the path of a Jinja file'
        )
    try:
        return read_text(path, max_bytes=MIB)
    except FileNotFoundError:
        raise ConfigError(f"model.chat_template: {path} does not exist", hint=missing_hint(path)) from None
    except (OSError, ValueError) as error:
        why = f"model.chat_template: {path!s:.300} cannot be read: {reason(error)}"
        raise ConfigError(why, hint=f'name a Jinja file, or "{TOOLS}"') from None
