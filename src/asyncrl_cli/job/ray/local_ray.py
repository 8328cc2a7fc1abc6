"""Starts Ray on this machine alone: two daemons (gcs_server, raylet) on loopback, protected by a token of the
session's own.

`ray.init()` would also start an autoscaler, a log monitor, an API server and two agents: five more Python
processes, some of which take the run with them when they end, and four more open ports. So this module starts
the node, and `ray.init` connects to it.

It uses private modules of Ray (`ray._private`), so pyproject.toml pins Ray's minor version.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from ray._private import ray_constants, services, worker
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.resource_isolation_config import ResourceIsolationConfig
from ray._raylet import AuthenticationTokenLoader, Config, persist_port  # type: ignore[attr-defined]

from asyncrl_cli.job.ray.lifeline import Daemons
from asyncrl_cli.plan.cluster import LOOPBACK

RAY_DIRECTORY, TOKEN = "ray", "token"
"""Names in the session's directory, which has mode 0700: Ray makes its own directory with 0777."""
STORED_RETURNS = {"RAY_max_direct_call_object_size": "256"}
"""An environment variable for a local session: a call's return value with more bytes goes to the object
store. Ray's default of 100 KB would send the arrays of short responses through the driver. `ray.put` in the
actor is no alternative: its objects are lost with the actor's process, return values are not. Nodes of a
cluster have their own variables (docs/cluster.md)."""
DEFAULT_VARIABLES: dict[str, str | None] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise Ray prints the errors of calls that nobody awaits any more (cancelled at a run's end) after
    # the summary.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}

PATIENT = {
    # Whether the daemons live is known from their pids (lifeline.py). Ray's own timeouts are wrong on a busy
    # laptop: at load 16 on 2 cores it declared its only node dead.
    "health_check_failure_threshold": 1_000,
    "health_check_timeout_ms": 60_000,
    "health_check_initial_delay_ms": 60_000,
    # A worker of ours imports torch and ray, which has taken minutes on such a machine.
    "worker_register_timeout_seconds": 600,
    # How long a process does without an unreachable peer before Ray checks whether the peer is dead.
    "core_worker_rpc_server_reconnect_timeout_base_s": 60,
    "core_worker_rpc_server_reconnect_timeout_max_s": 300,
    "raylet_rpc_server_reconnect_timeout_base_s": 60,
    "raylet_rpc_server_reconnect_timeout_max_s": 300,
    # A loopback connection is never lost, but its other end may wait long for a core.
    "grpc_keepalive_timeout_ms": 300_000,
    "grpc_client_keepalive_timeout_ms": 300_000,
}
SYSTEM_CONFIG = PATIENT | {
    # Ray's default is 15: beside two busy processes on two cores the workers got 5% of a core, and a run took
    # minutes to start.
    "worker_niceness": 0,
    "enable_metrics_collection": False,
    # Each of our actors has its own environment variables and so its own process: idle ones made ahead would
    # stay idle.
    "prestart_worker_first_driver": False,
    # Nobody reads these events, and without a gcs_server Ray would wait 5 s at the end for them to be taken.
    "task_events_report_interval_ms": 0,
    "task_events_shutdown_flush_timeout_ms": 100,
    # gives agents a stdin that closes when the raylet ends
    "enable_pipe_based_agent_to_parent_health_check": True,
}
AGENT_COMMANDS = "--dashboard_agent_command=", "--runtime_env_agent_command="
NO_AGENT = subprocess.list2cmdline(["sh", "-c", "exec cat"])
AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
NOT_IN_USE = -1


class LocalNode(Node):  # type: ignore[misc]
    """A head node without the API server and the agents, which `RayParams` cannot switch off."""

    def start_api_server(self, **options: object) -> None:
        self._webui_url = ""

    def start_raylet(self, *args: object, **options: object) -> None:
        """The raylet needs two agents and their ports, and ends when an agent does. We have no metrics to
        collect and no runtime environment to build, so each agent is a `cat`, which waits for the raylet's
        end."""
        for name in AGENT_PORTS:
            persist_port(self._session_dir, self._node_id, name, NOT_IN_USE)
        start = services.start_ray_process

        def without_agents(command: Sequence[str], *rest: object, **more: object) -> object:
            words = [*command]
            for key in AGENT_COMMANDS:  # each is there once, or this Ray starts its raylet otherwise
                (place,) = (number for number, word in enumerate(words) if word.startswith(key))
                words[place] = key + NO_AGENT
            return start(words, *rest, **more)

        with _replaced(services, "start_ray_process", without_agents):
            super().start_raylet(*args, **options)


@contextlib.contextmanager
def local_node(
    directory: Path, *, num_cpus: int, num_gpus: int, object_store_bytes: int
) -> Iterator[tuple[str, Daemons]]:
    """Start a session's daemons for the block. Yields the address to connect to, and the daemons. Raises what
    Ray raises if they do not start."""
    (directory / RAY_DIRECTORY).mkdir(mode=0o700)
    # Calls without this token are refused. Ray's default, one token per user in the home directory, is not
    # touched.
    token = directory / TOKEN
    token.touch(mode=0o600, exist_ok=False)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    # Make torch's gloo and vLLM listen on loopback; by default they take the address of the host's name.
    ours = {
        # Within a job of another cluster: neither that cluster nor the job's runtime environment is this
        # session's.
        "RAY_ADDRESS": None,
        "RAY_JOB_CONFIG_JSON_ENV_VAR": None,
        "GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name.startswith("lo")),
        "VLLM_HOST_IP": LOOPBACK,
        **STORED_RETURNS,
    }
    parameters = RayParams(
        node_ip_address=LOOPBACK,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_log_monitor=False,
        no_monitor=True,
        object_store_memory=object_store_bytes,
        temp_dir=str(directory / RAY_DIRECTORY),
        _system_config=dict(SYSTEM_CONFIG),
        resource_isolation_config=ResourceIsolationConfig(),
    )
    with (
        ray_variables(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token), RAY_AUTH_TOKEN=None, **ours),
        # With this switch on, Ray replaces the loopback address by the host's, and listens on all interfaces.
        _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False),
        # A signal to our whole process group (SLURM's SIGTERM, a terminal's SIGHUP) is ours: the last
        # checkpoint needs them.
        _replaced(services, "ConsolePopen", partial(services.ConsolePopen, start_new_session=True)),
        # Otherwise Ray prints to stdout how its daemons end.
        _replaced(worker, "_worker_logs_enabled", False),
    ):
        node = LocalNode(
            parameters, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True
        )
        try:
            yield node.address, {name: infos[0].process for name, infos in node.all_processes.items()}
        finally:
            node.kill_all_processes(check_alive=False, allow_graceful=True)


@contextlib.contextmanager
def ray_variables(**ours: str | None) -> Iterator[None]:
    """Within the block the environment has `ours` (None: unset). Afterwards it is restored, without what Ray
    has set."""
    before = dict(os.environ)
    _set(DEFAULT_VARIABLES | before | ours)
    try:
        yield
    finally:
        _set(dict.fromkeys(os.environ) | before)


def _set(variables: Mapping[str, str | None]) -> None:
    """Change the environment of this process and its future children, and make Ray read it anew."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
