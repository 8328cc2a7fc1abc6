"""Jobs of a cluster, as far as they need none: their entrypoint, and addresses that do not answer."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.base.paths import ADDRESS_VARIABLE
from asyncrl_cli.job.submit import job_server
from asyncrl_cli.job.submit.cargo import PROFILE, Cargo
from asyncrl_cli.job.submit.job_server import COMMAND, MARK, Job, JobServer, _without_ray_lines


def test_the_entrypoint_keeps_what_was_shipped_and_becomes_the_driver(tmp_path, monkeypatch):
    """Run by a shell, as Ray does, in a directory that is gone afterwards."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    Cargo(root=tmp_path, files=(), profile_toml="name = 'x'", notes=()).write(shipped)
    monkeypatch.setattr(
        "asyncrl_cli.job.submit.job_server.COMMAND", "sh -c 'echo $$ $PWD $*; cat asyncrl-job.toml' asyncrl"
    )
    runs_dir = tmp_path / "the runs"
    cargo = Cargo(root=tmp_path, files=(), profile_toml="", notes=())
    job = Job(
        arguments=["train", "--profile", PROFILE, "--name", "first"],
        run="first",
        runs_dir=runs_dir,
        cargo=cargo,
    )
    process = subprocess.Popen(job.entrypoint, shell=True, cwd=shipped, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    kept = runs_dir / ".shipped" / job.id
    arguments = f"train --profile {PROFILE} --name first --runs-dir {runs_dir} --ui plain"
    # The shell has become the driver: a signal to the job is one to it.
    assert out == f"{MARK}\n{process.pid} {kept} {arguments}\nname = 'x'"


def test_of_a_jobs_log_only_what_the_command_said_is_passed_on():
    """Ray's line about the entrypoint is buffered, and may come late."""
    said: list[str] = []
    write = _without_ray_lines(said.append)
    for line in (
        "INFO job_manager.py: Runtime env is setting up.",
        MARK,
        f"Running entrypoint for job x: echo {MARK}",
        "one",
        "two",
    ):
        write(line)
    assert said == ["one", "two"]


def test_a_resumed_run_ships_nothing():
    job = Job(arguments=["resume", "first"], run="first", runs_dir=Path("/runs"))
    assert job.entrypoint == f"echo {MARK}; exec {COMMAND} resume first --runs-dir /runs --ui plain"


def test_a_job_knows_the_address_with_which_its_run_is_found():
    server = Tailed([[]], ["RUNNING"])
    server.submit(Job(arguments=["train"], run="first", runs_dir=Path("/runs")))
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": "3600", ADDRESS_VARIABLE: "http://head:8265"}
    assert server.submitted["runtime_env"] == {"env_vars": variables}


def test_an_address_of_something_else_is_refused_with_what_it_should_be():
    for address in ("ray://head:10001", "head:6379", "auto"):
        with pytest.raises(ConfigError, match="not the address of a job server") as refused:
            JobServer(address)
        assert "http://HEAD:8265" in refused.value.hint


def test_an_address_that_does_not_answer_is_an_error_at_once():
    with pytest.raises(PreflightError, match=r"no job server answers at http://127\.0\.0\.1:9"):
        JobServer("http://127.0.0.1:9")


class Tailed(JobServer):
    """A job server whose log closes after each of `openings`, which tell chunks from the log's beginning. The
    job has one status after each; a status "broken ..." is that of a job whose log breaks off. `log`: all of
    it, at the end; None if it cannot be fetched."""

    def __init__(self, openings: list[list[str]], statuses: list[str], log: str | None = None) -> None:
        self.address, self._client = "http://head:8265", self
        self.openings, self.statuses, self.log = iter(openings), statuses, log

    def get_job_logs(self, job: str) -> str:
        if self.log is None:
            raise RuntimeError("the head is busy")
        return self.log

    def submit_job(self, **words: Any) -> None:
        self.submitted = words

    def stop_job(self, job: str) -> None: ...

    delete_job = stop_job

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for chunk in next(self.openings):
            yield chunk
        if self.statuses[0].startswith("broken"):
            raise RuntimeError("closed unexpectedly")

    def details(self, job: str) -> Any:
        status = (self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]).removeprefix(
            "broken "
        )
        code = {"SUCCEEDED": 0, "FAILED": 4}.get(status)
        return SimpleNamespace(status=status, driver_exit_code=code, message="")


