"""Starting and ending Ray: a private local cluster, or an existing one by address. Nothing stays behind. There is one session per
process, as there is one Ray.

Signals: `ray.init` replaces the SIGTERM handler; `ray_session` puts the previous one back. Install handlers at any
time, but an asyncio loop's (`loop.add_signal_handler`) after `ray_session` has been entered: `ray.init` loses it.

Ends, and who cleans up: a normal end or a failure leave the `with` block, which shuts Ray down; kill -9 leaves it to
`reaper.py` (within about 5 s). On an existing cluster Ray itself ends the actors of a driver that is gone.

A local session's daemons are watched by their pids: when one of them ends, every wait for Ray fails within a second. Without its
gcs_server Ray itself goes on for a minute, and then exits silently in the middle of whatever the driver does.

    gcs_server dies   actors and their arrays live on. Waits for a rollout worker fail at once, and the loop ends the run in good
                      order, with a checkpoint. Waits for the trainer fail `CHECKPOINT_S` later.
    raylet dies       its workers die with it: every wait fails at once
    reaper dies       no wait fails: another reaper takes its place

At that moment the driver may be blocked in a call to Ray (making an actor, say), and its event loop hears nothing for up to a
minute. After `DEAF_S` the watching thread therefore reports the loss itself and ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.errors import ConfigError, PreflightError, SessionLost, first_line
from asyncrl_cli.job.process import leave, tell
from asyncrl_cli.job.reaper import Reaper
from asyncrl_cli.plan.cluster import ClusterResources, local_cluster
from asyncrl_cli.plan.job_plan import JobPlan, compile_job
from asyncrl_cli.profile.schema import Profile

OBJECT_STORE_BYTES = 256 * 2**20
"""Shared memory of a local session: two published versions of a small model and the payloads in flight."""
CONNECT_TIMEOUT_S = 10.0
LONGEST_DIRECTORY = 36
"""Characters: below it Ray makes socket paths, which the kernel limits to 107."""
LOOK_EVERY_S = 0.2
CHECKPOINT_S = 5.0
"""For the checkpoint of a run whose gcs_server is gone."""
DEAF_S = 8.0
"""How long the event loop may take to hear of a daemon's end."""
HINT = "a run that has begun goes on with `asyncrl resume`; if this machine was out of memory, `dmesg` says so"
OUTLIVED = "gcs_server"

Daemons = Mapping[str, Callable[[], str | None]]
"""By name: how it has ended, None while it lives."""


@contextlib.contextmanager
def ray_session(
    profile: Profile, *, address: str | None = None, cluster: ClusterResources | None = None, model_dir: Path | None = None
) -> Iterator[JobPlan]:
    """A connected Ray and the plan that fits it. `cluster` replaces what this machine has (tests: logical GPUs). A local session's
    object store has room for the weights of `model_dir`.

    Raises ConfigError and PreflightError before anything is started, where it can; PreflightError if Ray does not start
    or, within `CONNECT_TIMEOUT_S`, does not answer at `address`.
    """
    with contextlib.ExitStack() as stack:
        if address is None:
            cluster = cluster or local_cluster()
            plan = compile_job(profile, cluster)
            _start_here(stack, cluster, plan.cpus, model_dir)
        else:
            check_reachable(address)
            from asyncrl_cli.job.local_ray import ray_variables

            stack.enter_context(ray_variables())
            try:
                _init(address=address)
            except (ConnectionError, RuntimeError, OSError, ValueError, TimeoutError) as error:
                raise _unreachable(address, error) from error
        import ray

        from asyncrl_cli.job.workers import ray_cluster

        stack.callback(ray.shutdown)
        yield compile_job(profile, ray_cluster()) if address is not None else plan


def _start_here(stack: contextlib.ExitStack, cluster: ClusterResources, cpus: int, model_dir: Path | None) -> None:
    """Daemons, connected to; they end with `stack`, and with this process."""
    base = tempfile.gettempdir()
    short_base = base if len(base) + 16 <= LONGEST_DIRECTORY else "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="asyncrl-", dir=short_base))
    reaping = Reaper(directory)
    stack.callback(reaping.end)
    try:
        from asyncrl_cli.job.local_ray import local_node

        # Two published versions of the model in float32.
        versions_bytes = sum(4 * path.stat().st_size for path in model_dir.glob("*.safetensors")) if model_dir else 0
        store_bytes = OBJECT_STORE_BYTES + versions_bytes
        node = local_node(directory, num_cpus=max(cpus, cluster.cpus), num_gpus=cluster.gpus, object_store_bytes=store_bytes)
        address, daemons = stack.enter_context(node)
        stack.enter_context(lifeline(daemons, reaping.mend))
        # `uv run` sets a hook that needs an agent, and a local session has none.
        _init(address=address, _skip_env_hook=True)
    except Exception as error:  # Ray's own start raises bare ones
        raise PreflightError(
            f"ray did not start on this machine: {error}", hint="`df /dev/shm /tmp` and `ulimit -n` may tell why"
        ) from error


