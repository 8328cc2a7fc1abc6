"""Clusters as `ray start --head` starts them, with no variable set: with a token if its user has one."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.free_port import free_port
from tests.run.commands import LIMIT_S, LONG, SMALL, finish, lines, start

pytestmark = pytest.mark.slow

HOST = "127.0.0.9"
START_S = 120.0
ENDS_WITHIN_S = 30.0


@dataclass(frozen=True)
class Head:
    """`variables`: of whoever uses the cluster: a home directory and nothing of Ray's."""

    address: str
    dashboard: str
    variables: dict[str, str]


@contextmanager
def plain_head(**own: str) -> Iterator[Head]:
    """`ray start --head` of a user with a token, at ports that nobody else has. `own`: further variables of
    the head."""
    home = Path(tempfile.mkdtemp(prefix="head-", dir="/tmp"))  # Ray's sockets need a short path
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(secrets.token_hex(32), encoding="ascii")
    ports = {
        name: free_port(HOST)
        for name in ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
    }
    options = {
        **ports,
        "node-ip-address": HOST,
        "dashboard-host": HOST,
        "temp-dir": home / "ray",
        "num-cpus": 4,
        "object-store-memory": 100 * 2**20,
        "min-worker-port": 0,
        "max-worker-port": 0,
    }
    words = [
        "--head",
        "--block",
        "--disable-usage-stats",
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    unset = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables = {"HOME": str(home), "GLOO_SOCKET_IFNAME": "lo"}
    with (home / "log").open("wb") as log:
        ray = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *words],
            env=unset | variables | own,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        head = Head(f"{HOST}:{ports['port']}", f"http://{HOST}:{ports['dashboard-port']}", variables)
        _wait_for(ray, home / "log")
        yield head
    finally:
        doomed = list[psutil.Process]()
        with suppress(psutil.NoSuchProcess):  # it has ended: the failure says why
            doomed = [psutil.Process(ray.pid), *psutil.Process(ray.pid).children(recursive=True)]
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(doomed, timeout=ENDS_WITHIN_S)
        ray.wait(ENDS_WITHIN_S)
        shutil.rmtree(home, ignore_errors=True)


def _wait_for(ray: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text(errors="replace"):
        assert ray.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < until_s, log.read_text(errors="replace")
        time.sleep(0.1)


def asked(
    directory: Path, head: Head, command: str, *words: str, sets: tuple[str, ...] = (), **own: str
) -> tuple[int, str, str]:
    return finish(start(directory, command, *words, sets=sets, verbose=False, **head.variables, **own))


@pytest.fixture
def no_variable_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_variable_of_ray")
def test_a_run_is_submitted_watched_and_stopped_on_a_head_that_asks_for_its_users_token(tmp_path):
    with plain_head() as head:
        there, run = ("--address", head.dashboard), tmp_path / "runs" / "sent"
        words = ("--profile", "partial-rollout", "--name", "sent", "--runs-dir", str(run.parent), "--json")
        code, _, err = asked(tmp_path, head, "submit", *words, *there, sets=LONG)
        assert code == 0, err
        until_s = time.monotonic() + LIMIT_S
        while not lines(run / "metrics.jsonl"):
            assert time.monotonic() < until_s, list(run.glob("logs/latest/*"))
            time.sleep(0.1)
        code, out, err = asked(tmp_path, head, "status", "--json", *there)
        assert (code, [job["run"] for job in json.loads(out)]) == (0, ["sent"]), err
        watching = start(tmp_path, "watch", "sent", *there, verbose=False, **head.variables)
        assert watching.stdout is not None
        assert "sent (partial-rollout)" in watching.stdout.readline()
        code, _, err = asked(tmp_path, head, "stop", "sent", *there)
        assert code == 0, err
        finish(watching)
        while json.loads((run / "status.json").read_text())["phase"] != "stopped":
            assert time.monotonic() < until_s
            time.sleep(0.1)

        words = ("--profile", "partial-rollout", "--name", "joined", "--runs-dir", str(run.parent))
        sets = (*SMALL, "run.train_steps=1")
        code, _, err = asked(
            tmp_path, head, "train", *words, "--ui", "plain", sets=sets, RAY_ADDRESS=head.address
        )
        assert code == 0, err

        for another in (
            {"RAY_AUTH_TOKEN": secrets.token_hex(32)},
            {"HOME": str(tmp_path)},
            {"RAY_AUTH_MODE": "disabled"},
        ):
            for command in (
                ("status", *there),
                ("plan", "--profile", "partial-rollout", "--address", head.address),
            ):
                code, _, err = finish(start(tmp_path, *command, verbose=False, **head.variables | another))
                assert (code, "token" in err, "hint:" in err) == (3, True, True), err


@pytest.mark.usefixtures("no_variable_of_ray")
def test_a_head_that_asks_for_no_token_gets_none(tmp_path):
    with plain_head(RAY_AUTH_MODE="disabled") as head:
        code, _, err = asked(tmp_path, head, "status", "--address", head.dashboard)
        assert (code, "no run was submitted" in err) == (0, True), err
        code, _, err = asked(
            tmp_path, head, "plan", "--profile", "partial-rollout", "--address", head.address
        )
        assert code == 0, err
