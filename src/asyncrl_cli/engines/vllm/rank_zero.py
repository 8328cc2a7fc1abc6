"""In rank 0's process, of the trainer: its end of `weights.transport = "nccl"` and `"ipc"`. The worker's end
is worker_transports.py. Communicators, packing and handles are vLLM's own.

nccl: one group with each rollout worker's vLLM processes.

    group of a worker    rank 0: this process;  1, 2, ...: the worker's tensor-parallel ranks
    join                 both meet at an address, at the start and after each restart of the worker
    turn                 reserve rank 0 for one worker; lost if no broadcast begins within `weights.timeout_s`
    broadcast            a version's tensors, packed into wire buffers of a fixed size

With one group per worker, each worker swaps weights independently. Rank 0 broadcasts to one worker at a time,
because broadcasts share its GPU's memory and bus anyway. A worker waits for its `turn` before it pauses its
vLLM, for up to `weights.timeout_s` per worker of the job. So a transfer that hangs fails only its own worker,
and the next in line gets its turn.

A call into NCCL cannot be interrupted and waits for its peers forever, so each call gets its own thread. If
the worker leaves or time runs out, the group is destroyed, which ends the call.

ipc: a version passes through one buffer on the GPU that rank 0 and vLLM share.

    export(part 0)   allocate the buffer, copy the first tensors into it -> its CUDA IPC handle, names, sizes
    export(part i)   the next tensors into the same buffer: vLLM has copied the part before
    leave            free the buffer

A handle is exported for each load, never in advance, because torch expects exactly one consumer to open and
close each export. If no process opens a handle, or two open it in turn, its memory is never freed.
"""

from __future__ import annotations

import base64
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from asyncrl_cli.base.daemon_threads import in_daemon
from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed
from asyncrl_cli.weights.senders import HeldVersions
from asyncrl_cli.weights.versions import TIMEOUT_KEY, Meeting, UpdateInfo, turn_s

T = TypeVar("T")
Tensors = Iterator[tuple[str, torch.Tensor]]
LOOK_S = 0.2
"""How often a waiting call checks whether its worker has left."""


class Group(Protocol):
    """Rank 0's end of one worker's group. `broadcast` sends all tensors in this order; returns when they are
    sent, or soon after `destroy`, which may be called in any thread and takes seconds."""

    def broadcast(self, tensors: Tensors) -> None: ...

    def destroy(self) -> None: ...


class NcclGroup(Group):
    """A group of NCCL's. The constructor waits until all have joined."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        torch.cuda.set_device(device)  # per thread; vLLM uses the current device
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._meeting = meeting
        address = {"master_address": meeting.host, "master_port": meeting.port}
        self._communicator = trainer_init({**address, "world_size": meeting.world_size})
        if not self._communicator.available:
            why = "vLLM found no NCCL library beside this torch"
            raise AsyncrlError(why, hint="--set weights.transport=object-store")

    def broadcast(self, tensors: Tensors) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.set_device(self.device)
        packed_nccl_broadcast_producer(
            iterator=tensors,
            group=self._communicator,
            src=0,
            # in the stream that packs and broadcasts the tensor
            post_iter_func=lambda item: item[1].to(self.device),
            buffer_size_bytes=self._meeting.wire_bytes,
            num_buffers=self._meeting.num_wires,
        )

    def destroy(self) -> None:
        self._communicator.destroy()


class _Link:
    """A worker's group. Exists from the request on, before the group does. `ended`: the group must no longer
    be used."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.group: Future[Group] = Future()
        self.ended = threading.Event()
        self._ends_once = threading.Lock()

    def end(self) -> None:
        """Destroy the group now, or as soon as it is made."""
        self.ended.set()
        if self._ends_once.acquire(blocking=False):
            self.group.add_done_callback(lambda made: None if made.exception() else made.result().destroy())