BEGINNING = [f"{MARK}\none\ntw"]


@pytest.mark.parametrize("statuses", [["RUNNING"], ["broken RUNNING"], ["RUNNING", "broken RUNNING"]])
def test_a_log_that_closes_while_the_job_runs_is_opened_until_the_job_ends_and_no_line_is_told_twice(
    statuses, monkeypatch
):
    monkeypatch.setattr(job_server, "LOOK_EVERY_S", 0.01)
    openings = [BEGINNING, *([[]] * (len(statuses) - 1)), [f"{MARK}\n", "one\n", "two\nthree"]]
    server = Tailed(openings, [*statuses, "FAILED"], f"{MARK}\none\ntwo\nthree")
    said: list[str] = []
    assert server.follow("a job", said.append) == 4
    assert said == ["one", "two", "three"]


@pytest.mark.parametrize("closing", ["FAILED", "broken FAILED"])
def test_of_a_log_that_closes_at_the_jobs_end_the_rest_is_fetched(closing):
    """Also of one that a proxy closes in order."""
    said: list[str] = []
    server = Tailed([BEGINNING], [closing], f"{MARK}\none\ntwo\nthree\n")
    assert server.follow("a job", said.append) == 4
    assert said == ["one", "two", "three"]


@pytest.mark.parametrize("beginning", [BEGINNING, ["Ray's own\n"]])
def test_the_exit_code_of_a_job_whose_last_lines_cannot_be_fetched_is_known_all_the_same(beginning):
    said: list[str] = []
    warned: list[str] = []
    assert Tailed([beginning], ["broken FAILED"]).follow("a job", said.append, warned.append) == 4
    assert said == ["one"] * (beginning is BEGINNING)
    (warning,) = warned
    assert warning.startswith("the last lines of the job's log may be missing: ")
    assert warning.endswith("the head is busy")


@pytest.mark.parametrize("beginning", [BEGINNING, ["Ray's own\n"]])
def test_a_command_whose_last_lines_cannot_be_fetched_fails(beginning):
    said: list[str] = []
    with pytest.raises(PreflightError, match="the head is busy"):
        Tailed([beginning], ["RUNNING", "broken SUCCEEDED"]).call(["status", "--json"], said.append)
    assert said == ["one"] * (beginning is BEGINNING)


def test_a_command_that_never_ends_is_not_followed_for_ever(monkeypatch):
    monkeypatch.setattr(job_server, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(job_server, "LONGEST_COMMAND_S", 0.1)
    monkeypatch.setattr(job_server, "START_S", 0.1)
    server = Tailed([[]] * 10_000, ["RUNNING"])
    with pytest.raises(PreflightError, match="still runs"):
        server.call(["status"], print)


def test_a_line_without_end_is_not_kept(monkeypatch):
    monkeypatch.setattr(job_server, "LONGEST_LINE", 100)
    with pytest.raises(PreflightError, match="a line of more than 100 characters"):
        Tailed([["x" * 60] * 2], ["RUNNING"]).follow("a job", print)


def test_a_job_that_was_stopped_was_interrupted():
    assert Tailed([[]], ["STOPPED"], "").follow("a job", print) == 130


def test_a_log_that_cannot_be_opened_is_an_error():
    with pytest.raises(PreflightError, match="closed unexpectedly"):
        Tailed([[]], ["broken RUNNING"]).follow("a job", print)
