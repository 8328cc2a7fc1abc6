"""submit, and the other commands with the address of a job server; here the cluster's commands are run by
this process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.cli.app import run
from asyncrl_cli.job.submit import job_server
from asyncrl_cli.job.submit.job_server import Job, JobServer
from tests.statuses import write_status

ADDRESS = ("--address", "http://head:8265")


class Here(JobServer):
    """A cluster whose job server needs no Ray; `jobs` are those that were submitted, `ends` is what becomes
    of them, and `code` how their drivers exit."""

    jobs: list[Job] = []  # noqa: RUF012
    ends: str = "RUNNING"
    code: int | None = None

    def __init__(self, address: str) -> None:
        self.address = address

    def runs(self) -> list[Any]:
        return [
            SimpleNamespace(
                metadata=job.metadata, submission_id=job.id, status=self.ends, driver_exit_code=self.code
            )
            for job in self.jobs
        ]

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def started(self, job: str, watched_s: float) -> Any:
        return SimpleNamespace(status=self.ends, message="no node has room")

    def follow(self, job: str, write: Callable[[str], None], warn: object = None) -> int:
        write("error: no such thing")
        return 3

    def call(self, arguments: Sequence[str], write: Callable[[str], None], *, columns: int = 100) -> int:
        with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
            code = run(arguments)
        for line in said.getvalue().splitlines():
            write(line)
        return code


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> type[Here]:
    monkeypatch.setattr(job_server, "JobServer", Here)
    monkeypatch.setattr(Here, "jobs", [])
    return Here


@pytest.fixture
def held(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory.create(tmp_path, "first", profile_toml="", resolved={})
    (directory.start_attempt() / "driver.log").write_text("one\n", encoding="utf-8")
    write_status(directory.path, phase="running")
    yield directory
    directory.close()


def test_a_run_is_submitted_and_what_to_type_next_is_said(cluster, tmp_path, capsys):
    words = ("-p", "partial-rollout", "--name", "first", "--runs-dir", str(tmp_path), "--json")
    assert run(["submit", *words, *ADDRESS]) == 0
    out, err = capsys.readouterr()
    (job,) = cluster.jobs
    assert json.loads(out) == {
        "run": "first",
        "job": job.id,
        "runs_dir": str(tmp_path),
        "address": ADDRESS[1],
    }
    assert "asyncrl watch first --address http://head:8265" in err
    assert run(["status", *ADDRESS, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {"run": "first", "state": "running", "job": job.id, "runs_dir": str(tmp_path)}


def test_a_job_that_fails_in_the_first_seconds_is_told_with_its_exit_code(cluster, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "ends", "FAILED")
    assert run(["submit", "-p", "partial-rollout", *ADDRESS]) == 3
    assert "error: no such thing" in capsys.readouterr().err
    monkeypatch.setattr(cluster, "ends", "PENDING")
    assert run(["submit", "-p", "partial-rollout", *ADDRESS]) == 0
    assert "the job waits: no node has room" in capsys.readouterr().err


def test_another_version_on_the_cluster_is_refused_with_both(cluster, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "call", lambda self, arguments, write: write("asyncrl 0.0.1") or 0)
    monkeypatch.setattr(job_server, "__version__", "7.0")
    assert run(["submit", "-p", "partial-rollout", *ADDRESS]) == 3
    assert "http://head:8265 has asyncrl 0.0.1; this machine has asyncrl 7.0" in capsys.readouterr().err
    assert cluster.jobs == []


@pytest.mark.usefixtures("cluster")
def test_a_run_there_is_shown_logged_and_stopped_where_its_files_are(held, tmp_path, capsys):
    Here.jobs.append(Job(arguments=(), run="first", runs_dir=tmp_path))
    assert run(["logs", "first", *ADDRESS]) == 0
    assert capsys.readouterr().out == "one\n"
    assert run(["stop", "first", *ADDRESS]) == 0
    assert held.stop_requests() == 1
    write_status(held.path, phase="done")
    held.close()
    assert run(["watch", *ADDRESS]) == 0
    assert "(partial-rollout): done" in capsys.readouterr().out
    assert run(["watch", *ADDRESS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["liveness"] == "ended"


def test_a_run_there_is_followed_on_when_the_job_that_asks_has_reached_its_limit(
    cluster, monkeypatch, capsys
):
    Here.jobs.append(Job(arguments=(), run="first", runs_dir=Path("/runs")))
    codes = [job_server.TIMED_OUT, job_server.TIMED_OUT, 0]
    monkeypatch.setattr(cluster, "call", lambda self, arguments, write: codes.pop(0))
    assert run(["watch", "first", *ADDRESS, "--json"]) == 0
    assert codes == []
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("cluster")
def test_a_run_that_is_not_there_is_the_clusters_own_error(capsys, tmp_path):
    assert run(["status", "second", *ADDRESS, "--runs-dir", str(tmp_path)]) == 2
    assert run(["watch", "second", *ADDRESS, "--runs-dir", str(tmp_path)]) == 4
    assert (
        "run 'second' at http://head:8265 can no longer be followed (exit 2): no run 'second' in"
    ) in capsys.readouterr().err
    assert run(["watch", *ADDRESS]) == 3
    assert "no run was submitted to http://head:8265" in capsys.readouterr().err


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("command", ["status", "logs"])
def test_of_a_run_that_was_refused_before_it_had_files_its_jobs_words_are_printed(
    command, capsys, monkeypatch, tmp_path
):
    Here.jobs.append(Job(arguments=(), run="first", runs_dir=tmp_path))
    assert run([command, "first", *ADDRESS]) == 2
    assert "no such thing" not in capsys.readouterr().err
    monkeypatch.setattr(Here, "ends", "FAILED")
    assert run([command, "first", *ADDRESS]) == 2
    assert f"its job {Here.jobs[0].id} said:\nerror: no such thing\n" in capsys.readouterr().err


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("ends", "code", "state"),
    [
        ("FAILED", 130, "stopped"),
        ("FAILED", 1, "failed"),
        ("SUCCEEDED", 0, "done"),
        ("RUNNING", None, "running"),
    ],
)
def test_the_list_of_runs_says_how_each_ended(ends, code, state, capsys, monkeypatch):
    """Ray calls a driver that stopped its run, with exit code 130, failed."""
    Here.jobs.append(Job(arguments=(), run="first", runs_dir=Path("/runs")))
    monkeypatch.setattr(Here, "ends", ends)
    monkeypatch.setattr(Here, "code", code)
    assert run(["status", *ADDRESS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == state


@pytest.mark.usefixtures("cluster")
def test_a_resume_there_is_another_job_on_the_same_files(tmp_path):
    Here.jobs.append(Job(arguments=(), run="first", runs_dir=tmp_path))
    assert run(["resume", "first", *ADDRESS]) == 0
    job = Here.jobs[-1]
    assert (list(job.arguments), job.runs_dir, job.cargo) == (["resume", "first"], tmp_path, None)
