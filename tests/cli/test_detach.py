"""A run without its terminal: train --detach, --resume auto, watch."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys

import pytest

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.cli import runs
from asyncrl_cli.cli.app import run
from asyncrl_cli.cli.watch import _follow
from asyncrl_cli.job.driver_run import Run
from asyncrl_cli.observe.run_status import next_command
from asyncrl_cli.observe.terminal import key_presses
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.resolved import to_toml
from tests.statuses import write_status

BRIEF = ("train", "--profile", "partial-rollout", "--name", "first")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that were to be detached."""
    commands: list[list[str]] = []

    class Child:
        pid = 4711

        def __init__(self, command: list[str], **options: object) -> None:
            commands.append(command[3:])

        def wait(self, timeout_s: float) -> int:
            raise subprocess.TimeoutExpired("", timeout_s)

    monkeypatch.setattr(runs, "Popen", Child)
    return commands


def test_a_detached_run_is_the_same_command_and_what_to_type_next_is_said(started, tmp_path, capsys):
    assert run([*BRIEF, "--set", "run.seed=3", "--runs-dir", str(tmp_path), "--detach", "--json"]) == 0
    out, err = capsys.readouterr()
    place = ["--runs-dir", str(tmp_path), "--ui", "none", "--address", "local"]
    assert started == [[*BRIEF[:3], "--set", "run.seed=3", "--name", "first", "--resume", "never", *place]]
    assert json.loads(out) == {"run": "first", "pid": 4711, "directory": str(tmp_path / "first")}
    assert f"asyncrl watch first --runs-dir {tmp_path}" in err
    assert f"if it does not start, {tmp_path / '.first-detached.out'} says why" in err


@pytest.mark.slow
def test_a_detached_start_that_fails_is_told_with_its_exit_code_and_leaves_nothing(
    tmp_path, capsys, monkeypatch
):
    """A real child: a source that does not exist is found only when the task is loaded."""
    monkeypatch.setattr(runs, "WATCHED_S", 240.0)
    sets = ("--set", "task.source=jsonl:nothing.jsonl", "--runs-dir", str(tmp_path / "runs"))
    assert run([*BRIEF, *sets, "--detach"]) == 2
    assert "nothing.jsonl" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_resume_auto_begins_what_has_not_begun_and_leaves_alone_what_is_done(started, tmp_path, capsys):
    again = [*BRIEF, "--runs-dir", str(tmp_path), "--resume", "auto", "--detach"]
    assert run(again) == 0
    assert len(started) == 1
    directory = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    write_status(directory.path, phase="stopped")
    directory.close()
    assert run(again) == 0
    assert run(again[:-3]) == 4  # without it, the name is taken
    write_status(directory.path, phase="done")
    capsys.readouterr()
    assert run(again) == 0
    assert len(started) == 2
    assert "run 'first' is done" in capsys.readouterr().err


def test_what_was_killed_before_its_first_checkpoint_begins_anew_by_the_command_that_its_status_names(
    started, tmp_path, capsys, monkeypatch
):
    begun: list[Run] = []
    monkeypatch.setattr(runs, "run_to_its_end", lambda run, as_json: begun.append(run))
    toml = to_toml(load("partial-rollout", ["run.train_steps=7"]).profile, {}, only_given=False)
    directory = RunDirectory.create(tmp_path, "first", profile_toml=toml, resolved={})
    (directory.start_attempt() / "driver.log").write_text("killed\n", encoding="utf-8")
    directory.metrics.touch()
    write_status(directory.path, phase="running")
    _, *again = shlex.split(next_command(directory.path, "killed"))
    assert run(again) == 4
    assert directory.path.exists(), "its driver is alive"
    directory.close()
    (directory.checkpoints / "step-000003").mkdir()
    assert run(again) == 4
    assert directory.path.exists(), "it may be resumed"
    (directory.checkpoints / "step-000003").rmdir()
    write_status(directory.path, phase="running", checkpoint="step-000003")
    capsys.readouterr()
    assert run(again) == 4
    assert directory.path.exists(), "its checkpoints may come back"
    assert "are gone: the last that it wrote was step-000003" in capsys.readouterr().err
    assert next_command(directory.path, "killed").startswith("asyncrl logs first")
    write_status(directory.path, phase="running")
    assert run([*again, "--detach"]) == 0
    assert directory.path.exists(), "the child reads its profile"
    assert run(again) == 0
    assert not directory.path.exists()
    assert (tmp_path / ".first-failed-start" / "attempt-1" / "driver.log").read_text() == "killed\n"
    assert "killed before its first checkpoint and starts anew" in capsys.readouterr().err
    assert [(one.name, one.profile.run.train_steps) for one in begun] == [("first", 7)]
    assert len(started) == 1


def test_a_run_elsewhere_is_resumed_with_its_own_place_in_what_to_type_next(started, tmp_path, capsys):
    directory = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    directory.close()
    (directory.checkpoints / "step-000003").mkdir()
    assert run(["resume", str(directory.path), "--detach", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["directory"] == str(directory.path)
    assert f"asyncrl watch first --runs-dir {tmp_path}" in err
    assert started[0][:4] == ["resume", str(directory.path), "--runs-dir", str(tmp_path)]


def test_watching_a_start_that_failed_names_the_file_that_says_why(tmp_path):
    gone, output = tmp_path / "first", tmp_path / ".first-detached.out"
    with pytest.raises(RefusedError) as refused:
        _follow(gone, print, print)
    assert refused.value.hint == "the command that started it says why"
    output.touch()
    with pytest.raises(RefusedError) as refused:
        _follow(gone, print, print)
    assert refused.value.hint == f"{output} says why"


def test_resume_auto_needs_a_name_that_stays(capsys):
    assert run(["train", "--profile", "partial-rollout", "--resume", "auto"]) == 2
    assert "--name NAME, the same each time" in capsys.readouterr().err


def test_a_key_is_read_without_enter_and_the_terminal_is_as_before(monkeypatch):
    controller, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(os, "tcgetpgrp", lambda number: os.getpgrp())
        import termios

        before = termios.tcgetattr(stdin)
        with key_presses() as key:
            assert key(0.0) == ""
            os.write(controller, b"q")
            assert key(5.0) == "q"
        assert termios.tcgetattr(stdin) == before
    os.close(controller)


def test_watching_as_json_is_a_line_per_look_until_the_end(tmp_path, capsys):
    directory = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    write_status(directory.path, phase="done")
    directory.close()
    assert run(["watch", "first", "--runs-dir", str(tmp_path), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert (json.loads(line)["phase"], json.loads(line)["liveness"]) == ("done", "ended")


def test_the_newest_run_is_watched_until_it_ends_and_leaves_its_totals(tmp_path, capsys):
    assert run(["watch", "--runs-dir", str(tmp_path)]) == 2
    assert "has no runs" in capsys.readouterr().err
    for name in ("older", "newer"):
        directory = RunDirectory.create(tmp_path, name, profile_toml="", resolved={})
        write_status(directory.path, phase="done")
        directory.close()
    os.utime(tmp_path / "older" / "status.json", (1, 1))
    assert run(["watch", "--runs-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "newer"
    assert run(["watch", "--runs-dir", str(tmp_path)]) == 0
    assert "done" in capsys.readouterr().out
