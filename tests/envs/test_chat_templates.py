"""`model.chat_template`: any model's own template with tools, a file of the user's, and what is wrong with
either."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.cli.app import run
from asyncrl_cli.envs.chat import Chat, load_chat
from asyncrl_cli.envs.conversation import Conversation
from asyncrl_cli.job.driver_preparation import check_chat
from asyncrl_cli.models.model_directory import TOOLS, with_template
from asyncrl_cli.models.model_files import keep_model_files
from asyncrl_cli.profile.loaded import load
from tests.envs.chat_models import MODELS
from tests.envs.chat_models import TOOLS as OFFERED
from tests.envs.test_chat import completion_of

BY_NAME = {model.name: model for model in MODELS}
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ "
    "'<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The published template of SmolLM2-Instruct, which has no tools."""
CALL = '<tool_call>\n{"name": "search", "arguments": {"text": "a"}}\n</tool_call>'


def saved(directory: Path, model: str, template: str | None = "") -> Path:
    """A directory with the model's tokenizer. `template`: in place of its own; None: none at all."""
    BY_NAME[model].tokenizer.save_pretrained(directory)
    if template != "":
        (directory / "chat_template.jinja").unlink()
    if template:
        (directory / "chat_template.jinja").write_text(template)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 1}))
    return directory


def chat_in(directory: Path) -> Chat:
    return load_chat(directory, trust_remote_code=False, max_tokens=1000)


WITHOUT_TOOLS: dict[str, tuple[str, str | None]] = {
    "smollm2": ("qwen3", SMOLLM2),
    "gemma, which demands turns and has no system message": ("gemma", ""),
    "no template": ("qwen3", None),
}


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_a_model_without_tools_is_offered_tools_with_the_builtin_template(tmp_path, name):
    model, template = WITHOUT_TOOLS[name]
    own = saved(tmp_path / "own", model, template)
    chat = chat_in(with_template(own, TOOLS, tmp_path / "cache"))
    chat.check_turns()
    chat.check_tools()
    conversation = Conversation(chat)
    prompt = chat.tokenizer.decode(conversation.ask([{"role": "user", "content": "q?"}], OFFERED))
    assert prompt.count('"add_up"') == 1
    assert prompt.index('"add_up"') < prompt.index("q?")
    end = "<end_of_turn>" if model == "gemma" else chat.tokenizer.eos_token
    answer = conversation.take(completion_of(chat, f"{CALL}\n{CALL}{end}"))
    functions = [call["function"] for call in answer.message["tool_calls"]]
    assert functions == [{"name": "search", "arguments": {"text": "a"}}] * 2
    results = [{"role": "tool", "content": content} for content in ("r1", "r2")]
    again = conversation.ask(results, OFFERED)
    text = chat.tokenizer.decode(again)
    assert text.startswith(prompt), "what the model has seen stays as it was"
    assert "<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>" in text


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "q"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
    ],
)
def test_without_tools_the_models_own_template_writes_what_it_always_did(tmp_path, messages):
    own = saved(tmp_path / "own", "qwen3", SMOLLM2)
    chats = [chat_in(directory) for directory in (own, with_template(own, TOOLS, tmp_path / "cache"))]
    one, other = (chat.render(messages) for chat in chats)
    assert one == other


def test_a_file_replaces_the_template_and_goes_with_the_model(tmp_path):
    own = saved(tmp_path / "own", "qwen3")
    (own / "model.safetensors").write_bytes(b"weights")
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    made = with_template(own, str(file), tmp_path / "cache")
    assert made == with_template(own, str(file), tmp_path / "cache")
    assert (made / "model.safetensors").read_bytes() == b"weights"
    keep_model_files(made, tmp_path)
    shutil.rmtree(made)
    chat = chat_in(tmp_path / "model")
    assert chat.tokenizer.decode(chat.render([{"role": "user", "content": "q"}])) == "[q]"


def test_a_template_that_changed_makes_another_directory(tmp_path):
    own, file = saved(tmp_path / "own", "qwen3"), tmp_path / "mine.jinja"
    made = set[Path]()
    for text in ("a", "b"):
        file.write_text(text)
        made.add(with_template(own, str(file), tmp_path / "cache"))
    assert len(made) == 2


def test_a_template_that_is_not_there_is_refused_with_a_hint(tmp_path):
    own = saved(tmp_path / "own", "qwen3")
    (tmp_path / "tools.jinja").write_text("x")
    with pytest.raises(ConfigError, match="does not exist") as refused:
        with_template(own, str(tmp_path / "tool.jinja"), tmp_path / "cache")
    assert refused.value.hint == f"did you mean {tmp_path}/tools.jinja?"
    with pytest.raises(ConfigError, match='there is no "builtin:tool"') as refused:
        with_template(own, "builtin:tool", tmp_path / "cache")
    assert TOOLS in refused.value.hint
    with pytest.raises(ConfigError, match="it is a directory"):
        with_template(own, str(tmp_path), tmp_path / "cache")


def of_calculator(model: Path, *sets: str) -> list[str]:
    return [f"model.path={model}", "model.cache_dir=" + str(model.parent / "cache"), *sets]


def test_a_plan_refuses_a_model_that_cannot_be_offered_tools_and_the_hint_helps(tmp_path, capsys):
    own = saved(tmp_path / "own", "qwen3", SMOLLM2)

    def plan(*sets: str) -> int:
        words = [word for text in of_calculator(own, *sets) for word in ("--set", text)]
        return run(["plan", "--profile", "agent-calculator", *words])

    assert plan() == 3
    told = capsys.readouterr().err
    assert "the model cannot be offered tools: its chat template does not write tool calls" in told
    assert 'model.chat_template = "builtin:tools"' in told
    assert plan(f"model.chat_template={TOOLS}") == 0


def test_a_task_of_one_turn_needs_no_tools_of_the_template(tmp_path):
    own = saved(tmp_path / "own", "qwen3", SMOLLM2)
    check_chat(load("base", [f"model.path={own}"], environ={}).profile, own)
    with pytest.raises(PreflightError, match="cannot be offered tools"):
        check_chat(load("agent-calculator", of_calculator(own), environ={}).profile, own)


def test_a_builtin_model_keeps_its_template(tmp_path):
    with pytest.raises(ConfigError, match="the built-in models have a template of their own"):
        load("base", [f"model.chat_template={TOOLS}"], environ={})


def test_the_path_of_a_template_is_relative_to_the_profile(tmp_path, monkeypatch):
    def template_of(value: str) -> Any:
        (tmp_path / "own.toml").write_text(
            f'extends = "base"\n[model]\npath = "Qwen/Qwen3-0.6B"\nchat_template = "{value}"\n'
        )
        return load(str(tmp_path / "own.toml"), environ={}).profile.model.chat_template

    assert template_of("mine.jinja") == str(tmp_path / "mine.jinja")
    assert template_of(TOOLS) == TOOLS
