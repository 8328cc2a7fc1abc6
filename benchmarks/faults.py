"""Faults of a run on a cluster, one after the other: when each is known, how the run ends, what is lost, what a resume makes of it.

    python -m benchmarks.faults --directory DIR --faults 'SIGHUP;trainer node'      begins a run in DIR, or resumes it
    python -m benchmarks.faults --directory DIR --table                             prints DIR/faults.jsonl in Markdown

The cluster is made of logical nodes on this machine (tests/cluster.py): a head without CPUs, and two nodes of one CPU each, for a
trainer rank and a rollout worker. The driver is a process of its own, or a job. After each fault the run is resumed, if it has
ended, on what is left and on nodes that join; then comes the next one. A row is right if nothing hangs, no worker's process is
left, and every group of the history that counts was trained once.
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
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path

import psutil
from benchmarks.kills import LONG, num_resumed, trained_once
from ray._private.node import Node
from ray.job_submission import JobSubmissionClient
from tests.cluster import RayNodes, processes_of, ray_nodes
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
    "weights.timeout_s=20",
    "async_training.trigger_parameter_sync_step=1",
    "async_training.staleness_threshold=1",
    "task.max_failed_ratio=1.0",
)
LIMIT_S = 200.0
RESTARTS = "lost", "away", "restarted"
UNKNOWN_S = 15.0
"""A fault that the driver has not told of by then is none to it."""
GONE_WITHIN_S = 90.0
WORKERS = "ray::TrainerActor", "ray::RolloutActor", "reward_worker"
NO_NEWS = "teaches nothing"
"""A warning of every run so small."""
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


@dataclass
class Scene:
    """A run on a cluster. `process`: its driver, or who waits for its job."""

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
        return next(node for node in self.cluster.nodes[1:] if any(word in command_of(p) for p in processes_of(node)))

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


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
    client.stop_job(next(job.submission_id for job in client.list_jobs() if job.submission_id and job.status == "RUNNING"))


def fill_store(scene: Scene) -> None:
    node = scene.node_with("ray::TrainerActor")
    words = [sys.executable, "-c", HOG, scene.cluster.address, node.node_id]
    hog = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    scene.ending.callback(hog.kill)
    assert hog.stdout is not None
    print("objects in the store, and what came of one more:", hog.stdout.readline().strip())


def wait_for_full(scene: Scene) -> None:
    """The disk fills by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`goes_on`: the run lives; `config`: of the cluster; `disk_mb`: of the file system that the runs are on."""

    name: str
    strike: Callable[[Scene], None]
    goes_on: bool = False
    as_job: bool = False
    disk_mb: int = 0
    config: tuple[tuple[str, float], ...] = ()


FAULTS = (
    Fault(name="SIGHUP", strike=to_driver(signal.SIGHUP)),
    Fault(name="SIGTERM", strike=to_driver(signal.SIGTERM)),
    Fault(name="SIGTERM to the group", strike=lambda scene: os.killpg(scene.process.pid, signal.SIGTERM)),  # type: ignore[union-attr]
    Fault(name="SIGUSR1", strike=to_driver(signal.SIGUSR1)),
    Fault(name="job stop", strike=stop_job, as_job=True),
    Fault(name="driver", strike=to_driver(signal.SIGKILL)),
    Fault(name="reward process", strike=to_one("reward_worker"), goes_on=True),
    Fault(name="rollout worker", strike=to_one("ray::RolloutActor"), goes_on=True),
    Fault(name="trainer rank", strike=to_one("ray::TrainerActor")),
    Fault(name="rollout node", strike=to_node("ray::RolloutActor"), goes_on=True),
    Fault(name="trainer node", strike=to_node("ray::TrainerActor")),
    Fault(name="head", strike=lambda scene: scene.cluster.kill(scene.cluster.nodes[0])),
    Fault(name="object store full", strike=fill_store, config=(("local_fs_capacity_threshold", 0.0001),)),
    Fault(name="disk full", strike=wait_for_full, disk_mb=34),
    Fault(name="rollout node frozen", strike=freeze("ray::RolloutActor"), goes_on=True),
    Fault(name="trainer node frozen", strike=freeze("ray::TrainerActor")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds since the fault: until the driver knew, ended (or trained on), and no worker's process was left. `discarded`: tokens;
    `undone`: train steps after the checkpoint that the resume began from; `history`: `ok`, or what is wrong with it."""

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
    scene.wait(lambda: is_whole(scene))
    steps, end = len(scene.steps), scene.log.stat().st_size
    discarded = tokens_discarded(scene)
    struck_s = time.monotonic()
    fault.strike(scene)
    known_s = ended_s = None
    while ended_s is None:
        now_s = time.monotonic() - struck_s
        news = told(scene, end)
        known_s = now_s if known_s is None and news else known_s
        assert scene.process is not None
        trains = fault.goes_on and len(scene.steps) >= steps + 5 and now_s > (UNKNOWN_S if known_s is None else known_s + 2.0)
        ended_s = now_s if scene.process.poll() is not None or trains else None
        assert now_s < LIMIT_S, f"{fault.name}: neither ended nor gone on"
        time.sleep(0.05)
    news, code, gone_s, undone = told(scene, end), scene.process.poll(), None, 0
    message = news[0] if fault.goes_on and news else last_error(scene.stderr)
    if code is None:
        lost = tokens_discarded(scene) - discarded
    else:
        gone_s = wait_for_workers_end(scene, struck_s)
        checkpoint, lost = newest_checkpoint(scene)
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


