"""How a run ends: killed, interrupted, stopped from elsewhere; and how it goes on."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest

from tests.engines import needs_vllm
from tests.run.commands import SMALL, alive, command_line, descendants, finish, kill, lines, start, wait_for_steps, wait_until_gone

pytestmark = pytest.mark.slow

LONG = (*SMALL, "run.train_steps=400")


def trained_that_count(events):
    """`trained` events of the history that counts: a resume undoes those of later steps than it starts from."""
    counted = []
    for event in events:
        if event["event"] == "resumed":
            counted = [old for old in counted if old["step"] <= event["from_step"]]
        elif event["event"] == "trained":
            counted.append(event)
    return counted


def test_a_killed_run_leaves_nothing_behind_and_goes_on_without_losing_or_repeating_a_group(tmp_path):
    words = ("--profile", "partial-rollout", "--name", "killed", "--ui", "plain")
    process = start(tmp_path, "train", *words, sets=SMALL)
    run = tmp_path / "runs" / "killed"
    wait_for_steps(process, run, 3)
    family = descendants(process.pid)
    assert len(family) > 3
    kill(process, signal.SIGKILL)
    process.communicate()
    assert not wait_until_gone(family, 20.0)
    code, _, err = finish(start(tmp_path, "resume", "killed", "--ui", "plain"))
    assert code == 0, err
    trained = trained_that_count(lines(run / "events.jsonl"))
    assert set(Counter(event["step"] for event in trained).values()) == {4}
    assert max(Counter((event["uid"], event["epoch"]) for event in trained).values()) == 1
    assert len(trained) == 40
    assert [step["step"] for step in lines(run / "metrics.jsonl")] == list(range(1, 11))


def test_the_first_interrupt_checkpoints_and_a_second_terminal_can_stop_the_resumed_run(tmp_path):
    process = start(tmp_path, "train", "--profile", "partial-rollout", "--name", "stopped", "--ui", "plain", sets=LONG)
    run = tmp_path / "runs" / "stopped"
    wait_for_steps(process, run, 2)
    family = descendants(process.pid)
    kill(process, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "asyncrl resume stopped" in err
    assert not wait_until_gone(family, 10.0)
    first = len(lines(run / "metrics.jsonl"))
    assert (run / "checkpoints" / f"step-{first:06d}" / "manifest.json").exists()

    resumed = start(tmp_path, "resume", "stopped", "--ui", "plain")
    wait_for_steps(resumed, run, first + 2)
    assert finish(start(tmp_path, "stop", "stopped"))[0] == 0
    code, _, _ = finish(resumed)
    assert code == 130
    assert [step["step"] for step in lines(run / "metrics.jsonl")] == list(range(1, len(lines(run / "metrics.jsonl")) + 1))


def test_a_second_interrupt_ends_the_run_within_seconds(tmp_path):
    process = start(tmp_path, "train", "--profile", "stale-samples", "--name", "aborted", "--ui", "plain", sets=LONG)
    run = tmp_path / "runs" / "aborted"
    wait_for_steps(process, run, 2)
    family = descendants(process.pid)
    kill(process, signal.SIGINT)
    kill(process, signal.SIGINT)
    began_s = time.monotonic()
    code, _, _ = finish(process)
    assert code == 130
    assert time.monotonic() - began_s < 10
    assert not wait_until_gone(family, 10.0)


def test_a_dead_rollout_worker_fails_the_run_with_its_own_error_after_a_checkpoint(tmp_path):
    process = start(tmp_path, "train", "--profile", "partial-rollout", "--name", "dead", "--ui", "plain", sets=LONG)
    run = tmp_path / "runs" / "dead"
    wait_for_steps(process, run, 3)
    family = descendants(process.pid)
    worker = next(pid for pid in family if b"RolloutActor" in command_line(pid))
    os.kill(worker, signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    assert "rollout-0" in err
    assert not alive(wait_until_gone(family, 10.0))
    steps = lines(run / "metrics.jsonl")
    assert (run / "checkpoints" / f"step-{len(steps):06d}" / "manifest.json").exists()


@needs_vllm
def test_a_dead_vllm_engine_fails_the_run_with_its_own_error(tmp_path):
    words = ("--profile", "partial-rollout", "--name", "engine", "--ui", "plain")
    process = start(tmp_path, "train", *words, sets=(*LONG, "rollout.engine=vllm"))
    wait_for_steps(process, tmp_path / "runs" / "engine", 2)
    family = descendants(process.pid)
    os.kill(next(pid for pid in family if b"VLLM::EngineCore" in command_line(pid)), signal.SIGKILL)
    killed_s = time.monotonic()
    code, _, err = finish(process)
    assert code == 1
    assert time.monotonic() - killed_s < 30
    assert err.splitlines()[-2:] == [
        "error: rollout-0 failed: vLLM's engine process has ended (EngineCore with SIGKILL)",
        "hint: `asyncrl logs engine` tells more, `asyncrl resume engine` goes on from the last checkpoint",
    ]
    assert not wait_until_gone(family, 10.0)