def _init(**options: Any) -> None:
    """`ray.init`, quiet, with the SIGTERM handler as it was."""
    import ray

    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # speaks at every start

    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, configure_logging=False, logging_level="ERROR", **options)
    finally:
        if in_main_thread and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def check_reachable(address: str) -> None:
    """A plain TCP connection first: Ray's own attempts at a dead address take minutes."""
    if "://" in address:
        raise ConfigError(
            f"--address {address}: asyncrl's driver must run inside the cluster",
            hint="give HOST:PORT of the cluster's GCS (usually port 6379), or `auto` on one of its nodes",
        )
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--address {address}: not HOST:PORT", hint="for example --address 10.0.0.1:6379, or auto")
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


_current: Lifeline | None = None


class Lifeline:
    """`watch` looks at the daemons in a thread, calls `mend` each time, and cuts the `waits` short when one has ended.

    `waits`: whether each wait, known by its time limit, can go on without the gcs_server for a while.
    """

    def __init__(self, daemons: Daemons, mend: Callable[[], None]) -> None:
        self._daemons = daemons
        self._mend = mend
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waits: dict[asyncio.Timeout, bool] = {}
        self.is_heard = False
        self.ended = threading.Event()
        self.first: tuple[str, str] | None = None
        self._patience_is_over = False

    def error(self, *, patient: bool = False) -> SessionLost | None:
        """The daemon that died first, if any has. `patient`: None for as long as the caller can go on without it."""
        dead = {name: how for name, ended in self._daemons.items() if (how := ended()) is not None}
        self.first = self.first or next(iter(dead.items()), None)
        if self.first is None or (patient and set(dead) == {OUTLIVED} and not self._patience_is_over):
            return None
        name, how = self.first
        return SessionLost(f"ray's {name} has ended ({how}), and with it this session", hint=HINT)

    def watch(self) -> None:
        while self.error() is None:
            with contextlib.suppress(OSError):  # no process can be started now: the next look tries again
                self._mend()
            if self.ended.wait(LOOK_EVERY_S):
                return
        self._wake()
        if not self.ended.wait(CHECKPOINT_S):
            self._patience_is_over = True
            self._wake()
            if not self.ended.wait(DEAF_S - CHECKPOINT_S) and not self.is_heard:
                tell(f"error: {self.error()}\nhint: {HINT}")
                leave(SessionLost.exit_code)

    def _wake(self) -> None:
        """Timeouts may be moved only in the thread of their event loop."""
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all waits with it
                self.loop.call_soon_threadsafe(self._expire)

    def _expire(self) -> None:
        self.is_heard = True
        for limit, patient in self.waits.items():
            if self.error(patient=patient) is not None and not limit.expired():
                limit.reschedule(0.0)


@contextlib.contextmanager
def lifeline(daemons: Daemons, mend: Callable[[], None]) -> Iterator[None]:
    global _current
    assert _current is None, "a session within a session"
    _current = Lifeline(daemons, mend)
    thread = threading.Thread(target=_current.watch, name="lifeline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _current.ended.set()
        thread.join()
        _current = None


def lost_session(*, patient: bool = False) -> SessionLost | None:
    """Why Ray no longer answers; None while it does, and always on a cluster that was not started here."""
    return None if _current is None else _current.error(patient=patient)


@contextlib.contextmanager
def session_wait(limit: asyncio.Timeout, *, patient: bool = False) -> Iterator[None]:
    """`limit` also runs out when this process's local session is lost. Raises SessionLost if it is lost already."""
    if _current is None:
        yield
        return
    # Asked only once a daemon has died: a look at all of them takes longer than a call.
    if _current.first is not None and (error := _current.error(patient=patient)) is not None:
        _current.is_heard = True
        raise error
    _current.loop = asyncio.get_running_loop()
    waits = _current.waits
    waits[limit] = patient
    try:
        yield
    finally:
        del waits[limit]
