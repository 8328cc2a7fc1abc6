"""stop and logs on run directories as a driver leaves them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.cli.app import run
from asyncrl_cli.cli.watch import follow_lines
from tests.statuses import write_status


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    logs = directory.start_attempt()
    (logs / "driver.log").write_text("one\ntwo\n", encoding="utf-8")
    (logs / "trainer-0.log").write_text("zero\n", encoding="utf-8")
    (logs / "trainer-1.log").write_text("uno\n", encoding="utf-8")
    yield directory
    directory.close()


def test_stop_writes_a_request_that_the_driver_reads(directory, tmp_path, capsys):
    write_status(directory.path, phase="running")
    for requests, said in ((1, "finish its step"), (2, "end at once")):
        assert run(["stop", "first", "--runs-dir", str(tmp_path)]) == 0
        assert directory.stop_requests() == requests
        assert said in capsys.readouterr().err


def test_a_run_that_is_starting_is_not_promised_a_checkpoint(directory, tmp_path, capsys):
    write_status(directory.path, phase="starting", doing="loading the task")
    assert run(["stop", "first", "--runs-dir", str(tmp_path)]) == 0
    assert "nothing new to checkpoint" in capsys.readouterr().err
    assert directory.stop_requests() == 1


def test_a_run_that_has_ended_cannot_be_stopped(directory, tmp_path, capsys):
    write_status(directory.path, phase="done")
    directory.close()
    assert run(["stop", "first", "--runs-dir", str(tmp_path)]) == 4
    assert "is not running" in capsys.readouterr().err
    assert directory.stop_requests() == 0


def test_a_resumed_run_that_is_still_starting_can_be_stopped(directory, tmp_path, capsys):
    write_status(directory.path, phase="stopped")
    assert run(["stop", "first", "--runs-dir", str(tmp_path)]) == 0
    assert "finish its step" in capsys.readouterr().err
    assert directory.stop_requests() == 1


def test_status_as_json_is_what_the_driver_wrote_and_whether_it_lives(directory, tmp_path, capsys):
    write_status(directory.path, phase="running")
    assert run(["status", "first", "--runs-dir", str(tmp_path), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["phase"], status["liveness"]) == ("running", "live")


@pytest.mark.parametrize(
    ("role", "lines"),
    [
        (None, ["driver     | one", "driver     | two", "trainer-0  | zero", "trainer-1  | uno"]),
        ("driver", ["one", "two"]),
        ("trainer", ["trainer-0  | zero", "trainer-1  | uno"]),
        ("trainer-1", ["uno"]),
    ],
)
def test_logs_of_a_role_or_of_all(directory, tmp_path, role, lines, capsys):
    arguments = [] if role is None else ["--role", role]
    assert run(["logs", "first", "--runs-dir", str(tmp_path), *arguments]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_the_lines_of_all_logs_stand_in_order_of_time_with_those_that_follow_without_one(
    directory, tmp_path, capsys
):
    logs, day = directory.start_attempt(), "2026-11-27 22:16"
    (logs / "driver.log").write_text(f"{day}:01,000 one\n{day}:03,000 three\n  its traceback\n")
    (logs / "trainer-0.log").write_text(f"a start\n{day}:02,500 two\n{day}:04,000 four\n")
    assert run(["logs", "first", "--runs-dir", str(tmp_path)]) == 0
    words = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert words == ["start", "one", "two", "three", "traceback", "four"]


def test_an_unknown_role_names_those_there_are(directory, tmp_path, capsys):
    assert run(["logs", "first", "--runs-dir", str(tmp_path), "--role", "reward"]) == 2
    assert "hint: logs: driver, trainer-0, trainer-1" in capsys.readouterr().err


def test_the_logs_of_earlier_attempts_are_within_reach(directory, tmp_path, capsys):
    (directory.start_attempt() / "driver.log").write_text("resumed\n", encoding="utf-8")
    of_driver = ["logs", "first", "--runs-dir", str(tmp_path), "--role", "driver"]
    assert run(of_driver) == 0
    said = capsys.readouterr()
    hint = "attempt 2 is the newest; --attempt 1 shows the earlier one\n"
    assert (said.out, said.err) == ("resumed\n", hint)
    assert run([*of_driver, "--attempt", "1"]) == 0
    assert capsys.readouterr().out == "one\ntwo\n"
    assert run([*of_driver, "--attempt", "3"]) == 2
    assert "hint: attempts: 1 to 2" in capsys.readouterr().err
    assert run([*of_driver, "--attempt", "1", "--follow"]) == 2


def test_following_a_log_gives_whole_lines_as_they_come_and_ends_with_the_run(directory):
    path = directory.logs / "latest" / "driver.log"
    steps = iter(["thr", "ee\nfour\n", None])

    def write_on() -> None:
        text = next(steps)
        if text is None:
            directory.close()
        else:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)

    lines = follow_lines(directory.path, lambda: [path], follow=True, wait=write_on)
    assert [line for _, line in lines] == ["one", "two", "three", "four"]


def test_following_goes_on_behind_a_line_without_end(directory):
    path = directory.start_attempt() / "driver.log"
    path.write_text("x" * 3 * 2**19 + "\nnext\n")
    lines = follow_lines(
        directory.path, lambda: [path], follow=True, wait=lambda: pytest.fail("waits for the end of a line")
    )
    assert [len(line) for _, line in islice(lines, 3)] == [2**20, 2**19, 4]


def test_following_takes_in_the_logs_that_come_while_a_run_starts(directory):
    logs = directory.logs / "latest"
    steps = iter([True, False])

    def write_on() -> None:
        if next(steps):
            (logs / "rollout-0.log").write_text("null\n", encoding="utf-8")
        else:
            directory.close()

    lines = follow_lines(directory.path, lambda: sorted(logs.glob("[dr]*.log")), follow=True, wait=write_on)
    assert list(lines) == [("driver", "one"), ("driver", "two"), ("rollout-0", "null")]
