"""Completion by a real shell, which asks a real `asyncrl`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BASH = """
eval "$(asyncrl completion bash)"
compopt() { NOSPACE=$2; }
for line in "${LINES_TO_COMPLETE[@]}"; do
    COMP_LINE="$line" COMP_POINT=${#line} COMPREPLY=() NOSPACE=
    _asyncrl asyncrl
    echo "${COMPREPLY[*]}$NOSPACE"
done
"""
ZSH = """
compdef() { : }
_files() { print -r -- "files" }
compadd() { local all=("$@"); print -rn -- "${all[@]:${all[(i)--]}} " }
eval "$(asyncrl completion zsh)"
for line in "${LINES_TO_COMPLETE[@]}"; do
    words=("${(@s: :)line}") CURRENT=$#words
    _asyncrl
    print
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
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with two runs, the second one newer, and an `asyncrl` that is this one."""
    for age, name in enumerate(("second", "first")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "profile.toml").touch()
        os.utime(tmp_path / "runs" / name, (1e9 - age, 1e9 - age))
    command = tmp_path / "asyncrl"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m asyncrl_cli "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return tmp_path


def completed(shell: str, script: str, here: Path) -> list[str]:
    lines = " ".join(f'"{line}"' for line in CASES)
    done = subprocess.run(
        [shell, "--norc" if shell == "bash" else "-f", "-c", f"LINES_TO_COMPLETE=({lines})\n{script}"],
        cwd=here,
        # bash warns of a locale that is not there
        env={**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.slow
def test_bash_completes_commands_profiles_runs_keys_and_values(here: Path) -> None:
    expected = dict(CASES)
    expected["asyncrl plan --set rollout.sl"] = "rollout.slots=nospace"
    # bash replaces only what follows the "="
    expected["asyncrl plan --set async_training.on_stale=d"] = "drop"
    assert dict(zip(CASES, completed("bash", BASH, here), strict=True)) == expected


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_commands_profiles_runs_keys_and_values(here: Path) -> None:
    found = (" ".join(line.split()) for line in completed("zsh", ZSH, here))
    assert dict(zip(CASES, found, strict=True)) == CASES
