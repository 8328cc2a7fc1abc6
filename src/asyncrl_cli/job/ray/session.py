"""Starts and ends Ray: a private local cluster, or a connection to an existing one by its address. Nothing
stays behind. Runs in the driver.

Signals: `ray.init` replaces the SIGTERM handler; `ray_session` puts the previous one back. A handler of an
asyncio loop (`loop.add_signal_handler`) is lost in `ray.init`: install it after entering `ray_session`.
Others may be installed at any time.

Who cleans up: after a normal end or a failure, the end of the `with` block shuts Ray down; after a kill -9
`reaper.py` does, within about 5 s. On an existing cluster Ray itself ends the actors of a driver that is
gone.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from asyncrl_cli.base.errors import ConfigError, PreflightError, first_line
from asyncrl_cli.job.ray.lifeline import ClusterHead, ended_daemons, lifeline
from asyncrl_cli.job.ray.reaper_handle import Reaper
from asyncrl_cli.job.submit.cluster_token import token_variables
from asyncrl_cli.models.shape import BYTES_OF, ShapeUnknown, shape_of_directory
from asyncrl_cli.plan.cluster import ClusterResources, local_cluster
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.plan.machine import SHARED_MEMORY, free_shared_memory
from asyncrl_cli.plan.memory import object_store_bytes, published_bytes
from asyncrl_cli.profile.schema import Profile

CONNECT_TIMEOUT_S = 10.0
LONGEST_DIRECTORY = 36
"""In characters. Ray makes socket paths below this directory, and the kernel limits a socket's path to
107."""


@contextlib.contextmanager
def ray_session(
    profile: Profile,
    *,
    address: str | None = None,
    cluster: ClusterResources | None = None,
    model_dir: Path | None = None,
) -> Iterator[JobPlan]:
    """Connect to Ray and yield the plan for its resources. `cluster` replaces this machine's resources (tests
    use logical GPUs). The object store of a local session has room for the weights of `model_dir`.

    Raises ConfigError and PreflightError, where possible before anything is started; PreflightError if Ray
    does not start or, within `CONNECT_TIMEOUT_S`, does not answer at `address`.
    """
    with contextlib.ExitStack() as stack:
        if address is not None:
            plan = compile_job(profile, stack.enter_context(connected(address)))
            import ray

            head = ClusterHead(str(ray.get_runtime_context().gcs_address))
            stack.enter_context(lifeline(lambda: head.dead, head.look))
        else:
            cluster = cluster or local_cluster()
            plan = compile_job(profile, cluster)
            version_bytes = 0
            if model_dir is not None:
                try:
                    version_bytes = published_bytes(profile, shape_of_directory(model_dir))
                except ShapeUnknown:  # no file has less than two bytes per parameter
                    parameters = sum(path.stat().st_size for path in model_dir.glob("*.safetensors")) // 2
                    version_bytes = BYTES_OF[profile.model.dtype] * parameters
            store_bytes = object_store_bytes(profile, version_bytes)
            check_shared_memory(profile, store_bytes)
            _start_here(stack, cluster, plan, store_bytes)
        yield plan


@contextlib.contextmanager
def connected(address: str) -> Iterator[ClusterResources]:
    """Connect to a cluster and yield what it has. Raises as `ray_session`."""
    check_reachable(address)
    from asyncrl_cli.job.ray.local_ray import ray_variables

    with contextlib.ExitStack() as stack:
        # For `auto`, Ray itself finds out whether the cluster asks for a token.
        stack.enter_context(ray_variables(**({} if address == "auto" else token_variables(address))))
        try:
            stack.enter_context(_connection(address=address))
        except (ConnectionError, RuntimeError, OSError, ValueError, TimeoutError) as error:
            raise _unreachable(address, error) from error
        from asyncrl_cli.job.ray.placement import ray_cluster

        yield ray_cluster()


def check_shared_memory(profile: Profile, store_bytes: int) -> None:
    """Raises PreflightError if Ray would refuse an object store that /dev/shm cannot hold. (A small one it
    keeps on disk.)"""
    free = free_shared_memory()
    if free is None or store_bytes <= free:
        return
    from ray._private.ray_constants import REQUIRE_SHM_SIZE_THRESHOLD

    if store_bytes > REQUIRE_SHM_SIZE_THRESHOLD:
        gib, dtype = store_bytes / 2**30, profile.model.dtype
        raise PreflightError(
            f"ray's object store needs {gib:.1f} GiB of shared memory for two versions of the weights in "
            f"{dtype}, and {SHARED_MEMORY} has {free / 2**30:.1f} GiB free",
            hint=f"--set weights.transport=disk, or docker run --shm-size={gib + 1:.0f}g",
        )


def _start_here(
    stack: contextlib.ExitStack, cluster: ClusterResources, plan: JobPlan, store_bytes: int
) -> None:
    """Start the daemons and connect to them. They end with `stack`, and with this process."""
    base = tempfile.gettempdir()
    short_base = base if len(base) + 16 <= LONGEST_DIRECTORY else "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="asyncrl-", dir=short_base))
    reaping = Reaper(directory)
    stack.callback(reaping.end)
    try:
        from asyncrl_cli.job.ray.local_ray import local_node

        cpus, gpus = max(plan.cpus, cluster.cpus), max(plan.gpus, cluster.gpus)
        node = local_node(directory, num_cpus=cpus, num_gpus=gpus, object_store_bytes=store_bytes)
        address, daemons = stack.enter_context(node)
        pids = [daemon.pid for daemon in daemons.values()]
        stack.enter_context(lifeline(partial(ended_daemons, daemons), reaping.mend, pids))
        # `uv run` sets a runtime-environment hook, which needs an agent; a local session has none.
        stack.enter_context(_connection(address=address, _skip_env_hook=True))
    except Exception as error:  # Ray raises bare Exceptions when it fails to start
        what, hint = "ray did not start on this machine", "`df /dev/shm /tmp` and `ulimit -n` may tell why"
        raise PreflightError(f"{what}: {error}", hint=hint) from error


@contextlib.contextmanager
def _connection(**options: object) -> Iterator[None]:
    """This process's connection to Ray: `ray.init` without its output and with our SIGTERM handler,
    `ray.shutdown` in the end."""
    import ray

    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # it logs at every start

    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, configure_logging=False, logging_level="ERROR", **options)
    finally:
        if in_main_thread and handler is not None:
            signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()


def is_job_server(address: str) -> bool:
    """Whether this is the address of a cluster's job server, and not that of its GCS."""
    return urlsplit(address).scheme in ("http", "https")


def check_reachable(address: str) -> None:
    """Try a plain TCP connection before Ray does: Ray spends minutes on a dead address. Raises ConfigError or
    PreflightError."""
    if "://" in address:
        gcs = "HOST:PORT of the cluster's GCS (usually port 6379)"
        hint = f"give {gcs}, or `auto` on one of its nodes; or `asyncrl submit`"
        if is_job_server(address):
            hint = f"asyncrl submit --address {address} --profile NAME makes it a job there"
        raise ConfigError(f"--address {address}: asyncrl's driver must run inside the cluster", hint=hint)
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        example = "for example --address 10.0.0.1:6379, or auto"
        raise ConfigError(f"--address {address}: not HOST:PORT", hint=example)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
            return
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> PreflightError:
    return PreflightError(
        f"no ray cluster answers at {address}: {first_line(error)}",
        hint="check `ray status` on that node, or leave --address out to start one here",
    )
