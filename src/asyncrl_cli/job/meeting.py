"""Where the ranks of a process group meet."""

from __future__ import annotations

import socket
import tempfile

import ray

from asyncrl_cli.plan.cluster import LOOPBACK


def meeting_point() -> str:
    """An address on this rank's node. In a local session a file: torch would listen on all interfaces."""
    host = ray.util.get_node_ip_address()
    if host == LOOPBACK:
        return f"file://{tempfile.mkdtemp(dir=ray._private.worker._global_node.get_session_dir_path())}/ranks"
    with socket.socket() as free:
        free.bind(("", 0))
        return f"tcp://{host}:{free.getsockname()[1]}"
