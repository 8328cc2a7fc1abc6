"""A cluster as `ray start --head` starts it for a user with a token, and that user's environment: no variable
of Ray's is set."""

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

from tests.cluster import QUICK
from tests.free_port import free_port

HOST = "127.0.0.9"
START_S = 120.0
ENDS_WITHIN_S = 30.0


@dataclass(frozen=True)
class Head:
    """`address`: of its GCS; `dashboard`: of its job server."""

    address: str
    dashboard: str


@contextmanager
def plain_head(**own: str) -> Iterator[Head]:
    """`ray start --head` at ports that nobody else has. Within the block this process's environment is its
    user's, with a home directory that holds the token. `own`: further variables of the head."""
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
        "system-config": json.dumps(QUICK),
    }
    words = [
        "--head",
        "--block",
        "--disable-usage-stats",
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        with (home / "log").open("wb") as log:
            ray = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *words],
                env=os.environ | own,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            _wait_for(ray, home / "log")
            yield Head(f"{HOST}:{ports['port']}", f"http://{HOST}:{ports['dashboard-port']}")
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
