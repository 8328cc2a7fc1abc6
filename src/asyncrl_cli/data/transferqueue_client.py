"""TransferQueue's processes, and a process's connection to them.

    driver        started(...) ─> Address: a controller here, storage units on all nodes
    any process   Connection(address, limit_s)

We use the package's client and actors, not its `init` and `kv_*` functions. These find their controller by
one name for the whole cluster, and wait for it without end. Ours has no name: runs that share a cluster do
not meet. No actor is detached, so all end with the driver's job, however that ends.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl_cli.base.errors import ExecutorFailed, PreflightError, SessionLost, first_line
from asyncrl_cli.data.transferqueue_package import INSTALL, VERSION, installed_version
from asyncrl_cli.profile.rollout_sections import DataPlaneSection

T = TypeVar("T")
FEWER = "--set data_plane.storage_units=1, or data_plane.storage_cpus_per_unit=0, or data_plane.backend=ray"
START_LIMIT_S = 180.0
"""For the actors to start: each imports torch, which takes half a minute on a busy machine."""
ROOM_LIMIT_S = 5.0
"""For CPUs to become free: Ray notices late that a process has ended."""
CLOSE_LIMIT_S = 5.0
PING_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What another process needs to connect; it pickles. `controller` and `units` are `ZMQServerInfo` of the
    package, `actors` Ray's handles by the processes' names."""

    run: str
    controller: Any
    units: Mapping[str, Any]
    actors: Mapping[str, Any]


def prepare() -> None:
    """To be called before the package is imported. Raises PreflightError if it is missing or has another
    version."""
    found = installed_version()
    if found != VERSION:
        why = f"{found} is installed, asyncrl works with {VERSION}" if found else "is not installed"
        raise PreflightError(f'data_plane.backend = "transferqueue": TransferQueue {why}', hint=INSTALL)
    # It sets torch's threads during each call, and warns each time if these are more than the cores.
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, psutil.cpu_count(logical=False) or 1)))


def started(run: str, plane: DataPlaneSection) -> Address:
    """Start the actors. Raises PreflightError if the cluster has no room for them or they do not start."""
    prepare()
    cpus, count = plane.storage_cpus_per_unit, plane.storage_units
    needed, until_s = (count + 1) * cpus, time.monotonic() + ROOM_LIMIT_S
    what = f'data_plane.backend = "transferqueue": {count} storage units and a controller'
    # Without this check the actors would wait for CPUs, silently and for ever.
    while (free := ray.available_resources().get("CPU", 0.0)) < needed:
        if ray.cluster_resources().get("CPU", 0.0) < needed or time.monotonic() > until_s:
            raise PreflightError(
                f"{what} need {needed:g} CPUs, and the cluster has {free:g} free", hint=FEWER
            )
        time.sleep(0.2)

    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    unit = SimpleStorageUnit.options(num_cpus=cpus, scheduling_strategy="SPREAD")
    actors = [TransferQueueController.options(num_cpus=cpus, scheduling_strategy=here).remote()]
    actors += [unit.remote({}) for _ in range(count)]
    try:
        servers = ray.get([one.get_zmq_server_info.remote() for one in actors], timeout=START_LIMIT_S)
    except BaseException as error:
        end(actors)
        if isinstance(error, RayError):  # GetTimeoutError is one, too
            why = f"did not start within {START_LIMIT_S:g} s: {first_line(error)}"
            raise PreflightError(f"{what} {why}", hint=FEWER) from error
        raise
    units = {server.id: server for server in servers[1:]}
    names = ["the controller", *(f"storage unit {number} of {count}" for number in range(1, count + 1))]
    actors_by_name = dict(zip(names, actors, strict=True))
    return Address(run=run, controller=servers[0], units=units, actors=actors_by_name)


def check_alive(address: Address) -> None:
    """Raises SessionLost if one of the processes has died, and ExecutorFailed if Ray cannot reach one. Takes
    a second if one does not answer."""
    pings = {name: actor.get_zmq_server_info.remote() for name, actor in address.actors.items()}
    answered, _ = ray.wait([*pings.values()], num_returns=len(pings), timeout=PING_LIMIT_S)
    for name, ping in pings.items():
        try:
            if ping in answered:
                ray.get(ping)
        except ActorDiedError:
            raise SessionLost(f"{name} of TransferQueue has died, and with it the groups' data") from None
        except RayActorError as error:  # ActorUnavailableError: its node or the network may be cut off
            why = f"{name} of TransferQueue cannot be reached: {first_line(error)}"
            hint = "look at its node and the network; `asyncrl resume` continues from the last checkpoint"
            raise ExecutorFailed(why, hint=hint, executor="the transferqueue store") from None


def end(actors: Iterable[Any]) -> None:
    for actor in actors if ray.is_initialized() else ():
        ray.kill(actor)


class Connection:
    """A client with an event loop in a thread of its own, because the package's blocking calls have no limit.
    Raises TimeoutError if the controller does not answer in time."""

    def __init__(self, address: Address, limit_s: float) -> None:
        prepare()
        from transfer_queue.client import AsyncTransferQueueClient

        self.client = AsyncTransferQueueClient(f"asyncrl-{os.getpid()}", address.controller, zmq_io_threads=1)
        until_s = time.monotonic() + limit_s
        while True:  # the package gives up after 3 s, which a busy machine exceeds
            try:
                self.client.initialize_storage_manager("SimpleStorage", {"zmq_info": dict(address.units)})
                break
            except TimeoutError:
                if time.monotonic() > until_s:
                    self.client.close()
                    raise
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="transferqueue", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        atexit.unregister(self.close)
        self.submit(self._cancel_all())
        self._thread.join(CLOSE_LIMIT_S)
        if not self._thread.is_alive():  # its sockets must not be closed under it
            self._loop.close()
            self.client.close()

    async def _cancel_all(self) -> None:
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._loop.stop()