@dataclass(eq=False)
class NcclLinks:
    """The groups of all workers, by name. Calls for different workers may come in different threads.

    `timeout_s` bounds each meeting and each transfer; the wait for a turn is bounded by `timeout_s` per
    worker.
    """

    held: HeldVersions
    open_group: Callable[[Meeting], Group]
    _: KW_ONLY
    timeout_s: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._links: dict[str, _Link] = {}
        self._turn_changed = threading.Condition()
        self._turn_of: _Link | None = None
        self._begins_by_s = math.inf

    def join(self, worker: str, meeting: Meeting) -> None:
        """Make a group with the worker. AsyncrlError if its processes do not join in time, or the worker
        leaves meanwhile."""
        self.leave(worker)
        link = self._links[worker] = _Link(worker)
        waits = f"for {worker}'s vLLM processes to meet it by NCCL"
        self._bounded(link, link.group, lambda: self.open_group(meeting), waits)

    def broadcast(self, worker: str, version: int, names: Mapping[str, str]) -> None:
        """Send a version's tensors to the worker. A failed broadcast ends the group.

        Raises AsyncrlError as `join` does, ValueError if the version is not held.
        """
        tensors = self.held.tensors(version, names)
        link, sent = self._joined(worker), Future[None]()
        group, waits = link.group.result(), f"for {worker}'s vLLM processes to take version {version}"
        self._take_turn(link, begins_in_s=math.inf)
        try:
            self._bounded(link, sent, lambda: group.broadcast(tensors), waits)
        finally:
            self._give_turn(link)

    def turn(self, worker: str) -> None:
        """Wait for the worker's turn. ExecutorFailed if other workers take too long; the group stays
        usable."""
        self._take_turn(self._joined(worker), begins_in_s=self.timeout_s)

    def leave(self, worker: str) -> None:
        link = self._links.pop(worker, None)
        if link is not None:
            link.ended.set()
            self._give_turn(link)
            # in a thread: `leave` is answered at once, and a group may take seconds to end
            threading.Thread(target=link.end, name=f"end the group with {worker}", daemon=True).start()

    def _joined(self, worker: str) -> _Link:
        link = self._links.get(worker)
        if link is None or link.ended.is_set() or not link.group.done():
            raise AsyncrlError(f"rank 0 has no NCCL group with {worker}")
        return link

    def _take_turn(self, link: _Link, *, begins_in_s: float) -> None:
        """Wait for the turn. A holder that does not begin to broadcast within `begins_in_s` loses the turn to
        a waiting worker."""
        came_s = self.clock()
        with self._turn_changed:
            while (holder := self._turn_of) and holder is not link and self.clock() <= self._begins_by_s:
                workers = len(self._links)
                is_late = self.clock() - came_s > turn_s(self.timeout_s, workers)
                if link.ended.is_set() or is_late:
                    how = self._how_it_ended(link, f" for each of {workers} workers")
                    why = f"which was sending to {holder.worker}: {how}"
                    raise ExecutorFailed(f"{link.worker} waited for rank 0, {why}")
                self._turn_changed.wait(LOOK_S)
            if link.ended.is_set():
                raise ExecutorFailed(f"{link.worker} waited for rank 0: {self._how_it_ended(link)}")
            self._turn_of, self._begins_by_s = link, self.clock() + begins_in_s

    def _give_turn(self, link: _Link) -> None:
        with self._turn_changed:
            if self._turn_of is link:
                self._turn_of = None
            self._turn_changed.notify_all()  # wakes waiting workers, including those that have left

    def _how_it_ended(self, link: _Link, each: str = "") -> str:
        if link.ended.is_set():
            return f"{link.worker} has left"
        return f"longer than {TIMEOUT_KEY} = {self.timeout_s:g} s{each}"

    def _bounded(self, link: _Link, made: Future[T], call: Callable[[], T], waits: str) -> None:
        """Run `call` in a thread and put its result into `made`. If it fails or takes too long, end the link
        and raise."""

        ends_s = self.clock() + self.timeout_s
        in_daemon(call, f"nccl with {link.worker}", made)
        while not (made.done() or link.ended.is_set() or self.clock() > ends_s):
            wait([made], timeout=LOOK_S)
        error: BaseException | None = AsyncrlError(f"rank 0 waited {waits}: {self._how_it_ended(link)}")
        if made.done() and not link.ended.is_set():
            error = made.exception()
        if error is not None:
            link.end()
            raise error


