"""Nodes of a cluster die under a run: SIGKILL to a raylet and all of its workers."""

import signal
import time

import pytest

from tests.cluster import processes_of, ray_nodes
from tests.run.commands import (
    LONG,
    SOON_S,
    descendants,
    finish,
    kill,
    lines,
    log_of,
    start,
    wait_for_steps,
    wait_until,
    wait_until_gone,
)
from tests.run.test_deaths import named, wait_for
from tests.run.test_ends import is_stopping

pytestmark = pytest.mark.slow

SETS = (
    *LONG,
    "placement.trainer_workers=1",
    "placement.timeout_s=8",
    "rollout.workers=2",
    "rollout.max_restarts=1",
    "rollout.min_workers=1",
    "rollout.max_response_tokens=128",
    "async_training.trigger_parameter_sync_step=1",
    "async_training.staleness_threshold=1",
)


def node_with(cluster, log):
    """A node that is not the head, of which a process has a log of that name. (Ray's titles of processes are
    not always there.)"""
    found = [
        node
        for node in cluster.nodes[1:]
        if any(log_of(process.pid).startswith(log) for process in processes_of(node))
    ]
    return found[0] if found else None


def test_a_run_outlives_a_rollout_node_and_its_checkpoint_the_trainers(tmp_path):
    """One CPU per node: each rank and worker has its own. The rollout node's place is taken by one that joins
    later. A second interrupt ends the resumed run at once."""
    run = tmp_path / "runs" / "torn"
    with ray_nodes((0, 0), (1, 0), (1, 0), (1, 0)) as cluster:
        where = ("--address", cluster.address, "--ui", "plain")
        process = start(
            tmp_path, "train", "--profile", "partial-rollout", "--name", "torn", *where, sets=SETS
        )
        wait_for_steps(process, run, 2)
        cluster.kill(node_with(cluster, "rollout-"))
        killed_s = time.monotonic()
        (lost,) = wait_for(process, run, lambda events: named(events, "lost"))
        assert time.monotonic() - killed_s < SOON_S
        away = wait_for(process, run, lambda events: named(events, "away"))
        assert away[0]["worker"] == lost["worker"]
        wait_for_steps(process, run, len(lines(run / "metrics.jsonl")) + 2)
        cluster.add(1)
        wait_for(process, run, lambda events: named(events, "restarted"))

        cluster.kill(node_with(cluster, "trainer-"))
        killed_s = time.monotonic()
        code, _, err = finish(process)
        assert code == 1
        assert time.monotonic() - killed_s < SOON_S
        assert "examining 3 nodes" in err
        error, hint = err.splitlines()[-2:]
        assert error.startswith("error: trainer-0 failed: its process on 127.0.0."), error
        assert "asyncrl resume torn" in hint

        fewer = ("--set", "rollout.workers=1", "--set", "rollout.min_workers=1")
        resumed = start(tmp_path, "resume", "torn", *fewer, *where)
        step = len(lines(run / "metrics.jsonl"))
        wait_for(resumed, run, lambda events: named(events, "resumed"))
        wait_for_steps(resumed, run, step + 2)
        family = descendants(resumed.pid)
        kill(resumed, signal.SIGINT)
        wait_until(resumed, lambda: is_stopping(run), "a stop")  # two signals at once may come as one
        kill(resumed, signal.SIGINT)
        interrupted_s = time.monotonic()
        assert finish(resumed)[0] == 130
        assert time.monotonic() - interrupted_s < SOON_S
        assert not wait_until_gone(family)
    counted = []
    for event in lines(run / "events.jsonl"):
        if event["event"] == "resumed":
            counted = [old for old in counted if old["step"] <= event["from_step"]]
        elif event["event"] == "trained":
            counted.append(event)
    prompts = [(event["uid"], event["epoch"]) for event in counted]
    assert len(prompts) == len(set(prompts)) == 4 * counted[-1]["step"]
