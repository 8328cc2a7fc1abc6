"""Runs as jobs of a cluster with a job server: everything about them is asked from another directory, by the
cluster's address."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient

from asyncrl_cli.checkpoint.run_directory import RunDirectory
from tests.cluster import RayNodes, ray_nodes
from tests.run.commands import ENDLESS, LIMIT_S, finish, lines, start
from tests.run.test_ends import trained_that_count
from tests.statuses import write_status

pytestmark = pytest.mark.slow

REWARDS = """
import time

from helpers import length

def score(item, response):
    time.sleep(0.03)  # as in rewards/paced.py
    return float(length(response) % 2)
"""
SETS = (*ENDLESS, "task.reward=rewards:score", "task.rehearsal_items=0", 'run.ship=["helpers.py"]')


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with ray_nodes((4, 0), jobs=True) as cluster:
        yield cluster


def asked(
    directory: Path, cluster: RayNodes, command: str, *words: str, sets: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    directory.mkdir(exist_ok=True)
    return finish(start(directory, command, *words, "--address", cluster.dashboard, sets=sets, verbose=False))


def test_commands_are_run_where_the_files_are(tmp_path, cluster):
    """On a run that this process holds; and a job that fails at once is told with its own error and exit
    code."""
    runs = ("--runs-dir", str(tmp_path / "runs"))
    directory = RunDirectory.create(tmp_path / "runs", "held", profile_toml="", resolved={})
    (directory.start_attempt() / "driver.log").write_text("one\ntwo\n", encoding="utf-8")
    write_status(directory.path, phase="running")
    watching = start(tmp_path, "watch", "held", *runs, "--address", cluster.dashboard, verbose=False)
    assert watching.stdout is not None
    assert watching.stdout.readline().endswith("(partial-rollout): running\n")
    assert asked(tmp_path / "elsewhere", cluster, "logs", "held", *runs)[:2] == (0, "one\ntwo\n")
    code, _, _ = asked(tmp_path / "elsewhere", cluster, "stop", "held", *runs)
    assert (code, directory.stop_requests()) == (0, 1)
    assert watching.poll() is None
    watching.send_signal(signal.SIGINT)
    code, _, err = finish(watching)
    directory.close()
    assert code == 0, err
    assert "run 'held' continues" in err

    words = ("--profile", "partial-rollout", *runs)
    code, _, err = asked(
        tmp_path / "elsewhere", cluster, "submit", *words, sets=("task.source=jsonl:/nothing.jsonl",)
    )
    assert code == 2, err
    assert "/nothing.jsonl" in err
    assert "Running entrypoint" not in err


def test_a_submitted_run_is_stopped_by_ray_and_resumed_from_elsewhere(tmp_path, cluster):
    run, here = tmp_path / "runs" / "sent", tmp_path / "here"
    here.mkdir()
    (here / "rewards.py").write_text(REWARDS)
    (here / "helpers.py").write_text("length = len\n")
    words = ("--profile", "partial-rollout", "--name", "sent", "--runs-dir", str(run.parent), "--json")
    code, out, err = asked(here, cluster, "submit", *words, sets=SETS)
    assert code == 0, err
    for path in here.iterdir():
        path.unlink()  # the job has its own
    wait_for_step(run, 2)
    client, job = JobSubmissionClient(cluster.dashboard), json.loads(out)["job"]
    client.stop_job(job)  # SIGTERM, and by default SIGKILL after 3 s
    first = wait_for_end(run)

    code, _, err = asked(tmp_path / "elsewhere", cluster, "resume", "sent")
    assert code == 0, err
    wait_for_step(run, first + 1)
    assert finish(start(run.parent, "stop", "sent", "--runs-dir", "."))[0] == 0  # the directory is shared
    wait_for_end(run)
    assert [job["run"] for job in json.loads(asked(tmp_path, cluster, "status", "--json")[1])][:2] == [
        "sent",
        "sent",
    ]
    trained = trained_that_count(lines(run / "events.jsonl"))
    assert set(Counter(event["step"] for event in trained).values()) == {4}
    assert max(Counter((event["uid"], event["epoch"]) for event in trained).values()) == 1


def wait_for_step(run: Path, step: int) -> None:
    until_s = time.monotonic() + LIMIT_S
    while len(lines(run / "metrics.jsonl")) < step:
        assert time.monotonic() < until_s, list(run.glob("logs/latest/*"))
        time.sleep(0.1)


def wait_for_end(run: Path) -> int:
    """Wait until the driver has stopped the run in order. Returns the step of its newest checkpoint, which is
    its last one."""
    until_s = time.monotonic() + LIMIT_S
    while json.loads((run / "status.json").read_text())["phase"] != "stopped":
        assert time.monotonic() < until_s
        time.sleep(0.1)
    steps = len(lines(run / "metrics.jsonl"))
    assert (run / "checkpoints" / f"step-{steps:06d}" / "manifest.json").exists()
    return steps
