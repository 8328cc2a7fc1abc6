"""Runs whose weights are compared, version by version."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.run.commands import SMALL, descendants, lines, log_of, start

VARIED = (
    "eval.prompts=4",
    "task.reward=varied:score",
    f"task.import_path={Path(__file__).parent / 'rewards'}",
    "task.reward_workers=1",
    "task.rehearsal_items=0",
)
"""Rewards that change the weights in every step."""
DETERMINISTIC = (*SMALL, *VARIED, "run.deterministic=true", "rollout.workers=2")
"""Two workers, of which one may die."""
RANKS = ("placement.trainer_workers=3",)
"""As many as `colocate` makes of one trainer and two workers."""
SETS_OF = {
    "colocate": (),
    "on-policy-pipeline": RANKS,
    "one-step-off": (),
    "stale-samples": (),
    "partial-rollout": (),
    "agent-guess": ("task.reward=auto", "model.warm_start_steps=250", "rollout.max_response_tokens=6"),
}
"""What each profile has besides. Colocated, each worker has a rank, and on-policy-pipeline is compared with
it."""
LIMIT_S = 850.0


def fingerprints(run: Path) -> dict[int, str]:
    """Of every version that was loaded. All workers have loaded the same bytes."""
    found: dict[int, set[str]] = {}
    for event in lines(run / "events.jsonl"):
        if event["event"] == "loaded":
            found.setdefault(event["version"], set()).add(event["fingerprint"])
    assert all(len(prints) == 1 for prints in found.values()), found
    return {version: min(prints) for version, prints in sorted(found.items())}


def signal_worker(pid: int, worker: str, number: signal.Signals) -> bool:
    """Send it to the worker's actor; false if that has no process now."""
    pids = {one for one in descendants(pid) if log_of(one) == f"{worker}.log"}
    with suppress(psutil.NoSuchProcess):
        for actor in (one for one in pids if psutil.Process(one).ppid() not in pids):
            os.kill(actor, number)
            return True
    return False


def train(
    directory: Path, profile: str, name: str, *sets: str, kill_after: int | None = None
) -> tuple[dict[int, str], float]:
    """A whole run; its fingerprints, and the CPU seconds of all of its processes. `kill_after`: so many
    steps, then rollout-1 is killed, and rollout-0 stands still for a second."""
    words = ("--profile", profile, "--name", name, "--ui", "plain")
    process = start(directory, "train", *words, sets=sets)
    cpu_s, deadline_s = dict[int, float](), time.monotonic() + LIMIT_S
    run, is_killed = directory / "runs" / name, kill_after is None
    while process.poll() is None:
        assert time.monotonic() < deadline_s, f"{name} takes longer than {LIMIT_S:g} s"
        for pid in (process.pid, *descendants(process.pid)):
            with suppress(psutil.NoSuchProcess):
                times = psutil.Process(pid).cpu_times()
                cpu_s[pid] = times.user + times.system
        if not is_killed and kill_after is not None and len(lines(run / "metrics.jsonl")) >= kill_after:
            signal_worker(process.pid, "rollout-0", signal.SIGSTOP)
            is_killed = signal_worker(process.pid, "rollout-1", signal.SIGKILL)
            time.sleep(1)
            signal_worker(process.pid, "rollout-0", signal.SIGCONT)
        time.sleep(0.3)
    _, err = process.communicate()
    assert process.returncode == 0, err
    if kill_after is not None:
        lost = [event for event in lines(run / "events.jsonl") if event["event"] == "lost"]
        assert [event["worker"] for event in lost] == ["rollout-1"]
    return fingerprints(run), sum(cpu_s.values())


@contextmanager
def busy_core() -> Iterator[None]:
    """A process that computes beside the block."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()
