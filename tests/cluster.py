"""Ray clusters of several nodes on this machine, with logical CPUs and GPUs: for tests of whole runs by
`--address`.

    # (CPUs, GPUs) of each node; the first is the head
    with ray_nodes((4, 0), (4, 8), (4, 8)) as cluster:
        start(directory, "train", "--address", cluster.address, ...)     # tests/run/commands.py

Each node has an IP address of its own (127.0.0.2, 127.0.0.3, ...), so that a message tells which one is
meant. The cluster has a directory, ports and a token of its own, in this process's environment while the
block runs; all its processes are ended by their pids. Nodes have no agents, which take a second of computing
and 100 MB each, unless `jobs` asks for the dashboard's job server.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.resource_isolation_config import ResourceIsolationConfig
from ray._private.utils import write_ray_address

from asyncrl_cli.job.ray.local_ray import LocalNode, ray_variables
from tests.free_port import free_port

OBJECT_STORE_BYTES = 100 * 2**20
ENDS_WITHIN_S = 10.0
QUICK = {
    "worker_niceness": 0,
    "enable_metrics_collection": False,
    "prestart_worker_first_driver": False,
    # A killed raylet refuses connections, and is dead after 4 s instead of 20. A delayed one has 10 s for
    # each check.
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 4,
}


@dataclass
class RayNodes:
    """`nodes[0]` is the head. `jobs`: it serves the dashboard and takes jobs."""

    directory: Path
    jobs: bool
    system_config: Mapping[str, Any]
    nodes: list[Node] = field(default_factory=list)

    @property
    def address(self) -> str:
        """For `--address`."""
        return str(self.nodes[0].address)

    @property
    def dashboard(self) -> str:
        """`http://HOST:PORT` of the job server, with `jobs`."""
        return f"http://{self.nodes[0].webui_url}"

    def add(self, cpus: int, gpus: int = 0, **labels: str) -> Node:
        """Start a node with these labels. In the main thread: a node ends with the thread that started it."""
        host = f"127.0.0.{len(self.nodes) + 2}"
        own = (
            {"gcs_address": self.address, "redis_address": self.address}
            if self.nodes
            else self._of_head(host)
        )
        parameters = RayParams(
            node_ip_address=host,
            num_cpus=cpus,
            num_gpus=gpus,
            labels=labels,
            object_store_memory=OBJECT_STORE_BYTES,
            min_worker_port=0,
            max_worker_port=0,
            include_log_monitor=False,
            temp_dir=str(self.directory),
            resource_isolation_config=ResourceIsolationConfig(),
            **own,
        )
        kind = Node if self.jobs else LocalNode
        self.nodes.append(kind(parameters, head=not self.nodes, shutdown_at_exit=False, spawn_reaper=True))
        # as `ray start` does: a job's RAY_ADDRESS comes from there
        write_ray_address(self.address, str(self.directory))
        return self.nodes[-1]

    def _of_head(self, host: str) -> dict[str, Any]:
        served = {"include_dashboard": True, "dashboard_host": host, "dashboard_port": free_port(host)}
        return {
            "no_monitor": True,
            "_system_config": {**QUICK, **self.system_config},
            **(served if self.jobs else {}),
        }

    def kill(self, node: Node) -> None:
        """SIGKILL all processes of a node, its workers too, as if its machine died."""
        doomed = list(processes_of(node))
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        psutil.wait_procs(doomed, timeout=ENDS_WITHIN_S)

    def close(self) -> None:
        for node in reversed(self.nodes):
            self.kill(node)


def processes_of(node: Node) -> Iterable[psutil.Process]:
    """The daemons of a node and their descendants."""
    for daemon in (started.process.pid for kind in node.all_processes.values() for started in kind):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(daemon)
            yield from (process, *process.children(recursive=True))


@contextmanager
def ray_nodes(
    *cpus_and_gpus: tuple[int, int], jobs: bool = False, **system_config: Any
) -> Iterator[RayNodes]:
    """A cluster of these nodes. `system_config`: Ray's own settings, over QUICK."""
    directory = Path(tempfile.mkdtemp(prefix="rayn-", dir="/tmp"))  # Ray's sockets need a short path
    (directory / "token").write_text(secrets.token_hex(32), encoding="ascii")
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(directory / "token"),
        "RAY_AUTH_TOKEN": None,
    }
    try:
        # What the nodes share one machine for: gloo's ranks find each other on loopback.
        with ray_variables(**variables, RAY_ADDRESS=None, GLOO_SOCKET_IFNAME="lo"):
            cluster = RayNodes(directory / "ray", jobs, system_config)
            try:
                for cpus, gpus in cpus_and_gpus:
                    cluster.add(cpus, gpus)
                yield cluster
            finally:
                cluster.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
