"""A run directory is made once, held by one driver, and knows its attempts and stop requests."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.base.paths import ADDRESS_VARIABLE, as_typed
from asyncrl_cli.checkpoint import lookup
from asyncrl_cli.checkpoint.lookup import is_locked, resolve
from asyncrl_cli.checkpoint.run_directory import RunDirectory, check_free, fresh_name, request_stop

HOLDER = """
import sys
from pathlib import Path
from asyncrl_cli.checkpoint.run_directory import RunDirectory
run = RunDirectory.open(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(
        tmp_path, "otter", profile_toml="a = 1\n", resolved={"schema_version": 1, "profile": {"a": 1}}
    )
    yield run
    run.close()


def test_a_new_run_has_its_files_and_folders(run):
    assert run.profile_toml.read_text() == "a = 1\n"
    assert json.loads(run.config_resolved.read_text()) == {"schema_version": 1, "profile": {"a": 1}}
    assert all(directory.is_dir() for directory in (run.checkpoints, run.samples, run.logs))


def test_a_name_in_use_is_refused_with_both_ways_out(run):
    with pytest.raises(RefusedError, match="a run of that name is running") as caught:
        RunDirectory.create(run.path.parent, "otter", profile_toml="", resolved={})
    for command in ("watch", "stop"):
        assert f"`asyncrl {command} otter --runs-dir {run.path.parent}`" in caught.value.hint
    run.close()
    (run.path / "metrics.jsonl").touch()
    with pytest.raises(RefusedError, match="a run of that name exists") as caught:
        RunDirectory.create(run.path.parent, "otter", profile_toml="", resolved={})
    assert f"`asyncrl train --profile {run.profile_toml} --name NAME` starts a new run" in caught.value.hint


def test_a_run_is_called_by_its_name_and_by_what_else_a_command_needs_to_find_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert as_typed(tmp_path / "runs" / "otter") == "otter"
    assert as_typed(tmp_path / "all runs" / "otter") == f"otter --runs-dir '{tmp_path}/all runs'"
    monkeypatch.setenv(ADDRESS_VARIABLE, "http://head:8265")
    assert as_typed(tmp_path / "all runs" / "otter") == "otter --address http://head:8265"


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 101, "sp ace"])
def test_a_name_that_is_no_directory_name_is_a_usage_error(tmp_path, name):
    with pytest.raises(ConfigError, match=r"run\.name"):
        RunDirectory.create(tmp_path, name, profile_toml="", resolved={})


def test_two_drivers_never_hold_one_run_and_a_killed_one_lets_go(run):
    run.close()
    words, pipe = [sys.executable, "-c", HOLDER, str(run.path)], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert is_locked(run.path)
        with pytest.raises(RefusedError, match=f"pid {holder.pid}") as caught:
            RunDirectory.open(run.path)
        assert "asyncrl stop otter" in caught.value.hint
        with pytest.raises(RefusedError, match="is running, and has no checkpoint yet") as caught:
            resolve("otter", run.path.parent)
        assert "asyncrl watch otter" in caught.value.hint
        holder.kill()
    assert not is_locked(run.path)
    RunDirectory.open(run.path).close()


def test_a_process_that_tests_the_lock_for_a_moment_keeps_no_driver_out(run, monkeypatch):
    run.close()
    with (run.path / "lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        with monkeypatch.context() as patch:
            patch.setattr(lookup, "LOOK_TIMEOUT_S", -1.0)
            assert lookup.take_lock(run.path) is None, "this process never lets go"
        monkeypatch.setattr(
            lookup, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: looking.close())
        )
        RunDirectory.open(run.path).close()


def test_a_driver_that_holds_the_lock_is_not_waited_for(run, monkeypatch):
    monkeypatch.setattr(
        lookup, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: pytest.fail("it waits"))
    )
    assert lookup.take_lock(run.path) is None


def test_what_is_no_run_cannot_be_opened(tmp_path, run):
    (tmp_path / "other").mkdir()
    with pytest.raises(RefusedError, match=r"profile\.toml is missing"):
        RunDirectory.open(tmp_path / "other")


def test_attempts_have_numbered_logs_and_a_link_to_the_latest(run):
    assert [run.start_attempt().name for _ in range(11)][-1] == "attempt-11"
    assert os.readlink(run.logs / "latest") == "attempt-11"
    assert run.attempts == 11


def test_stop_requests_are_counted_until_the_next_driver_takes_the_run(run):
    assert run.stop_requests() == 0
    assert [request_stop(run.path), request_stop(run.path)] == [1, 2]
    assert run.stop_requests() == 2
    run.close()
    resumed = RunDirectory.open(run.path)
    assert resumed.stop_requests() == 0
    request_stop(run.path)
    resumed.start_attempt()
    assert resumed.stop_requests() == 1
    resumed.close()


