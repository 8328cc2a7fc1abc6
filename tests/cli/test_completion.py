"""Completion: what `asyncrl` answers, and a real bash that asks a real one by Typer's script."""

import os
import subprocess
import sys

import pytest

from asyncrl_cli.cli.app import run

BASH = """
eval "$(asyncrl --show-completion bash)"
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "$line"
    [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )) COMPREPLY=()
    _asyncrl_completion asyncrl
    echo "${COMPREPLY[*]}"
done
"""
CASES = {
    "asyncrl tra": "train trace",
    "asyncrl train --profile part": "partial-rollout",
    "asyncrl train --profile agent-guess+st": "agent-guess+stale-samples agent-guess+stream-off-policy",
    "asyncrl status ": "second first",
    "asyncrl plan --set rollout.sl": "rollout.slots=",
    "asyncrl plan --set async_training.on_stale=d": "async_training.on_stale=drop",
    "asyncrl init jso": "jsonl",
    "asyncrl bench --simulate verl-7b-math-": "verl-7b-math-128",
    "asyncrl profiles keys on_stale": "",
}
BY_BASH = ("asyncrl train --profile part", "asyncrl plan --set async_training.on_stale=d")


@pytest.mark.parametrize(("line", "completed"), CASES.items())
def test_commands_profiles_runs_keys_and_values_are_completed(line, completed, tmp_path, monkeypatch, capsys):
    for age, name in enumerate(("second", "first")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "profile.toml").touch()
        os.utime(tmp_path / "runs" / name, (1e9 - age, 1e9 - age))
    monkeypatch.chdir(tmp_path)
    words = {"_ASYNCRL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run([])
    assert capsys.readouterr().out.split() == completed.split()


@pytest.mark.slow
def test_bash_completes_what_asyncrl_answers(tmp_path):
    command = tmp_path / "asyncrl"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m asyncrl_cli "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH],
        cwd=tmp_path,
        # bash warns of a locale that is not there
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LC_ALL": "C"},
        input="".join(f"{line}\n" for line in BY_BASH),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [CASES[line] for line in BY_BASH]
