"""`asyncrl status` of live, ended, killed and unknown runs."""

import io
import json
import os
import socket
import subprocess
import sys
import time

import pytest
from rich.console import Console

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.base.safe_files import read_bytes
from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.observe import run_status
from asyncrl_cli.observe.format import evals_text, summary_rows
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.render import render
from asyncrl_cli.observe.run_status import RunStatus, StillStarting, read_status
from asyncrl_cli.observe.screen import watching
from tests.statuses import document_of, write_status

DRIVER = """
import os, signal, sys
from pathlib import Path
from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.contracts.status import RunFacts
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.sinks import StatusFile
run = RunDirectory.create(Path(sys.argv[1]), "killed", profile_toml="", resolved={})
facts = RunFacts(name="killed", profile="p", mode="m", run_dir=str(run.path), train_steps=9, step_groups=1,
                 window_groups=1, trigger_parameter_sync_step=1, max_staleness=1)
Observers(facts, [StatusFile(run.status)], clock=lambda: 0.0)
print("ready", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_is_live_until_it_is_killed_and_dead_from_then_on(tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        live = read_status("killed", tmp_path)
        driver.communicate("now\n", timeout=10)
    dead = read_status("killed", tmp_path)
    assert (live.liveness, live.remark) == ("live", "")
    assert driver.returncode == -9
    assert dead.liveness == "dead"
    assert "before its first checkpoint; next: `asyncrl train --profile " in dead.remark
    (tmp_path / "killed" / "checkpoints" / "step-000004").mkdir(parents=True)
    assert "next: `asyncrl resume killed" in read_status("killed", tmp_path).remark


def test_a_run_that_ends_while_its_status_is_read_was_not_killed(tmp_path, facts, monkeypatch):
    run = RunDirectory.create(tmp_path, "otter", profile_toml="", resolved={})
    picture = Observers(facts, [], clock=lambda: 0.0).live.picture().to_json() | {
        "phase": "running",
        "pid": 2**22 + 1,
    }
    run.status.write_text(json.dumps(picture))

    def read_and_end(path, **limits):
        content = read_bytes(path, **limits)
        run.status.write_text(json.dumps({**picture, "phase": "done"}))
        run.close()
        return content

    with monkeypatch.context() as patch:
        patch.setattr(run_status, "read_bytes", read_and_end)
        assert read_status("otter", tmp_path).liveness == "live"
    assert read_status("otter", tmp_path).liveness == "ended"


def test_an_ended_run_is_ended_however_old_its_status_is(tmp_path, facts):
    write_status(tmp_path / "old", phase="done", updated_at=0.0, pid=2**22 + 1)
    assert read_status("old", tmp_path).liveness == "ended"


@pytest.mark.parametrize(
    ("is_that_driver", "remark"), [(True, ""), (False, "a driver is resuming or ending the run; ")]
)
def test_an_ended_run_whose_driver_shuts_down_is_not_being_resumed(tmp_path, facts, is_that_driver, remark):
    run = RunDirectory.create(tmp_path, "otter", profile_toml="", resolved={})
    pid = os.getpid() if is_that_driver else 2**22 + 1
    status = document_of(phase="done", pid=pid)
    run.status.write_text(json.dumps(status))
    found = read_status("otter", tmp_path)
    run.close()
    assert (found.liveness, found.state) == ("live", "starting" if remark else "done")
    assert found.remark.startswith(remark)
    assert bool(found.remark) == bool(remark)


def test_a_long_remark_is_wrapped(tmp_path, facts):
    status = Observers(facts, [], clock=lambda: 0.0).live.picture()
    remark = (
        "a driver is resuming or ending the run; this is the last status that was written, said at length"
    )
    shown = render(status, width=80, height=30, remark=remark).plain
    assert remark in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


def test_a_run_that_starts_is_not_one_that_ended_while_it_started(tmp_path):
    run = RunDirectory.create(tmp_path, "young", profile_toml="", resolved={})
    with pytest.raises(StillStarting, match="run 'young' is starting"):
        read_status("young", tmp_path)
    run.close()
    with pytest.raises(RefusedError, match="run 'young' ended while it started") as ended:
        read_status("young", tmp_path)
    assert not isinstance(ended.value, StillStarting)
    assert ended.value.hint == f"its log: `asyncrl logs young --runs-dir {tmp_path}`"


def test_a_run_that_starts_is_said_to_and_then_shown(tmp_path, facts):
    write_status(tmp_path / "ready", phase="done")
    console = Console(file=io.StringIO(), width=100, height=30, force_terminal=True)
    with watching(console) as show:
        show("run 'ready' is starting: its workers load the model")
        assert "its workers load the model" in console.file.getvalue()
        show(read_status("ready", tmp_path))
        assert "step 0/" in console.file.getvalue()


def test_without_a_terminal_a_watched_run_is_told_in_plain_lines(tmp_path, facts):
    write_status(tmp_path / "ready", phase="done")
    console = Console(file=io.StringIO(), width=100, height=30)
    with watching(console) as show:
        show("run 'ready' is starting")
        show(read_status("ready", tmp_path))
    (line,) = console.file.getvalue().splitlines()
    assert line.endswith(": done")


def test_a_status_is_the_same_after_a_journey_as_json(tmp_path, facts):
    write_status(tmp_path / "far", phase="done")
    found = read_status("far", tmp_path)
    there = RunStatus.from_json(tmp_path / "unknown here", json.dumps(found.to_json()))
    assert (there.to_json(), there.next_command) == (found.to_json(), found.next_command)


def test_a_driver_that_holds_the_lock_but_says_nothing_is_silent(tmp_path, facts):
    run = RunDirectory.create(tmp_path, "quiet", profile_toml="", resolved={})
    status = Observers(facts, [], clock=lambda: 0.0).live.picture().to_json() | {
        "updated_at": time.time() - 60
    }
    run.status.write_text(json.dumps(status))
    found = read_status("quiet", tmp_path)
    run.close()
    assert found.liveness == "silent"
    assert str(os.getpid()) in found.remark


def test_a_run_on_another_host_is_judged_by_its_last_word_alone(tmp_path, facts):
    write_status(tmp_path / "far", host=socket.gethostname() + "-other", pid=2**22 + 1)
    assert read_status("far", tmp_path).liveness == "live"


def test_an_unknown_run_is_refused_and_the_known_ones_are_named(tmp_path, facts):
    write_status(tmp_path / "brave-otter")
    with pytest.raises(ConfigError, match="no run 'brave-oter'") as caught:
        read_status("brave-oter", tmp_path)
    assert "brave-otter" in caught.value.hint


def test_a_status_of_another_schema_is_refused(tmp_path, facts):
    write_status(tmp_path / "future", schema_version=3)
    with pytest.raises(RefusedError, match="schema_version 3"):
        read_status("future", tmp_path)


def test_a_single_eval_is_told_once():
    evals = [
        {"version": version, "reward_mean": 0.3 + version / 10, "num_prompts": 512} for version in (0, 2, 4)
    ]
    assert evals_text(evals[:1]) == "0.300 (version 0), 512 prompts"
    assert evals_text(evals) == "0.300 (version 0) -> 0.700 (version 4), 512 prompts"


def test_an_evals_interval_is_told_and_kept_and_its_rewards_are_not(facts):
    live = Observers(facts, [], clock=lambda: 0.0).live
    eval_event = {
        "event": "eval",
        "version": 0,
        "reward_mean": 0.25,
        "reward_low": 0.1,
        "reward_high": 0.5,
        "num_prompts": 4,
    }
    live.event({**eval_event, "time_s": 1.0, "prompts": "ab", "rewards": (0.0, 0.0, 0.0, 1.0)})
    status = live.picture()
    assert evals_text(status.eval.history) == "0.250 [0.100..0.500] (version 0), 4 prompts"
    assert status.notes[-1].text == "eval of version 0: 0.250 [0.100..0.500]"
    assert "rewards" not in status.eval.history[0]


def test_the_last_sixty_evals_are_kept_each_version_once(facts):
    live = Observers(facts, [], clock=lambda: 0.0).live
    evals = [
        {"event": "eval", "time_s": 1.0, "version": version, "reward_mean": 0.5, "num_prompts": 8}
        for version in range(70)
    ]
    for event in (*evals, evals[-1]):
        live.event(event)
    assert [point["version"] for point in live.picture().eval.history] == [*range(10, 70)]
    live.recall([*evals[:30], {"event": "eval", "time_s": 1.0, "reward_mean": 0.5}])
    assert [point["version"] for point in live.picture().eval.history] == [*range(30)]


def test_a_resumed_run_knows_the_warnings_of_earlier_attempts(facts):
    observers = Observers(facts, [], clock=lambda: 5.0)
    observers.live.recall([{"event": "warning", "time_s": float(i), "message": f"no {i}"} for i in range(25)])
    observers.warning("a new one")
    status = observers.live.picture()
    assert (status.num_warnings, status.warnings[0].text) == (26, "no 6")
    assert dict(summary_rows(status))["warnings"] == (
        "26: 0:00:23 no 23; 0:00:24 no 24; 0:00:00 a new one; 23 more, in events.jsonl"
    )