def test_a_removed_run_gives_its_name_free(run):
    run.start_attempt()
    run.remove()
    assert list(run.path.parent.iterdir()) == []
    RunDirectory.create(run.path.parent, "otter", profile_toml="", resolved={}).close()


def test_the_logs_of_a_start_that_failed_can_be_kept(run):
    (run.start_attempt() / "rollout-0.log").write_text("out of memory")
    kept = run.remove(keep_logs=True)
    assert [path.name for path in run.path.parent.iterdir()] == [kept.name]
    assert (kept / "latest" / "rollout-0.log").read_text() == "out of memory"


def test_a_fresh_name_is_free(tmp_path, monkeypatch):
    name = fresh_name("partial-rollout", tmp_path)
    assert re.fullmatch(r"partial-rollout-\d{8}-\d{6}", name)
    monkeypatch.setattr(time, "strftime", lambda *of: "20261124-120000")
    for number in ("", "-2"):
        name = fresh_name("partial-rollout", tmp_path)
        assert name == f"partial-rollout-20261124-120000{number}"
        (tmp_path / name).mkdir()


def started(tmp_path, phase, *others):
    """What `kill -9` leaves of a run in this phase."""
    run = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    run.start_attempt()
    run.status.write_text(json.dumps({"phase": phase, "doing": "loading the task"}))
    for name in others:
        (run.path / name).touch()
    run.close()
    return run


def test_a_run_that_was_killed_while_it_started_is_replaced(tmp_path):
    started(tmp_path, "starting")
    check_free(tmp_path, "first")
    run = RunDirectory.create(tmp_path, "first", profile_toml="new", resolved={})
    assert run.profile_toml.read_text() == "new"
    assert not run.status.exists()
    run.close()


@pytest.mark.parametrize(
    ("phase", "others"),
    [
        ("running", ()),
        ("failed", ()),
        ("starting", ("metrics.jsonl",)),
        ("starting", ("my-notes.txt",)),
        ("starting", ("checkpoints/latest",)),
    ],
)
def test_a_run_in_which_anything_could_be_lost_is_not(tmp_path, phase, others):
    started(tmp_path, phase, *others)
    with pytest.raises(RefusedError, match="a run of that name exists"):
        RunDirectory.create(tmp_path, "first", profile_toml="new", resolved={})


@pytest.mark.parametrize(
    ("phase", "command"), [("done", "report"), ("stopped", "train"), ("failed", "train")]
)
def test_whoever_takes_the_name_of_a_run_is_told_what_can_be_done_with_that_run(tmp_path, phase, command):
    run = started(tmp_path, phase)
    with pytest.raises(RefusedError, match=f"a run of that name exists: {run.path}") as refused:
        check_free(tmp_path, "first")
    assert "another --name" in refused.value.hint
    assert re.findall("`asyncrl ([a-z]+) ", refused.value.hint) == [command]


def test_a_run_that_is_starting_and_a_directory_of_somebody_else_are_not_replaced(tmp_path):
    run = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    (tmp_path / "second").mkdir()
    for name in ("first", "second"):
        with pytest.raises(RefusedError, match=r"a run of that name (exists|is running)"):
            check_free(tmp_path, name)
    run.close()


def test_a_directory_of_runs_that_was_made_for_a_run_goes_with_it(tmp_path):
    runs_dir = tmp_path / "runs"
    with pytest.raises(UnicodeEncodeError):
        RunDirectory.create(runs_dir, "first", profile_toml="\udc80", resolved={})
    assert not runs_dir.exists()
    run = RunDirectory.create(runs_dir, "first", profile_toml="", resolved={})
    run.close()
    run.remove()
    assert not runs_dir.exists()


def test_a_start_whose_directory_of_runs_another_start_takes_away_makes_it_again(tmp_path, monkeypatch):
    runs_dir, mkdir, taken = tmp_path / "runs", os.mkdir, []

    def late(path, *arguments):
        if os.path.basename(path) == "first" and not taken:
            taken.append(os.rmdir(runs_dir))
        mkdir(path, *arguments)

    monkeypatch.setattr(os, "mkdir", late)
    RunDirectory.create(runs_dir, "first", profile_toml="new", resolved={}).close()
    assert taken
    assert (runs_dir / "first" / "profile.toml").read_text() == "new"


def test_a_directory_of_runs_that_is_a_file_is_not_a_run_in_use(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(FileExistsError):
        RunDirectory.create(tmp_path / "runs", "first", profile_toml="", resolved={})
