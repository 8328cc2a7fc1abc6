"""How a run ends: killed, interrupted, without its raylet; and how it goes on. Its workers' deaths are in
test_deaths.py, the signals of schedulers and terminals in test_detached.py, two interrupts in
test_lost_nodes.py, stops from elsewhere and the resumption of a critic in test_submitted.py."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter

import pytest

from asyncrl_cli.checkpoint.reader import load_checkpoint
from asyncrl_cli.job.ray.reaper import KILLED
from tests.run.commands import (
    ENDLESS,
    LONG,
    SMALL,
    SOON_S,
    command_line,
    descendants,
    finish,
    interrupted_thrice,
    kill,
    lines,
    start,
    suspend,
    wait_for_checkpoint,
    wait_for_steps,
    wait_until,
    wait_until_gone,
)

pytestmark = pytest.mark.slow

CALCULATOR = (
    "task.source=builtin:calculator",
    "model.warm_start_steps=60",
    "rollout.max_prompt_tokens=32",
    "rollout.max_response_tokens=24",
    "env.max_context_tokens=160",
)
"""Episodes of several turns with tools."""
DELTAS = (
    "weights.encoding=delta",
    "model.dtype=bfloat16",
    "trainer.lr=2e-5",
    "rollout.workers=2",
    "weights.max_logprob_diff=0.05",
    "async_training.trigger_parameter_sync_step=1",
)
"""Weights that travel as differences, to two workers of a node."""


def trained_that_count(events):
    """`trained` events of the history that counts: a resume undoes those of later steps than it starts
    from."""
    counted = []
    for event in events:
        if event["event"] == "resumed":
            counted = [old for old in counted if old["step"] <= event["from_step"]]
        elif event["event"] == "trained":
            counted.append(event)
    return counted


def assert_calls_that_may_be_repeated_are_told(run):
    """Each trajectory that had called tools and whose prompt was admitted again, with what it had called
    before the kill."""
    noted = [call for path in run.glob("logs/attempt-1/*.tools.jsonl") for call in lines(path)]
    events = lines(run / "events.jsonl")
    back = next(place for place, event in enumerate(events) if event["event"] == "resumed")
    prompts = {
        event["group"].rpartition(".")[0]
        for event in events[back:]
        if event["event"] in ("running", "replaced")
    }
    expected = {}
    for trajectory, turn, tools in noted:
        if trajectory.rpartition(".")[0] in prompts:
            expected.setdefault(trajectory, {})[str(turn)] = tools
    again = [event for event in events if event["event"] == "tools_again"]
    assert {event["trajectory"]: event["calls"] for event in again} == expected
    assert len(again) == len(expected) > 0


def running_groups_with_calls(run):
    """Those of which a trajectory has called tools."""
    noted = {
        call[0].rpartition(".")[0]
        for path in run.glob("logs/attempt-1/*.tools.jsonl")
        for call in lines(path)
    }
    running = set()
    for event in lines(run / "events.jsonl"):
        if event["event"] in ("running", "finished", "dropped", "requeued"):
            change = running.add if event["event"] == "running" else running.discard
            change(event["group"].rpartition(".")[0])
    return noted & running


def kill_while_a_group_with_calls_runs(process, run):
    """It is stopped first: else the group may end before the signal comes."""
    is_killed = False
    while not is_killed:
        wait_until(process, lambda: running_groups_with_calls(run), "a running group with calls")
        suspend(process.pid)
        is_killed = bool(running_groups_with_calls(run))
        kill(process, signal.SIGKILL if is_killed else signal.SIGCONT)


def assert_each_start_sends_all_bytes_and_goes_on_with_differences(run):
    loads = [event for event in lines(run / "events.jsonl") if event["event"] == "loaded"]
    assert {event["worker"] for event in loads} == {"rollout-0", "rollout-1"}
    assert all(event["logprob_abs_diff_median"] < 0.05 for event in loads)
    sizes = [event["fetched_bytes"] for event in loads]
    whole = sizes[0] or sizes[1]
    assert all(size in (0, whole) or size < 0.2 * whole for size in sizes)
    assert sizes.count(whole) >= 2, "at the start and after the resume"
    assert sum(0 < size < 0.2 * whole for size in sizes) > 4
    assert sizes.count(0) > 4, "of two workers of a node one fetches"


def test_a_killed_run_goes_on_without_losing_or_repeating_a_group_and_interrupts_do_not_spoil_its_end(
    tmp_path,
):
    words = ("--profile", "partial-rollout", "--name", "killed", "--ui", "plain")
    sets = (*SMALL, *CALCULATOR, *DELTAS, "logging.wandb=offline")
    process = start(tmp_path, "train", *words, sets=sets)
    run = tmp_path / "runs" / "killed"
    wait_for_steps(process, run, 1)
    wait_for_checkpoint(process, run)
    family = descendants(process.pid)
    assert len(family) > 3
    kill_while_a_group_with_calls_runs(process, run)
    process.communicate()
    assert not wait_until_gone(family)

    resumed = start(tmp_path, "resume", "killed", "--ui", "plain", "--json")
    reaper = wait_until(resumed, lambda: reaper_of(resumed), "the reaper")
    suspend(reaper)  # the run waits for it at its end
    try:
        wait_until(resumed, lambda: status_of(run).get("phase") == "done", "the run's end")
        assert interrupted(resumed, times=20) == 20
    finally:  # without it, the processes of a run that has failed would stay
        os.kill(reaper, signal.SIGCONT)
    interrupted(resumed, times=1000)
    code, out, err = finish(resumed)
    assert (code, json.loads(out)["phase"]) == (0, "done")
    assert "Traceback" not in err
    assert "error" not in err
    assert err.count("shutting down") == 1
    assert "disagrees with the trainer" not in err

    trained = trained_that_count(lines(run / "events.jsonl"))
    assert set(Counter(event["step"] for event in trained).values()) == {4}
    assert max(Counter((event["uid"], event["epoch"]) for event in trained).values()) == 1
    assert len(trained) == 40
    assert [step["step"] for step in lines(run / "metrics.jsonl")] == list(range(1, 11))
    assert_calls_that_may_be_repeated_are_told(run)
    assert_each_start_sends_all_bytes_and_goes_on_with_differences(run)


def test_the_first_interrupt_checkpoints_and_the_death_of_the_raylet_is_what_the_resumed_run_ends_with(
    tmp_path,
):
    """With trainer and rollouts that take turns on the same core, a critic, and the initial weights as a
    reference."""
    sets = (*LONG, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "rollout.n=1")
    process = start(
        tmp_path, "train", "--profile", "colocate", "--name", "stopped", "--ui", "plain", sets=sets
    )
    run = tmp_path / "runs" / "stopped"
    wait_for_steps(process, run, 2)
    family = descendants(process.pid)
    kill(process, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "asyncrl resume stopped" in err
    assert "stopping after this train step, within 60 s; another Ctrl-C ends the run at once" in err
    assert not wait_until_gone(family)
    assert "ERROR" not in (run / "logs/attempt-1/rollout-0.log").read_text()
    first = len(lines(run / "metrics.jsonl"))
    assert (run / "checkpoints" / f"step-{first:06d}" / "manifest.json").exists()

    resumed = start(tmp_path, "resume", "stopped", "--ui", "plain")
    wait_for_steps(resumed, run, first + 3)
    family = descendants(resumed.pid)
    raylet = next(pid for pid in family if os.path.basename(command_line(pid).split(b"\0")[0]) == b"raylet")
    os.kill(raylet, signal.SIGKILL)
    killed_s = time.monotonic()
    code, _, err = finish(resumed)
    assert (code, time.monotonic() - killed_s < SOON_S) == (1, True)
    assert not wait_until_gone(family)
    error, hint = err.splitlines()[-2:]
    # The raylet ends its actors before itself: their deaths are not what is told.
    if "process" in error:  # Ray has ended the driver, within milliseconds: the reaper says why, if it saw
        assert error in ("error: ray's raylet has ended, and with it this run's process", f"error: {KILLED}")
        assert hint.startswith("hint: `asyncrl status` says how to resume")
    else:
        assert error == "error: ray's raylet has ended (SIGKILL), and with it this session"
        assert re.fullmatch(r"hint: `asyncrl resume stopped` continues from step \d+", hint)

    steps = lines(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert [step["ledger/trained"] for step in steps] == [4 * step["step"] for step in steps]
    assert max(step["fully_async/partial/max_partial_span"] for step in steps) == 0
    assert max(step["staleness/max"] for step in steps) == 0
    assert steps[0]["ref/kl"] < 1e-5 < steps[first]["ref/kl"]
    assert all("critic/loss" in step and step["timing/critic_s"] > 0 for step in steps)


@pytest.mark.parametrize("doing", ["starting Ray", "starting 1 trainer"])
def test_interrupts_while_a_run_starts_end_it_within_seconds_and_leave_nothing(tmp_path, doing):
    """While the model is built: test_first_run.py."""
    words = ("--profile", "partial-rollout", "--name", "early", "--ui", "plain")
    process = start(tmp_path, "train", *words, sets=LONG)
    wait_until(
        process, lambda: status_of(tmp_path / "runs" / "early").get("doing", "").startswith(doing), doing
    )
    family = descendants(process.pid)
    code, out, err, took_s = interrupted_thrice(process)
    assert (code, out) == (130, "")
    assert took_s < SOON_S
    assert "no step was trained" in err
    assert not wait_until_gone(family)
    assert not (tmp_path / "runs").exists()


def test_a_disk_that_fills_is_one_error_and_the_last_checkpoint_stays(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(disk)], capture_output=True, check=False
    ).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        words = ("--profile", "partial-rollout", "--name", "full", "--runs-dir", str(disk), "--ui", "plain")
        process = start(tmp_path, "train", *words, sets=ENDLESS, verbose=False)
        code, _, err = finish(process)
        assert code == 1
        assert "Traceback" not in err
        assert [line.partition(":")[0] for line in err.splitlines()[-2:]] == ["error", "hint"]
        assert re.search(r"No space left on device \(\d\.\d of 12 MiB are free\)", err.splitlines()[-2])
        kept = [path for path in (disk / "full" / "checkpoints").iterdir() if path.name != "latest"]
        assert kept
        assert [load_checkpoint(path).directory for path in kept] == kept
        assert json.loads((disk / "full" / "status.json").read_text())["phase"] == "failed"
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def status_of(run):
    return json.loads((run / "status.json").read_text()) if (run / "status.json").exists() else {}


def interrupted(process, times):
    """Press Ctrl-C so often, or until the process has ended. Returns how often."""
    for pressed in range(times):
        if process.poll() is not None:
            return pressed
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    return times


def is_stopping(run):
    return any(
        event["event"] == "remark" and "stopping after" in event["message"]
        for event in lines(run / "events.jsonl")
    )


def reaper_of(process):
    return next((pid for pid in descendants(process.pid) if b"reaper.py" in command_line(pid)), None)
