"""Starts a command of asyncrl in a session of its own, in which it outlives the terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WATCHED_S = 5.0
"""How long a detached command is watched: anything missing here (an engine, a file, a module) is found by
then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached:
    """`exit_code` and `output`: how the command ended, and what it printed, if it ended within `WATCHED_S`;
    else None and empty."""

    pid: int
    exit_code: int | None = None
    output: str = ""


def detach(arguments: Sequence[str], output: Path) -> Detached:
    """Start `asyncrl ARGUMENTS` without a terminal. Returns when it has ended, after `WATCHED_S`, or at a
    Ctrl-C, which the command does not get. Its output goes to the file `output`, which is removed if the
    command has ended."""
    from asyncrl_cli.base.storage import make_in, remove_if_empty

    command = [sys.executable, "-m", "asyncrl_cli", *arguments]
    opened, made_runs_dir = make_in(output.parent, lambda: output.open("w+b"))
    with opened as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            exit_code = child.wait(WATCHED_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            return Detached(pid=child.pid)
        file.seek(0)
        printed = file.read().decode(errors="replace")
    output.unlink(missing_ok=True)
    if made_runs_dir:
        remove_if_empty(output.parent)
    return Detached(pid=child.pid, exit_code=exit_code, output=printed)
