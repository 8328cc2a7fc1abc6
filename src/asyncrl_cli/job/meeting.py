"""Where an actor runs, where the ranks of a process group meet, and on which nodes they are missing."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import ray

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.plan.cluster import LOOPBACK


class Whereabouts(NamedTuple):
    """A node's id and address; `host` is "" for the driver's own, which no message needs to name."""

    node: str = ""
    host: str = ""

    def seen_from_here(self) -> Whereabouts:
        return self._replace(host="") if self.host == ray.util.get_node_ip_address() else self


def whereabouts() -> Whereabouts:
    return Whereabouts(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def meeting_point() -> str:
    """An address on this rank's node. In a local session a file: torch would listen on all interfaces."""
    host = ray.util.get_node_ip_address()
    if host == LOOPBACK:
        return f"file://{tempfile.mkdtemp(dir=ray._private.worker._global_node.get_session_dir_path())}/ranks"
    with socket.socket() as free:
        free.bind(("", 0))
        return f"tcp://{host}:{free.getsockname()[1]}"


@contextmanager
def naming_nodes(nodes: Sequence[str]) -> Iterator[None]:
    """Adds to the error of missing ranks the node of each. `nodes`: of all ranks."""
    from asyncrl_cli.train.first_meeting import RanksMissing

    try:
        yield
    except RanksMissing as missing:
        where = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in missing.ranks)
        raise ExecutorFailed(f"{missing.cause}: {where}", hint=missing.hint) from missing