class Chunk(Protocol):
    """vLLM's PackedIpcChunk: one filling of the buffer, and the buffer's handle."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    tensor_sizes: list[int]
    ipc_handle: dict[str, tuple[Any, ...]]


Produce = Callable[[Tensors, int], Iterator[Chunk]]
"""(tensors, buffer size) -> a chunk for each filling of the buffer."""


def produce_on(device: torch.device, tensors: Tensors, buffer_bytes: int) -> Iterator[Chunk]:
    """A `Produce`: vLLM's own producer, on the GPU `device`."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

    torch.cuda.set_device(device)
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    chunks: Iterator[Chunk] = packed_ipc_producer(tensors, uuid, lambda item: item[1], buffer_bytes)
    return chunks


class _Export(NamedTuple):
    """A worker's load: its next part, and the chunks from there on."""

    version: int
    part: int
    chunks: Iterator[Chunk]


@dataclass(eq=False)
class IpcExports:
    """Rank 0's exports to all workers, one load at a time per worker. `leave` may be called in another thread
    during `export`.

    `buffer_bytes`: minimum size of the buffer, which grows to the largest tensor. `collect` frees closed
    exports.
    """

    held: HeldVersions
    produce: Produce
    _: KW_ONLY
    buffer_bytes: int
    collect: Callable[[], None] = torch.cuda.ipc_collect

    def __post_init__(self) -> None:
        self._open: dict[str, _Export] = {}
        self._lock = threading.Lock()

    def export(self, worker: str, version: int, names: Mapping[str, str], part: int) -> UpdateInfo | None:
        """Fill the buffer with the next part and return vLLM's update info for it; None after the last part.

        Raises:
            ValueError: if the version is not held, or the part is not the next one.
            ExecutorFailed: if the worker leaves meanwhile.
        """
        if part == 0:
            self.leave(worker)
            tensors = list(self.held.tensors(version, names))
            size_bytes = max([self.buffer_bytes, *(tensor.nbytes for _, tensor in tensors)])
            with self._lock:
                self._open[worker] = _Export(version, 0, self.produce(iter(tensors), size_bytes))
        with self._lock:
            begun, expected, chunks = self._open.get(worker, _Export(-1, -1, iter(())))
            if (version, part) != (begun, expected):
                why = f"next is part {expected} of version {begun}"
                raise ValueError(f"{worker} asked for part {part} of version {version}, {why}")
            following = self._open[worker] = _Export(version, part + 1, chunks)
        chunk = next(chunks, None)
        with self._lock:
            has_left = self._open.get(worker) is not following
        if has_left:  # `leave` could not free the buffer while this call was using it
            del following, chunks, chunk
            self.collect()
            raise ExecutorFailed(f"{worker} has left while rank 0 made part {part} of version {version}")
        return None if chunk is None else update_info(chunk)

    def leave(self, worker: str) -> None:
        """End a worker's load and free the exports that its processes closed. A killed process leaves one
        buffer allocated."""
        with self._lock:
            is_open = self._open.pop(worker, None) is not None
        if is_open:
            self.collect()


def update_info(chunk: Chunk) -> UpdateInfo:
    """vLLM's IPCWeightTransferUpdateInfo, with the handle encoded so that it can pass through vLLM's
    sockets."""
    return {
        "names": chunk.names,
        "dtype_names": chunk.dtype_names,
        "shapes": chunk.shapes,
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(chunk.ipc_handle)).decode("ascii"),
        "tensor_sizes": chunk.tensor_sizes,
    }
