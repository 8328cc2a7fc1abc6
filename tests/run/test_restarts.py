"""A worker's process or its engine's is killed in the middle of a real run with `rollout.max_restarts`: the run goes on."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest

from tests.engines.needs import needs_vllm
from tests.run.commands import LIMIT_S, SMALL, command_line, descendants, finish, lines, start, wait_for_steps, wait_until_gone

pytestmark = pytest.mark.slow

STEPS = 24
SETS = (
    *SMALL,
    f"run.train_steps={STEPS}",
    "rollout.max_restarts=1",
    "rollout.max_response_tokens=128",
    "async_training.trigger_parameter_sync_step=1",
    "async_training.staleness_threshold=1",
)
"""Many loads, long responses, and always some of them running."""


@pytest.mark.parametrize(
    ("engine", "victim", "workers"),
    [("transformers", b"RolloutActor", 2), pytest.param("vllm", b"VLLM::EngineCore", 1, marks=needs_vllm)],
)
def test_a_killed_process_is_replaced_and_every_group_is_trained_once(tmp_path, engine, victim, workers):
    sets = (*SETS, f"rollout.engine={engine}", f"rollout.workers={workers}")
    process = start(tmp_path, "train", "--profile", "partial-rollout", "--name", "mended", "--ui", "plain", sets=sets)
    run = tmp_path / "runs" / "mended"
    wait_for_steps(process, run, 3)
    family = descendants(process.pid)
    worker = wait_for_a_busy_worker(run)
    os.kill(next(pid for pid in family if victim in command_line(pid) and logs_to(pid) == f"{worker}.log"), signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    assert not wait_until_gone(family, 10.0)
    events, steps = lines(run / "events.jsonl"), lines(run / "metrics.jsonl")
    assert_only_one_was_lost(events, err, worker)
    assert_all_is_trained_once(events)
    assert_the_new_process_began_with_newest_weights(events)
    assert workers > 1 or ran_after_the_restart(events), "nobody else could have done the rest"
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["rollouter/restarts"] == 1
    assert {step["ledger/dropped"] for step in steps} == {0}
    idle = [step["rollouter/idle_ratio"] for step in steps if "rollouter/idle_ratio" in step]  # none if no report came in a step
    assert idle
    assert all(0 <= share < 1.01 for share in idle), "over 1 by what lies between two looks at a clock"
    assert all(step.get("rollouter/tokens_per_s", 0) >= 0 for step in steps)


def wait_for_a_busy_worker(run):
    """The name of one that has groups to generate right now."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        events = lines(run / "events.jsonl")
        open_groups = {attempt(event): event["worker"] for event in named(events, "running")}
        for event in named(events, "finished"):
            del open_groups[attempt(event)]
        if open_groups:
            return Counter(open_groups.values()).most_common(1)[0][0]
        assert time.monotonic() < deadline_s, "nobody generates"
        time.sleep(0.01)


def logs_to(pid):
    """The file that a process writes its output to."""
    return os.path.basename(os.readlink(f"/proc/{pid}/fd/1"))


def assert_only_one_was_lost(events, err, worker):
    (lost,), (restarted,) = named(events, "lost"), named(events, "restarted")
    assert lost["worker"] == restarted["worker"] == worker
    assert lost["restarts_left"] == 0
    assert lost["error"].rstrip(".") in err
    assert f"{restarted['worker']} was restarted in" in err
    assert not named(events, "failed")


def assert_all_is_trained_once(events):
    trained = named(events, "trained")
    assert set(Counter(event["step"] for event in trained).values()) == {4}
    assert len(trained) == len({(event["uid"], event["epoch"]) for event in trained}) == 4 * STEPS
    worker, again = named(events, "lost")[0]["worker"], named(events, "requeued")
    started = {attempt(event): event["worker"] for event in named(events, "running")}
    assert again, "nothing ran on the killed worker"
    assert {event["reason"] for event in again} == {"worker lost"}
    assert {started[attempt(event)] for event in again} == {worker}
    assert {(uid, epoch, number + 1) for uid, epoch, number in map(attempt, again)} <= set(map(attempt, trained))


def assert_the_new_process_began_with_newest_weights(events):
    back = next(place for place, event in enumerate(events) if event["event"] == "restarted")
    worker, later = events[back]["worker"], events[back + 1 :]
    published = max(event["version"] for event in events[:back] if event["event"] == "published")
    own = [event for event in later if event.get("worker") == worker and event["event"] in ("loaded", "running")]
    assert own[0]["event"] == "loaded"
    assert own[0]["version"] >= published > 0
    assert own[0]["logprob_abs_diff"] < 1e-3
    last = max(event["version"] for event in named(events, "published"))
    assert worker in {event["worker"] for event in named(events, "loaded") if event["version"] == last}


def ran_after_the_restart(events):
    back = next(place for place, event in enumerate(events) if event["event"] == "restarted")
    return [event for event in named(events[back:], "running") if event["worker"] == events[back]["worker"]]


def named(events, name):
    return [event for event in events if event["event"] == name]


def attempt(event):
    return event["uid"], event["epoch"], event["attempt"]
