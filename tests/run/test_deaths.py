"""A worker's process or its engine's is killed in the middle of a run, and a restart replaces it. The
raylet's death: test_ends.py."""

import json
import os
import re
import signal
import time
import urllib.request
from collections import Counter

import psutil
import pytest

from tests.engines.needs import needs_vllm
from tests.engines.vllm.vllm_processes import engine_processes
from tests.run.commands import (
    LIMIT_S,
    LONG,
    SOON_S,
    descendants,
    finish,
    lines,
    log_of,
    start,
    suspend,
    wait_for_steps,
    wait_until,
    wait_until_gone,
)
from tests.run.listening import listening

pytestmark = pytest.mark.slow

SETS = (
    *LONG,
    "rollout.max_restarts=1",
    "rollout.max_response_tokens=128",
    "async_training.trigger_parameter_sync_step=1",
    "async_training.staleness_threshold=1",
    "gateway.enabled=true",
)
"""Many loads, long responses, and always some of them running; and a gateway, which a task with a reward does
not need."""


@pytest.mark.parametrize(
    ("engine", "victim", "workers", "error"),
    [
        ("transformers", "actor", 2, "its process ended during"),
        pytest.param(
            "vllm",
            "EngineCore",
            1,
            "vLLM's engine process has ended (EngineCore with SIGKILL)",
            marks=needs_vllm,
        ),
    ],
)
def test_a_killed_process_is_replaced_and_the_next_death_fails_the_run_after_a_checkpoint(
    tmp_path, engine, victim, workers, error
):
    sets = (*SETS, f"rollout.engine={engine}", f"rollout.workers={workers}")
    process = start(
        tmp_path, "train", "--profile", "partial-rollout", "--name", "mended", "--ui", "plain", sets=sets
    )
    run = tmp_path / "runs" / "mended"
    wait_for_steps(process, run, 3)
    found = listening({process.pid, *descendants(process.pid)})
    assert {host for _, host, _ in found} == {"127.0.0.1"}
    assert engine != "vllm" or pid_of(process, "rollout-0", victim) in {pid for pid, _, _ in found}

    if engine == "transformers":
        assert_the_gateway_answers(run)
    worker = kill_a_busy_worker(process, run, victim)
    wait_for(process, run, is_back)
    events = lines(run / "events.jsonl")
    assert_only_one_was_lost(events, worker)
    assert_its_responses_began_again(events)
    assert_the_new_process_began_with_newest_weights(events)

    family = descendants(process.pid)
    os.kill(pid_of(process, worker, victim), signal.SIGKILL)
    killed_s = time.monotonic()
    code, _, err = finish(process)
    assert code == 1
    assert time.monotonic() - killed_s < SOON_S
    assert not wait_until_gone(family)
    failed, hint = err.splitlines()[-2:]
    assert failed.startswith(f"error: {worker} failed: {error}")
    more = "hint: `asyncrl logs mended` shows more"
    assert re.fullmatch(rf"{more}, `asyncrl resume mended` continues from step \d+", hint)
    assert named(events, "lost")[0]["error"].rstrip(".") in err
    assert f"{worker} was restarted in" in err
    assert_all_is_trained_once_and_kept(run)


def assert_the_gateway_answers(run):
    address = run / "logs" / "attempt-1" / "rollout-0.gateway.json"
    found = json.loads(address.read_text())
    assert (address.stat().st_mode & 0o777, found["url"][:17]) == (0o600, "http://127.0.0.1:")
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True}).encode()
    headers = {"Authorization": f"Bearer {found['admin_key']}"}
    request = urllib.request.Request(f"{found['url']}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        (choice,) = json.load(answer)["choices"]
    assert 1 <= len(choice["token_ids"]) == len(choice["weight_versions"]) <= 4


def wait_for(process, run, found):
    """What `found` makes of the run's events, once it is something."""
    return wait_until(process, lambda: found(lines(run / "events.jsonl")), found.__name__)


def busy_worker(events):
    """The name of the one with most groups to generate by itself right now."""
    return next((name for name, _ in busy_workers(events).most_common(1)), None)


def busy_workers(events):
    """By name: how many groups run on it alone."""
    open_groups = {attempt(event): event["workers"] for event in named(events, "running")}
    for event in named(events, "finished"):
        open_groups.pop(attempt(event), None)
    return Counter(next(iter(workers)) for workers in open_groups.values() if len(workers) == 1)


def is_back(events):
    """The new process generates and gets versions, and what the old one had has been trained."""
    if not named(events, "restarted"):
        return False
    later = own_since_the_restart(events)
    return (
        set(map(attempt, named(events, "replaced"))) <= set(map(attempt, named(events, "trained")))
        and named(later, "running")
        and len(named(later, "loaded")) > 1
    )


def own_since_the_restart(events):
    """What happened to the worker that was restarted."""
    back = next(place for place, event in enumerate(events) if event["event"] == "restarted")
    worker = events[back]["worker"]
    return [
        event for event in events[back + 1 :] if worker in (event.get("worker"), *event.get("workers", ()))
    ]


def kill_a_busy_worker(process, run, victim):
    """Kills it while it generates, and returns its name. It is stopped first: else its groups may end before
    the signal comes."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        worker = wait_for(process, run, busy_worker)
        pid = pid_of(process, worker, victim)
        suspend(pid)
        for _ in range(2):  # within that second what it has sent arrives
            wait_for_another_status(process, run)
        is_busy = worker in busy_workers(lines(run / "events.jsonl"))
        os.kill(pid, signal.SIGKILL if is_busy else signal.SIGCONT)
        if is_busy:
            return worker
    raise AssertionError("no worker was ever caught at work")


def wait_for_another_status(process, run):
    """The driver's loop writes one a second."""

    def written_at():
        return json.loads((run / "status.json").read_text())["updated_at"]

    before = written_at()
    wait_until(process, lambda: written_at() != before, "another status")


def pid_of(process, worker, victim):
    """That of the worker's actor, the first of all that write to its log, or of a process of its engine."""
    pids = {pid for pid in descendants(process.pid) if log_of(pid) == f"{worker}.log"}
    (actor,) = (pid for pid in pids if psutil.Process(pid).ppid() not in pids)
    return actor if victim == "actor" else engine_processes(actor)[victim].pid


def assert_only_one_was_lost(events, worker):
    (lost,), (restarted,) = named(events, "lost"), named(events, "restarted")
    assert lost["worker"] == restarted["worker"] == worker
    assert lost["restarts_left"] == 0
    assert not named(events, "failed")


def assert_its_responses_began_again(events):
    worker, again = named(events, "lost")[0]["worker"], named(events, "replaced")
    started = {attempt(event): event["workers"] for event in named(events, "running")}
    assert again, "nothing ran on the killed worker"
    for event in again:
        assert sum(event["workers"].values()) <= started[attempt(event)][worker]
    assert not named(events, "requeued")


def assert_the_new_process_began_with_newest_weights(events):
    back = next(place for place, event in enumerate(events) if event["event"] == "restarted")
    published = max(event["version"] for event in events[:back] if event["event"] == "published")
    own = [event for event in own_since_the_restart(events) if event["event"] in ("loaded", "running")]
    assert own[0]["event"] == "loaded"
    assert own[0]["version"] >= published > 0
    assert own[0]["logprob_abs_diff"] < 1e-3
    assert named(own, "loaded")[-1]["version"] > own[0]["version"]


def assert_all_is_trained_once_and_kept(run):
    trained, steps = named(lines(run / "events.jsonl"), "trained"), lines(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert set(Counter(event["step"] for event in trained).values()) == {4}
    assert len(trained) == len({(event["uid"], event["epoch"]) for event in trained}) == 4 * len(steps)
    assert (run / "checkpoints" / f"step-{len(steps):06d}" / "manifest.json").exists()
    assert steps[-1]["rollouter/restarts"] == 1
    assert {step["ledger/dropped"] for step in steps} == {0}
    # none if no report came in a step
    idle = [step["rollouter/idle_ratio"] for step in steps if "rollouter/idle_ratio" in step]
    assert idle
    assert all(0 <= share < 1.01 for share in idle), "over 1 by what lies between two looks at a clock"
    assert all(step.get("rollouter/tokens_per_s", 0) >= 0 for step in steps)


def named(events, name):
    return [event for event in events if event["event"] == name]


def attempt(event):
    return event["uid"], event["epoch"], event["attempt"]