def is_whole(scene: Scene) -> bool:
    """Whether no worker is being restarted or away."""
    newest = {event["worker"]: event["event"] for event in lines(scene.run / "events.jsonl") if event["event"] in RESTARTS}
    begun = [event["event"] for event in lines(scene.run / "events.jsonl") if event["event"] in ("resumed", "lost")]
    return begun[-1:] == ["resumed"] or not {"lost", "away"} & {*newest.values()}


def told(scene: Scene, end: int) -> list[str]:
    """What the driver knows since its log ended at `end`: warnings and errors, or that it is stopping."""
    with scene.log.open(errors="replace") as log:
        log.seek(end)
        news = [
            line.split(": ", 1)[1].strip() for line in log if (" WARNING " in line or " ERROR " in line) and NO_NEWS not in line
        ]
    try:
        phase = json.loads((scene.run / "status.json").read_text())["phase"]
    except (OSError, ValueError):
        phase = ""
    return news or [phase for _ in range(1) if phase in ("stopping", "stopped", "failed")]


def last_error(stderr: str) -> str:
    found = [line for line in stderr.splitlines() if line.startswith(("error:", "stopped", "interrupted"))]
    return (found or stderr.splitlines()[-2:] or [""])[-1]


def wait_for_workers_end(scene: Scene, struck_s: float) -> float:
    while left := scene.processes(*WORKERS):
        frozen = [process for process in left if process.status() == psutil.STATUS_STOPPED]
        if len(frozen) == len(left):
            break
        assert time.monotonic() - struck_s < GONE_WITHIN_S + LIMIT_S, f"left: {[command_of(process) for process in left]}"
        time.sleep(0.1)
    return time.monotonic() - struck_s


def recover(scene: Scene, fault: Fault) -> None:
    """Resume where there is room again. The history is checked once more after the next fault."""
    if fault.disk_mb:
        subprocess.run(["mount", "-o", f"remount,size={8 * fault.disk_mb}m", str(scene.runs_dir)], check=True)
    if fault.name == "head":
        scene.cluster.close()
        scene.cluster = scene.ending.enter_context(ray_nodes(*NODES))
        scene.ending.callback(scene.close)
    scene.begin()


def newest_checkpoint(scene: Scene) -> tuple[int, int]:
    """Its step, and how many tokens a resume cannot go on with."""
    state = json.loads((scene.run / "checkpoints" / "latest" / "loop_state.json").read_text())
    return state["step"], state["loop_state"]["running_tokens"]


def tokens_discarded(scene: Scene) -> int:
    return int(scene.steps[-1]["waste/tokens_discarded"])


@contextmanager
def disk(directory: Path, megabytes: int) -> Iterator[None]:
    directory.mkdir(exist_ok=True)
    if megabytes:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(directory)], check=True)
    try:
        yield
    finally:
        if megabytes:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)


def table(rows: list[dict[str, object]]) -> Iterator[str]:
    yield "| fault | known after | ended or trains after | exit code | message | tokens discarded | steps undone | trained twice |"
    yield "|---|---|---|---|---|---|---|---|"
    newest = {row["fault"]: row for row in rows}
    for fault in FAULTS:
        if (row := newest.get(fault.name)) is not None:
            known = "" if row["known_s"] is None else f"{row['known_s']} s"
            ended, code = f"{row['ended_s']} s", "goes on" if row["code"] is None else row["code"]
            cells = fault.name, known, ended, code, row["message"], row["discarded"], row["undone"], row["history"]
            yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default=";".join(fault.name for fault in FAULTS), help="separated by semicolons")
    parser.add_argument("--directory", type=Path, required=True, help="for runs, the model and faults.jsonl")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    directory = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if options.table:
        print("\n".join(table(lines(directory / "faults.jsonl"))))
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    wanted = [fault for name in options.faults.split(";") for fault in FAULTS if fault.name == name]
    for (as_job, disk_mb, config), faults in groupby(wanted, key=lambda fault: (fault.as_job, fault.disk_mb, fault.config)):
        name = f"{'job' if as_job else 'small'}-{os.getpid()}" if as_job or disk_mb else "faults"
        runs_dir = directory / ("disk" if disk_mb else "runs")
        with disk(runs_dir, disk_mb), ExitStack() as ending:
            scene = Scene(directory, ending.enter_context(ray_nodes(*NODES, jobs=as_job, **dict(config))), ending, runs_dir, name)
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
