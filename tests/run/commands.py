"""Real `asyncrl` commands in real processes, small enough for a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

SMALL_SETS = """
    run.train_steps=10 checkpoint.every_steps=2 model.warm_start_steps=20 trainer.ppo_mini_batch_size=4
    rollout.n=4 rollout.slots=16 rollout.max_response_tokens=48
    task.train_prompts=200 eval.prompts=16 eval.every_versions=0
"""
SMALL = tuple(SMALL_SETS.split())
ENDLESS = (*SMALL, "run.train_steps=100000")
"""Longer than any test, on any machine: it is for the test to end it."""
PACED = (
    "task.reward=paced:score",
    f"task.import_path={Path(__file__).parent / 'rewards'}",
    "task.reward_workers=1",
)
LONG = (*ENDLESS, *PACED, "task.rehearsal_items=0")
"""The same at a pace at which it computes little while the test waits: half a second for a step."""
LIMIT_S = 400
"""A bound on what takes up to a minute."""
SOON_S = 40.0
"""A bound on what takes seconds. An unnoticed death would cost `rollout.call_timeout_s`, an unnoticed Ctrl-C
`run.stop_grace_s`."""
GONE_WITHIN_S = 30.0
"""A bound on what takes up to 5 s. Without the reaper it would be a minute."""

started: list[subprocess.Popen[str]] = []
"""All commands that this test module has started."""


def arguments(command: str, *words: str, sets: tuple[str, ...] = (), verbose: bool = True) -> list[str]:
    settings = [word for setting in sets for word in ("--set", setting)]
    return [sys.executable, "-m", "asyncrl_cli", *(["-v"] if verbose else []), command, *words, *settings]


def start(
    directory: Path,
    command: str,
    *words: str,
    sets: tuple[str, ...] = (),
    verbose: bool = True,
    **environment: str,
) -> subprocess.Popen[str]:
    """A command in `directory`, in a process group of its own, with one compute thread. It ends with the test
    (conftest.py)."""
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
    """Ctrl-C as an impatient user presses it. Returns the exit code, both outputs, and the seconds until the
    end."""
    began_s = time.monotonic()
    for _ in range(3):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
    return *finish(process), time.monotonic() - began_s


def train(
    directory: Path, profile: str, name: str, *sets: str, limit_s: float = LIMIT_S
) -> tuple[int, str, str]:
    words = ("--profile", profile, "--name", name, "--ui", "plain")
    return finish(start(directory, "train", *words, sets=(*SMALL, *sets)), limit_s)


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a jsonl file that may still be written."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@dataclass(frozen=True)
class Finished:
    """What a run has written that has ended: the lines of metrics.jsonl, those of events.jsonl, and
    status.json."""

    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]
    status: dict[str, Any]

    @classmethod
    def of(cls, run: Path) -> Finished:
        status = json.loads((run / "status.json").read_text())
        return cls(lines(run / "metrics.jsonl"), lines(run / "events.jsonl"), status)

    def largest(self, key: str) -> float:
        return max(step[key] for step in self.steps)

    def named(self, event: str) -> list[dict[str, Any]]:
        return [found for found in self.events if found["event"] == event]

    def assert_all_admitted_was_trained(self, steps: int) -> None:
        """Four groups in each step; no response was cut."""
        assert self.status["phase"] == "done"
        assert [step["step"] for step in self.steps] == list(range(1, steps + 1))
        assert [step["ledger/trained"] for step in self.steps] == [4 * step["step"] for step in self.steps]
        last = self.steps[-1]
        assert last["ledger/admitted_total"] - last["ledger/requeued"] == 4 * steps
        assert last["ledger/dropped"] == 0
        assert self.largest("fully_async/partial/max_partial_span") == 0


def wait_until(process: subprocess.Popen[str], look: Callable[[], T], what: str) -> T:
    """Call `look` until it returns something, and return that. Fails after `LIMIT_S`, or if the process ends
    before."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        has_ended = process.poll() is not None
        if found := look():
            return found
        assert not has_ended, (what, process.communicate())
        assert time.monotonic() < deadline_s, f"{what}: not within {LIMIT_S} s"
        time.sleep(0.05)


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    wait_until(process, lambda: len(lines(run / "metrics.jsonl")) >= steps, f"step {steps}")


def wait_for_checkpoint(process: subprocess.Popen[str], run: Path) -> None:
    """It is written beside the steps that follow it."""
    wait_until(process, (run / "checkpoints" / "latest" / "manifest.json").exists, "a checkpoint")


def suspend(pid: int) -> None:
    """Stop a process. Returns when none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + SOON_S
    while not {_state(thread) for thread in _threads(pid)} <= {b"T", b"Z", b"X", b""}:
        assert time.monotonic() < deadline_s, f"process {pid} does not stop"
        time.sleep(0.01)


def descendants(pid: int) -> set[int]:
    """Pids of all living descendants."""
    found: set[int] = set()
    pending = [pid]
    while pending:
        for thread in _threads(pending.pop()):
            with suppress(OSError):  # it has just ended
                children = set(map(int, (thread / "children").read_text().split())) - found
                found |= children
                pending.extend(children)
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if _is_alive(pid)}


def wait_until_gone(pids: set[int], limit_s: float = GONE_WITHIN_S) -> set[int]:
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


def log_of(pid: int) -> str:
    """The name of the file that a process writes its output to, "" if it is gone."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/fd/1"))
    except OSError:
        return ""


def kill(process: subprocess.Popen[str], number: signal.Signals) -> None:
    process.send_signal(number)


def _is_alive(pid: int) -> bool:
    return _state(Path(f"/proc/{pid}")) not in (b"Z", b"X", b"")


def _state(directory: Path) -> bytes:
    """Of a process or thread, b"" if it is gone."""
    try:
        return (directory / "stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return b""


def _threads(pid: int) -> list[Path]:
    with suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []
