"""What processes listen on, from /proc, and that Ray's doors need the token (docs/security.md)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from tests.run.commands import command_line

LISTEN = "0A"
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
    """(pid, address, port) of every TCP socket in the state LISTEN, for each of the processes that holds
    it."""
    holders = defaultdict[str, list[int]](list)
    for inode, pid in inodes(pids):
        holders[inode].append(pid)
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in holders:
                host, port = fields[1].split(":")
                found += [(pid, address(host), int(port, 16)) for pid in holders[fields[9]]]
    return found


def inodes(pids: set[int]) -> Iterator[tuple[str, int]]:
    for pid in pids:
        files = list[Path]()
        with contextlib.suppress(OSError):  # ended meanwhile: what is left of it belongs to root
            files += Path(f"/proc/{pid}/fd").iterdir()
        for file in files:
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(file)
                if target.startswith("socket:["):
                    yield target[8:-1], pid


def address(kernel_hex: str) -> str:
    """The kernel writes 32-bit words in the machine's byte order; an IPv4 address within IPv6 is told as
    IPv4."""
    words = [
        int(kernel_hex[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(kernel_hex), 8)
    ]
    found = ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)


def assert_shut(family: set[int]) -> None:
    """All of a run's processes listen on loopback alone; Ray is two daemons, behind a token that rewards do
    not see."""
    found = listening(family)
    assert {host for _, host, _ in found} == {"127.0.0.1"}
    assert {"gcs_server", "raylet"} <= {
        Path(os.fsdecode(command_line(pid).split(b"\0")[0])).name for pid in family
    }
    assert not [
        line
        for line in map(command_line, family)
        if b"agent" in line.split(b"\0")[0] or b"dashboard.py" in line
    ]
    (gcs,) = [(host, port) for pid, host, port in found if b"gcs_server" in command_line(pid).split(b"\0")[0]]
    asked = subprocess.run(
        [sys.executable, "-c", ASK_WITHOUT_TOKEN, f"{gcs[0]}:{gcs[1]}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "InvalidAuthToken" in asked.stdout + asked.stderr
    (reward,) = [pid for pid in family if b"asyncrl_cli.sandbox.child_host reward" in command_line(pid)][:1]
    assert b"RAY_" not in Path(f"/proc/{reward}/environ").read_bytes()
