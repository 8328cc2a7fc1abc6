"""What the processes of a real run listen on, from /proc, and that Ray's doors need the token (docs/security.md)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import pytest

from tests.engines.needs import needs_vllm
from tests.run.commands import SMALL, command_line, descendants, finish, kill, start, wait_for_steps

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")]

LISTEN = "0A"
LONG = (*SMALL, "run.train_steps=400")
ASK_WITHOUT_TOKEN = """
import os, sys
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None)
except Exception as error:
    print(type(error).__name__, error)
else:
    print("let in")
"""


def listening(pids: set[int]) -> list[tuple[int, str, int]]:
    """(pid, address, port) of every TCP socket in the state LISTEN that one of the processes holds."""
    holders = dict(inodes(pids))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in holders:
                host, port = fields[1].split(":")
                found.append((holders[fields[9]], address(host), int(port, 16)))
    return found


def inodes(pids: set[int]) -> Iterator[tuple[str, int]]:
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                target = os.readlink(file)
                if target.startswith("socket:["):
                    yield target[8:-1], pid


def address(kernel_hex: str) -> str:
    """The kernel writes 32-bit words in the machine's byte order; an IPv4 address within IPv6 is told as IPv4."""
    words = [int(kernel_hex[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(kernel_hex), 8)]
    found = ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)


def test_the_kernels_table_is_read_rightly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("", 0)) as everywhere:
        found = {(host, port) for _, host, port in listening({os.getpid()})}
        assert ("127.0.0.1", here.getsockname()[1]) in found
        assert ("0.0.0.0", everywhere.getsockname()[1]) in found


def test_every_process_of_a_run_listens_on_loopback_alone_and_the_door_needs_the_token(tmp_path: Path) -> None:
    words = ("--profile", "partial-rollout", "--name", "shut", "--ui", "plain")
    process = start(tmp_path, "train", *words, sets=(*LONG, "placement.trainer_workers=2"))
    try:
        wait_for_steps(process, tmp_path / "runs" / "shut", 2)
        family = {process.pid, *descendants(process.pid)}
        found = listening(family)
        assert {host for _, host, _ in found} == {"127.0.0.1"}
        ours = {pid for pid in family if b"ray::" in command_line(pid)}
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in ours} == {os.getpriority(os.PRIO_PROCESS, 0)}
        names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in family}
        assert {"gcs_server", "raylet"} <= names
        assert not [line for line in map(command_line, family) if b"agent" in line.split(b"\0")[0] or b"dashboard.py" in line]
        (gcs,) = [(host, port) for pid, host, port in found if b"gcs_server" in command_line(pid).split(b"\0")[0]]
        asked = subprocess.run(
            [sys.executable, "-c", ASK_WITHOUT_TOKEN, f"{gcs[0]}:{gcs[1]}"], capture_output=True, text=True, timeout=60, check=False
        )
        assert "InvalidAuthToken" in asked.stdout + asked.stderr
        (reward,) = [pid for pid in family if b"reward_worker" in command_line(pid)][:1]
        assert b"RAY_" not in Path(f"/proc/{reward}/environ").read_bytes()
    finally:
        kill(process, signal.SIGINT)
        finish(process)


@needs_vllm
def test_so_does_every_process_of_vllm(tmp_path: Path) -> None:
    words = ("--profile", "partial-rollout", "--name", "open", "--ui", "plain")
    process = start(tmp_path, "train", *words, sets=(*LONG, "rollout.engine=vllm"))
    try:
        wait_for_steps(process, tmp_path / "runs" / "open", 1)
        found = listening({process.pid, *descendants(process.pid)})
        assert any(b"VLLM::EngineCore" in command_line(pid) for pid, _, _ in found)
        assert {host for _, host, _ in found} == {"127.0.0.1"}
    finally:
        kill(process, signal.SIGINT)
        finish(process)
