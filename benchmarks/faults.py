"""Faults of a run on a cluster, one after the other: when the driver notices, how the run ends, what is lost,
how a resume goes.

    python -m benchmarks.faults --directory DIR --faults 'SIGHUP;trainer node'   begins a run in DIR, or
                                                                                 resumes it
    python -m benchmarks.faults --directory DIR --table                          prints DIR/faults.jsonl

The cluster consists of logical nodes on this machine (tests/cluster.py): a head without CPUs, and two nodes
of one CPU each, for a trainer rank and a rollout worker. The driver is a separate process or a job. If a
fault ends the run, it is resumed on the remaining nodes and on new ones before the next fault. A row is right
if nothing hangs, no worker process is left behind, and every group of the history that counts was trained
once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path

import psutil
from benchmarks.kills import trained_once
from benchmarks.scene import LIMIT_S, NODES, Scene, command_of, disk
from ray.job_submission import JobSubmissionClient
from tests.cluster import processes_of, ray_nodes
from tests.run.commands import lines

UNKNOWN_S = 15.0
"""A fault of which the driver says nothing for so long has not disturbed it."""
GONE_WITHIN_S = 90.0
"""A worker's process that is there so long after its run has ended was left behind."""
WORKERS = "ray::RankHost", "ray::RolloutHost", "child_host reward"
HOG = """
import ray, sys, time
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=0, max_concurrency=2)
class Hog:
    def __init__(self):
        self.kept = []
    def fill(self):
        for megabytes in (16, 4, 1):
            try:
                while len(self.kept) < 200:
                    self.kept.append(ray.put(b"x" * (megabytes << 20)))
            except Exception as full:
                told = type(full).__name__
        return len(self.kept), told

hog = Hog.options(scheduling_strategy=NodeAffinitySchedulingStrategy(sys.argv[2], soft=False)).remote()
print(ray.get(hog.fill.remote()), flush=True)
time.sleep(600)
"""


def to_driver(number: signal.Signals) -> Callable[[Scene], None]:
    return lambda scene: os.kill(scene.process.pid, number)  # type: ignore[union-attr]


def to_one(word: str) -> Callable[[Scene], None]:
    return lambda scene: scene.one(word).kill()


def to_node(word: str) -> Callable[[Scene], None]:
    """Another node joins in its place."""

    def kill(scene: Scene) -> None:
        scene.cluster.kill(scene.node_with(word))
        scene.cluster.add(1)

    return kill


def freeze(word: str) -> Callable[[Scene], None]:
    """As if the network had lost the node: its processes live and do not answer. Another node joins."""

    def stop(scene: Scene) -> None:
        for process in list(processes_of(scene.node_with(word))):
            process.suspend()
        scene.cluster.add(1)

    return stop


def stop_job(scene: Scene) -> None:
    client = JobSubmissionClient(scene.cluster.dashboard)
    client.stop_job(
        next(job.submission_id for job in client.list_jobs() if job.submission_id and job.status == "RUNNING")
    )


def fill_store(scene: Scene) -> None:
    node = scene.node_with("ray::RankHost")
    words = [sys.executable, "-c", HOG, scene.cluster.address, node.node_id]
    hog = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    scene.ending.callback(hog.kill)
    assert hog.stdout is not None
    print("objects in the store, and what came of one more:", hog.stdout.readline().strip())


def wait_for_full(scene: Scene) -> None:
    """The disk fills by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`goes_on`: the run lives; `config`: of the cluster; `disk_mb`: of the file system that the runs are
    on."""

    name: str
    strike: Callable[[Scene], None]
    goes_on: bool = False
    as_job: bool = False
    disk_mb: int = 0
    config: tuple[tuple[str, float], ...] = ()


