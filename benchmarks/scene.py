"""Starts, resumes and watches a run on a cluster of logical nodes on this machine, for
benchmarks/faults.py."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from benchmarks.kills import LONG, num_resumed
from ray._private.node import Node
from tests.cluster import RayNodes, processes_of
from tests.run.commands import arguments, lines

NODES = (0, 0), (1, 0), (1, 0)
SETS = (
    *LONG,
    "placement.trainer_workers=1",
    "placement.timeout_s=30",
    "rollout.workers=1",
    "rollout.max_restarts=20",
    "rollout.max_response_tokens=128",
    "rollout.call_timeout_s=20",
    "trainer.step_timeout_s=20",
    "weights.timeout_s=20",
    "async_training.trigger_parameter_sync_step=1",
    "async_training.staleness_threshold=1",
    "task.max_failed_ratio=1.0",
)
LIMIT_S = 200.0
RESTARTS = "lost", "away", "restarted"
TOLD = " WARNING asyncrl: ", " ERROR asyncrl: "
"""Of the log's lines those that are on the screen, too."""
NO_NEWS = "teaches nothing"
"""A warning of every run so small."""


@dataclass
class Scene:
    """A run on a cluster, begun and resumed by `begin`. `process`: the run's driver; `asyncrl submit --wait`,
    if it is a job."""

    directory: Path
    cluster: RayNodes
    ending: ExitStack
    runs_dir: Path
    name: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def run(self) -> Path:
        return self.runs_dir / self.name

    def command(self, command: str, *words: str, sets: tuple[str, ...] = ()) -> None:
        own = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.directory / "cache")}
        with (self.directory / "stderr").open("w") as err:
            self.process = subprocess.Popen(
                arguments(command, *words, "--runs-dir", str(self.runs_dir), sets=sets, verbose=False),
                cwd=self.directory,
                env=os.environ | own,
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
            )

    def begin(self, *, as_job: bool = False) -> None:
        """Begin the run, or resume it, and wait until it trains."""
        before, steps = num_resumed(self.run), len(self.steps)
        if steps:
            self.command("resume", self.name, "--address", self.cluster.address, "--ui", "plain")
        elif as_job:
            words = ("--profile", "partial-rollout", "--name", self.name, "--wait")
            self.command("submit", *words, "--address", self.cluster.dashboard, sets=SETS)
        else:
            words = ("--profile", "partial-rollout", "--name", self.name, "--ui", "plain")
            self.command("train", *words, "--address", self.cluster.address, sets=SETS)
        self.wait(lambda: not steps or num_resumed(self.run) > before)
        from_step = len(self.steps)
        self.wait(lambda: len(self.steps) >= from_step + 3)

    def wait(self, is_so: Callable[[], object]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert self.process is not None
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < end_s, "the run does not get on"
            time.sleep(0.05)

    @property
    def steps(self) -> list[dict[str, float]]:
        return lines(self.run / "metrics.jsonl")

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text()

    @property
    def log(self) -> Path:
        return self.run / "logs" / "latest" / "driver.log"

    def processes(self, *words: str) -> list[psutil.Process]:
        """Of all nodes, those whose command line has one of the words; the driver's children, too."""
        found = {process for node in self.cluster.nodes for process in processes_of(node)}
        return [process for process in found if any(word in command_of(process) for word in words)]

    def one(self, word: str) -> psutil.Process:
        return self.processes(word)[0]

    def node_with(self, word: str) -> Node:
        return next(
            node for node in self.cluster.nodes[1:] if any(word in command_of(p) for p in processes_of(node))
        )

    @property
    def is_whole(self) -> bool:
        """Whether no worker is being restarted or away."""
        events = lines(self.run / "events.jsonl")
        newest = {event["worker"]: event["event"] for event in events if event["event"] in RESTARTS}
        begun = [event["event"] for event in events if event["event"] in ("resumed", "lost")]
        return begun[-1:] == ["resumed"] or not {"lost", "away"} & {*newest.values()}

    def told(self, end: int) -> list[str]:
        """What the driver knows since its log ended at `end`: warnings and errors, or that it is stopping."""
        with self.log.open(errors="replace") as log:
            log.seek(end)
            news = [
                line.split(": ", 1)[1].strip()
                for line in log
                if any(told in line for told in TOLD) and NO_NEWS not in line
            ]
        try:
            phase = json.loads((self.run / "status.json").read_text())["phase"]
        except (OSError, ValueError):
            phase = ""
        return news or [phase for _ in range(1) if phase in ("stopping", "stopped", "failed")]

    @property
    def newest_checkpoint(self) -> tuple[int, int]:
        """Its step, and how many tokens a resume cannot go on with."""
        state = json.loads((self.run / "checkpoints" / "latest" / "loop_state.json").read_text())
        return state["step"], state["loop_state"]["running_tokens"]

    @property
    def tokens_discarded(self) -> int:
        return int(self.steps[-1]["waste/tokens_discarded"])

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def disk(directory: Path, megabytes: int) -> Iterator[None]:
    directory.mkdir(exist_ok=True)
    if megabytes:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(directory)], check=True
        )
    try:
        yield
    finally:
        if megabytes:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
