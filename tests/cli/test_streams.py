"""Streams, locales and directories that fail a command: one error or none, the right exit code, never a
traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl_cli.cli.app import run

ASCII = {
    "LANG": "C",
    "LC_ALL": "C",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "ascii",
    "PYTHONUTF8": "0",
}
NARROW = {"TERM": "dumb", "COLUMNS": "1"}
MISTAKE = "plan -p nope"


def asyncrl(
    command: str, redirections: str = "", cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    line = f"{sys.executable} -m asyncrl_cli {command} {redirections}"
    return subprocess.run(
        line, shell=True, cwd=cwd, env=os.environ | environment, capture_output=True, timeout=60, check=False
    )  # its arguments are written here


@pytest.mark.slow
@pytest.mark.parametrize("command", ["--help", "plan -p base --gpus 2 --json"])
def test_a_full_stdout_is_one_error(command):
    done = asyncrl(command, ">/dev/full")
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == [
        "error: stdout cannot be written: No space left on device",
        "hint: check where it is redirected to",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "redirections", "code"), [("plan -p base", ">&-", 0), (MISTAKE, "<&- >&- 2>&-", 2)]
)
def test_closed_streams_change_no_exit_code(command, redirections, code):
    done = asyncrl(command, redirections)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_errors_that_nobody_can_read_are_still_exit_codes():
    assert asyncrl(f"{MISTAKE} --json", ">/dev/full 2>/dev/full").returncode == 2


def test_no_file_of_ours_gets_the_number_of_a_closed_stream(tmp_path):
    code = (
        "import os, sys; from asyncrl_cli.cli.console import open_streams; open_streams(); file = "
        "open('mine', 'w'); "
        "os.write(1, b'x'); os.write(2, b'x'); print('y'); sys.stdout.flush(); assert file.fileno() > 2; "
        "import subprocess; subprocess.run([sys.executable, '-c', 'import os; assert os.dup(2) > 2'], "
        "check=True)"
    )
    subprocess.run(
        f'{sys.executable} -c "{code}" <&- >&- 2>&-', shell=True, cwd=tmp_path, check=True, timeout=60
    )
    assert (tmp_path / "mine").read_bytes() == b""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["--help", "plan -p base --gpus 2"])
def test_any_locale_and_any_width_will_do(command):
    """These commands warn of nothing: without `--gpus`, a plan may warn of too few cores."""
    done = asyncrl(command, **ASCII, **NARROW)
    assert (done.returncode, done.stderr) == (0, b"")
    done.stdout.decode("ascii")


@pytest.mark.slow
def test_an_argument_that_the_locale_cannot_read_is_told():
    done = asyncrl("train -p é.toml", **ASCII)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ")


@pytest.mark.parametrize(
    ("command", "code"),
    [("train -p base --name é", 2), ("train -p base --set model.path=/tmp/é --dry-run", 3)],
)
def test_a_name_and_a_path_that_the_locale_cannot_read_are_told(command, code, capsys):
    """Python gives each byte of such a word as a surrogate."""
    assert (
        run([os.fsdecode(word).encode().decode("ascii", "surrogateescape") for word in command.split()])
        == code
    )
    said = capsys.readouterr().err
    assert "\nerror: " in f"\n{said}"
    assert "this is a bug" not in said


@pytest.mark.slow
def test_a_directory_that_was_deleted_is_told(tmp_path):
    done = asyncrl(f"true; rmdir $PWD; {sys.executable} -m asyncrl_cli plan -p base --json", cwd=tmp_path)
    assert done.returncode == 3
    assert b"error: the working directory no longer exists" in done.stderr
    assert json.loads(done.stdout)["exit_code"] == 3
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("text", ["\x1b[2J\x9b31m\u202ea\rb", "[bold]x[/]"])
@pytest.mark.parametrize(
    "arguments",
    ["plan -p %s", "plan -p base --set %s=1", "plan -p base --set rollout.engine=%s", "%s", "status %s"],
)
def test_what_was_typed_comes_back_neutral(arguments, text, capsys):
    assert run([word.replace("%s", text) for word in arguments.split()]) == 2
    said = capsys.readouterr().err
    assert not set(said) & {"\x1b", "\x9b", "\u202e", "\r"}
    if text.startswith("["):
        assert text in said