FAULTS = (
    Fault(name="SIGHUP", strike=to_driver(signal.SIGHUP)),
    Fault(name="SIGTERM", strike=to_driver(signal.SIGTERM)),
    Fault(
        name="SIGTERM to the group",
        strike=lambda scene: os.killpg(scene.process.pid, signal.SIGTERM),  # type: ignore[union-attr]
    ),
    Fault(name="SIGUSR1", strike=to_driver(signal.SIGUSR1)),
    Fault(name="job stop", strike=stop_job, as_job=True),
    Fault(name="driver", strike=to_driver(signal.SIGKILL)),
    Fault(name="reward process", strike=to_one("child_host reward"), goes_on=True),
    Fault(name="rollout worker", strike=to_one("ray::RolloutHost"), goes_on=True),
    Fault(name="trainer rank", strike=to_one("ray::RankHost")),
    Fault(name="rollout node", strike=to_node("ray::RolloutHost"), goes_on=True),
    Fault(name="trainer node", strike=to_node("ray::RankHost")),
    Fault(name="head", strike=lambda scene: scene.cluster.kill(scene.cluster.nodes[0])),
    Fault(name="object store full", strike=fill_store, config=(("local_fs_capacity_threshold", 0.0001),)),
    Fault(name="disk full", strike=wait_for_full, disk_mb=34),
    Fault(name="rollout node frozen", strike=freeze("ray::RolloutHost"), goes_on=True),
    Fault(name="trainer node frozen", strike=freeze("ray::RankHost")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds since the fault: until the driver knew, ended (or trained on), and no worker's process was
    left. `discarded`: tokens; `undone`: train steps after the checkpoint that the resume began from;
    `history`: `ok`, or what is wrong with it."""

    fault: str
    known_s: float | None
    ended_s: float
    gone_s: float | None
    code: int | None
    message: str
    discarded: int
    undone: int
    history: str


def struck(scene: Scene, fault: Fault) -> Row:
    scene.wait(lambda: scene.is_whole)
    steps, end = len(scene.steps), scene.log.stat().st_size
    discarded = scene.tokens_discarded
    struck_s = time.monotonic()
    fault.strike(scene)
    known_s = ended_s = None
    while ended_s is None:
        now_s = time.monotonic() - struck_s
        news = scene.told(end)
        known_s = now_s if known_s is None and news else known_s
        assert scene.process is not None
        trains = (
            fault.goes_on
            and len(scene.steps) >= steps + 5
            and now_s > (UNKNOWN_S if known_s is None else known_s + 2.0)
        )
        ended_s = now_s if scene.process.poll() is not None or trains else None
        assert now_s < LIMIT_S, f"{fault.name}: neither ended nor gone on"
        time.sleep(0.05)
    news, code, gone_s, undone = scene.told(end), scene.process.poll(), None, 0
    message = " / ".join(news) if fault.goes_on else last_error(scene.stderr)
    if code is None:
        lost = scene.tokens_discarded - discarded
    else:
        wait_for_workers_end(scene)
        gone_s = time.monotonic() - struck_s
        checkpoint, lost = scene.newest_checkpoint
        undone = len(scene.steps) - checkpoint
    return Row(
        fault=fault.name,
        known_s=known_s and round(known_s, 1),
        ended_s=round(ended_s, 1),
        gone_s=gone_s and round(gone_s, 1),
        code=code,
        message=message,
        discarded=lost,
        undone=undone,
        history=trained_once(scene.run, 0),
    )


def last_error(stderr: str) -> str:
    """Empty if the driver could say nothing any more."""
    found = [line for line in stderr.splitlines() if line.startswith(("error:", "stopped", "interrupted"))]
    return (found or [""])[-1]


def wait_for_workers_end(scene: Scene) -> None:
    """But for those that a fault has frozen."""
    end_s = time.monotonic() + GONE_WITHIN_S
    while left := [process for process in scene.processes(*WORKERS) if not is_frozen(process)]:
        assert time.monotonic() < end_s, f"left: {[command_of(process) for process in left]}"
        time.sleep(0.1)


def is_frozen(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_STOPPED
    return False


def recover(scene: Scene, fault: Fault) -> None:
    """Resume where there is room again. The history is checked once more after the next fault."""
    if fault.disk_mb:
        subprocess.run(["mount", "-o", f"remount,size={8 * fault.disk_mb}m", str(scene.runs_dir)], check=True)
    if fault.name == "head":
        scene.cluster.close()
        scene.cluster = scene.ending.enter_context(ray_nodes(*NODES))
        scene.ending.callback(scene.close)
    scene.begin()


def table(rows: list[dict[str, object]]) -> Iterator[str]:
    columns = (
        "fault",
        "known after",
        "ended after",
        "gone after",
        "exit code",
        "it says",
        "tokens discarded",
        "steps undone",
        "history",
    )
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    newest = {row["fault"]: row for row in rows}
    for row in (newest[fault.name] for fault in FAULTS if fault.name in newest):
        known, ended, gone = (
            "" if row[name] is None else f"{row[name]} s" for name in ("known_s", "ended_s", "gone_s")
        )
        ended, code = (f"trains on, after {ended}", "") if row["code"] is None else (ended, row["code"])
        cells = (
            row["fault"],
            known,
            ended,
            gone,
            code,
            row["message"],
            row["discarded"],
            row["undone"],
            row["history"],
        )
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faults", default=";".join(fault.name for fault in FAULTS), help="names separated by semicolons"
    )
    parser.add_argument(
        "--directory", type=Path, required=True, help="directory for runs, the model and faults.jsonl"
    )
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    directory = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if options.table:
        print("\n".join(table(lines(directory / "faults.jsonl"))))
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    wanted = [fault for name in options.faults.split(";") for fault in FAULTS if fault.name == name]
    for (as_job, disk_mb, config), faults in groupby(
        wanted, key=lambda fault: (fault.as_job, fault.disk_mb, fault.config)
    ):
        name = f"{'job' if as_job else 'small'}-{os.getpid()}" if as_job or disk_mb else "faults"
        runs_dir = directory / ("disk" if disk_mb else "runs")
        with disk(runs_dir, disk_mb), ExitStack() as ending:
            scene = Scene(
                directory,
                ending.enter_context(ray_nodes(*NODES, jobs=as_job, **dict(config))),
                ending,
                runs_dir,
                name,
            )
            ending.callback(scene.close)
            scene.begin(as_job=as_job)
            for before, fault in pairwise([None, *faults]):
                if before is not None and scene.process.poll() is not None:
                    recover(scene, before)
                row = struck(scene, fault)
                with (directory / "faults.jsonl").open("a") as rows:
                    rows.write(json.dumps(asdict(row)) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
