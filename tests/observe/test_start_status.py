"""status.json from the moment that the command was typed."""

import io
import json
import time

import pytest

from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.observe import observers
from asyncrl_cli.observe.observers import StartStatus
from asyncrl_cli.observe.run_status import read_status
from asyncrl_cli.observe.screen import print_status
from asyncrl_cli.observe.terminal import SafeConsole


def shown(run_dir):
    stream = io.StringIO()
    print_status(read_status(run_dir.name, run_dir.parent), SafeConsole(file=stream, width=120))
    return stream.getvalue()


def test_a_start_is_shown_with_what_it_does_before_anything_else_is_known(tmp_path, facts, monkeypatch):
    run = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    doing = StartStatus(run.status, facts)
    assert read_status("first", tmp_path).liveness == "live"
    monkeypatch.setattr(observers, "STATUS_EVERY_S", float("inf"))
    doing("warm start")
    doing("warm start  120/500  24%", is_new=False)
    assert shown(run.path).count("starting: warm start\n") == 1
    monkeypatch.setattr(observers, "STATUS_EVERY_S", 0.0)
    doing("warm start  121/500  24%", is_new=False)
    assert "starting: warm start  121/500  24%" in shown(run.path)
    run.close()


def test_a_start_that_says_nothing_for_long_is_live_while_it_holds_the_lock(tmp_path, facts):
    run = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    StartStatus(run.status, facts)("starting Ray")
    run.status.write_text(json.dumps({**json.loads(run.status.read_text()), "updated_at": time.time() - 600}))
    assert read_status("first", tmp_path).liveness == "live"
    run.close()
    assert read_status("first", tmp_path).liveness == "dead"


def test_a_start_that_was_killed_is_dead_and_says_how_to_begin_anew(tmp_path, facts):
    run = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    StartStatus(run.status, facts)
    status = json.loads(run.status.read_text())
    run.status.write_text(json.dumps({**status, "pid": 2**22 + 1, "updated_at": time.time() - 60}))
    run.close()
    found = read_status("first", tmp_path)
    assert found.liveness == "dead"
    profile = tmp_path / "first" / "profile.toml"
    anew = f"asyncrl train --profile {profile} --name first --runs-dir {tmp_path} --resume auto"
    assert f"before its first checkpoint; next: `{anew}`" in found.remark
    assert found.next_command == anew


def test_a_resume_that_does_not_begin_takes_back_what_it_said(tmp_path, facts):
    run = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    StartStatus(run.status, facts)
    before = json.dumps(
        {**json.loads(run.status.read_text()), "phase": "stopped", "checkpoint": "step-000040"}
    )
    run.status.write_text(before)
    resumed = StartStatus(run.status, facts)
    during = json.loads(run.status.read_text())
    resumed.take_back()
    resumed("loading the task")  # a thread that has not yet heard of it
    assert (during["phase"], during["checkpoint"]) == ("starting", "step-000040")
    assert run.status.read_text() == before
    run.close()


def test_a_status_that_nobody_can_read_is_no_reason_not_to_start(tmp_path, facts):
    run = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    run.status.write_text("[1, 2")
    StartStatus(run.status, facts)
    assert read_status("first", tmp_path).status.phase == "starting"
    run.close()


def test_a_first_status_that_the_disk_refuses_is_the_error(tmp_path, facts, monkeypatch):
    def full(path, text, **how):
        raise OSError(28, "No space left on device", str(path))

    run = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    monkeypatch.setattr(observers, "replace_text", full)
    with pytest.raises(OSError, match="No space left"):
        StartStatus(run.status, facts)
    run.close()
