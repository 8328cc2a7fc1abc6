"""What a user gets wrong, and what is said: message, hint and exit code, on stderr only."""

from __future__ import annotations

import json

import pytest

from asyncrl_cli.base.errors import StallError
from asyncrl_cli.cli import app, plan_report
from asyncrl_cli.cli.app import run
from asyncrl_cli.cli.console import print_json
from asyncrl_cli.engines.vllm import vllm_kind

pytestmark = pytest.mark.usefixtures("quick_task")
MISTAKES = [
    (["trian"], 2, "no such command 'trian'", "asyncrl --help"),
    (["train"], 2, "missing option '--profile'", "asyncrl train --help"),
    (["train", "--profile"], 2, "'--profile' requires an argument", "asyncrl train --help"),
    (["train", "-p", "base", "--nmae", "x"], 2, "no such option: --nmae", "asyncrl train --help"),
    (["train", "-p", "base", "--ui", "fancy"], 2, "'fancy' is not one of", "asyncrl train --help"),
    (["train", "-p", "partial-rolout"], 2, "there is no profile 'partial-rolout'", "`partial-rollout`"),
    (["train", "-p", "base", "--name", "a/b"], 2, "run.name 'a/b'", "--name"),
    (["plan", "-p", "base", "--set", "rollout.slot=3"], 2, "unknown key rollout.slot", "rollout.slots"),
    (
        ["plan", "-p", "base", "--set", "rollout.enforce_eager=true"],
        2,
        "rollout.enforce_eager",
        "rollout.engine=vllm",
    ),
    (
        ["plan", "-p", "base", "--set", "algorithm.loss_mode=gpso"],
        2,
        'loss_mode = "gpso" is not known',
        "gspo",
    ),
    (["profiles", "show", "bas"], 2, "there is no profile 'bas'", "`base`"),
    (["init", "parquet", "x"], 2, "there is no template 'parquet'", "jsonl"),
    (["status", "--runs-dir", "/nonexistent"], 2, "/nonexistent has no runs", "asyncrl train"),
    (["stop", "x", "--runs-dir", "/nonexistent"], 2, "no run 'x'", "/nonexistent has no runs"),
    (["logs", "x", "--runs-dir", "/nonexistent"], 2, "no run 'x'", "/nonexistent has no runs"),
    (["resume", "x", "--runs-dir", "/nonexistent"], 2, "'x'", ""),
]
"""Arguments; exit code, part of the message, part of the hint."""


@pytest.mark.parametrize(("arguments", "code", "message", "hint"), MISTAKES)
def test_a_mistake_is_told_with_its_hint_and_exit_code(arguments, code, message, hint, capsys):
    assert run(arguments) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert message in said.err
    assert hint in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["plan", "-p", "nope", "--json"], "there is no profile 'nope'", 2),
        (["train", "--json"], "missing option '--profile'", 2),
        (["status", "--json", "--runs-dir", "/nonexistent"], "/nonexistent has no runs", 2),
        (["plan", "-p", "base", "--set", "placement.gpus=8", "--gpus", "0", "--json"], "8 GPUs", 3),
    ],
)
def test_whoever_asks_for_json_gets_the_error_as_json_too(arguments, message, code, capsys):
    assert run(arguments) == code
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert set(document) == {"error", "hint", "exit_code"}
    assert message in document["error"]
    assert document["exit_code"] == code
    assert said.err == f"error: {document['error']}\nhint: {document['hint']}\n"


def test_a_command_that_has_printed_its_document_prints_no_second_one(capsys, tmp_path, monkeypatch):
    """As a run that failed, whose summary has the error."""

    def printed(*arguments: object, **options: object) -> None:
        print_json({"phase": "failed"})
        raise StallError("nobody moved")

    monkeypatch.setattr(plan_report, "print_plan", printed)
    for _ in range(2):
        assert run(["plan", "-p", "base", "--json"]) == 1
        assert json.loads(capsys.readouterr().out) == {"phase": "failed"}
    monkeypatch.undo()
    assert run(["plan", "-p", "nope", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_a_value_that_is_none_of_the_choices_is_told_in_our_words(capsys):
    assert run(["export", "x", "--dtype", "float16"]) == 2
    said = capsys.readouterr().err
    assert "error: invalid value for '--dtype': 'float16' is not one of 'float32', 'bfloat16'" in said
    assert "Value error" not in said


def test_an_unknown_environment_name_is_told(capsys, monkeypatch):
    monkeypatch.setenv("ASYNCRL_ROLLOUT__SLOT", "8")
    assert run(["plan", "-p", "base"]) == 2
    assert "hint: did you mean ASYNCRL_ROLLOUT__SLOTS?" in capsys.readouterr().err


def test_a_traceback_is_shown_only_with_v(capsys):
    assert run(["-v", "plan", "-p", "nope"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "error: there is no profile 'nope'" in err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            ExceptionGroup("tasks", [ValueError("other"), StallError("nobody moved", hint="wait")]),
            1,
            "nobody moved",
        ),
        (RuntimeError("broken"), 1, "RuntimeError: broken"),
        (
            RuntimeError("operator torchvision::nms does not exist"),
            3,
            "hint: asyncrl doctor --fix removes torchvision",
        ),
        (RuntimeError("torchaudio has no backend for this file"), 1, "RuntimeError: torchaudio"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_of_any_kind_end_in_one_line_and_a_code(error, code, said, capsys, monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(plan_report, "print_plan", fail)
    monkeypatch.setattr(vllm_kind, "broken_packages", lambda: ["torchvision"])
    assert app.run(["plan", "-p", "base"]) == code
    assert said in capsys.readouterr().err


def test_warnings_go_to_stderr_and_do_not_stop_the_command(capsys):
    how = ["--set", "rollout.top_p=0.5", "--set", "rollout.sampling_mask=false"]
    assert run(["plan", "-p", "base", *how, "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("warning: rollout.sampling_mask = false with top_p = 0.5")
    assert said.out.startswith("{")


def test_a_file_that_is_no_toml_is_told_with_its_line(capsys, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text("[run\n", encoding="utf-8")
    assert run(["train", "--profile", str(path)]) == 2
    assert f"error: {path}:1:" in capsys.readouterr().err
