"""Real `asyncrl` commands in real processes, small enough for a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SMALL = (
    "run.train_steps=10",
    "model.warm_start_steps=20",
    "trainer.ppo_mini_batch_size=4",
    "rollout.n=4",
    "rollout.slots=16",
    "rollout.max_response_tokens=48",
    "task.train_prompts=200",
    "eval.prompts=16",
    "eval.every_versions=0",
    "checkpoint.every_steps=2",
)
LONG = (*SMALL, "run.train_steps=400")
"""Longer than any test: it is for the test to end it."""
LIMIT_S = 180

started: list[subprocess.Popen[str]] = []
"""All commands that this test module has started."""


def arguments(command: str, *words: str, sets: tuple[str, ...] = (), verbose: bool = True) -> list[str]:
    settings = [word for setting in sets for word in ("--set", setting)]
    return [sys.executable, "-m", "asyncrl_cli", *(["-v"] if verbose else []), command, *words, *settings]


def start(
    directory: Path, command: str, *words: str, sets: tuple[str, ...] = (), verbose: bool = True, **environment: str
) -> subprocess.Popen[str]:
    """A command in `directory`, in a process group of its own, with one compute thread. It ends with the test (conftest.py)."""
    process = subprocess.Popen(
        arguments(command, *words, sets=sets, verbose=verbose),
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    return process


def finish(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


def interrupted_thrice(process: subprocess.Popen[str]) -> tuple[int, str, str, float]:
    """Ctrl-C as an impatient user presses it. Returns the exit code, both outputs, and the seconds until the end."""
    began_s = time.monotonic()
    for _ in range(3):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
    return *finish(process), time.monotonic() - began_s


def train(directory: Path, profile: str, name: str, *sets: str, limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    words = ("--profile", profile, "--name", name, "--ui", "plain")
    return finish(start(directory, "train", *words, sets=(*SMALL, *sets)), limit_s)


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a jsonl file that may still be written."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while len(lines(run / "metrics.jsonl")) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, "the run does not get on"
        time.sleep(0.05)


def descendants(pid: int) -> set[int]:
    """Pids of all living descendants."""
    found: set[int] = set()
    pending = [pid]
    while pending:
        for task in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
            children = {int(child) for child in task.read_text().split()} - found
            found |= children
            pending.extend(children)
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if _is_alive(pid)}


def wait_until_gone(pids: set[int], limit_s: float) -> set[int]:
    """Who is still there after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while alive(pids) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return alive(pids)


def command_line(pid: int) -> bytes:
    """Of a process, b"" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill(process: subprocess.Popen[str], number: signal.Signals) -> None:
    os.kill(process.pid, number)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")
