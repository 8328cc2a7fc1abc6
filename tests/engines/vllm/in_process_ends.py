"""In-process ends of `nccl` and `ipc`: the second implementation of their ports. Real bytes go through queues
and memory of this process, in the place of NCCL groups and CUDA IPC handles; who waits for whom, and what
ends whom, is as with those."""

from __future__ import annotations

import asyncio
import base64
import pickle
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from asyncrl_cli.weights.versions import Meeting, RankZero

POLL_S = 0.01
WAIT_S = 30.0
"""A bound on what takes milliseconds."""


class Exchange:
    """Where the two ends of a group find each other, by port."""

    def __init__(self) -> None:
        self._pipes: dict[int, InProcessPipe] = {}
        self._lock = threading.Lock()
        self._ports = iter(range(1, 1000))

    def meeting_point(self) -> tuple[str, int]:
        return "in-process", next(self._ports)

    def pipe(self, port: int) -> InProcessPipe:
        with self._lock:
            return self._pipes.setdefault(port, InProcessPipe())


@dataclass
class InProcessPipe:
    """One tensor at a time: a sender waits until the one before was taken, as a broadcast waits for its
    peers."""

    met: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    slot: queue.Queue[tuple[str, torch.Tensor]] = field(default_factory=lambda: queue.Queue(maxsize=1))
    destroyed: threading.Event = field(default_factory=threading.Event)


class InProcessGroup:
    """Rank 0's end. Making one waits for the worker's end, for ever, as NCCL does (the test's own bound
    apart)."""

    def __init__(self, exchange: Exchange, meeting: Meeting) -> None:
        self.meeting = meeting
        self.pipe = exchange.pipe(meeting.port)
        self.pipe.met.wait(WAIT_S)

    def broadcast(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            while not self.pipe.destroyed.is_set():
                try:
                    self.pipe.slot.put((name, tensor.clone()), timeout=POLL_S)
                    break
                except queue.Full:
                    continue
        while not self.pipe.slot.empty():  # the last one is to be taken, too
            if self.pipe.destroyed.wait(POLL_S):
                break

    def destroy(self) -> None:
        self.pipe.destroyed.set()


@dataclass
class InProcessChunk:
    names: list[str]
    shapes: list[list[int]]
    dtype_names: list[str]
    tensor_sizes: list[int]
    ipc_handle: dict[str, tuple[Any, ...]]


class InProcessMemory:
    """Buffers by handle. `produce` fills one buffer again and again, as vLLM's producer does."""

    def __init__(self) -> None:
        self.buffers: dict[int, torch.Tensor] = {}
        self.sizes: list[int] = []
        self.collected = 0

    def produce(
        self, tensors: Iterator[tuple[str, torch.Tensor]], buffer_bytes: int
    ) -> Iterator[InProcessChunk]:
        handle = len(self.sizes)
        self.sizes.append(buffer_bytes)
        self.buffers[handle] = torch.zeros(buffer_bytes, dtype=torch.uint8)
        lot: list[tuple[str, torch.Tensor]] = []
        for name, tensor in tensors:
            if sum(t.nbytes for _, t in lot) + tensor.nbytes > buffer_bytes:
                yield self._chunk(handle, lot)
                lot = []
            lot.append((name, tensor))
        yield self._chunk(handle, lot)

    def collect(self) -> None:
        self.collected += 1

    def _chunk(self, handle: int, lot: list[tuple[str, torch.Tensor]]) -> InProcessChunk:
        data = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in lot])
        self.buffers[handle][: len(data)] = data
        return InProcessChunk(
            names=[name for name, _ in lot],
            shapes=[list(tensor.shape) for _, tensor in lot],
            dtype_names=[str(tensor.dtype).removeprefix("torch.") for _, tensor in lot],
            tensor_sizes=[tensor.nbytes for _, tensor in lot],
            ipc_handle={"in-process": (handle,)},
        )

    def read(self, update_info: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What vLLM's consumer does: copies, for the buffer is filled again."""
        handle = pickle.loads(base64.b64decode(update_info["ipc_handles_pickled"]))["in-process"][0]
        data = self.buffers[handle][: sum(update_info["tensor_sizes"])].clone()
        found = {}
        for name, dtype, shape, part in zip(
            update_info["names"],
            update_info["dtype_names"],
            update_info["shapes"],
            data.split(update_info["tensor_sizes"]),
            strict=True,
        ):
            found[name] = part.clone().view(getattr(torch, dtype)).view(shape)
        return found


class InProcessRankZero(RankZero):
    """A worker's way to rank 0's end: each call in a thread, as in rank 0's actor."""

    def __init__(self, end: Any, exchange: Exchange, worker: str) -> None:
        self._end = end
        self._exchange = exchange
        self._worker = worker

    async def meeting_point(self) -> tuple[str, int]:
        return self._exchange.meeting_point()

    async def leave(self) -> None:
        self._end.leave(self._worker)

    async def ask(self, call: str, *args: Any) -> Any:
        return await asyncio.to_thread(getattr(self._end, call), self._worker, *args)


class InProcessLlm:
    """What `AsyncLLM` and its processes are to a load. A process that receives hears nothing else until it
    has all, or is killed.

    `breaks_after`: the processes stop receiving after so many tensors, and stay: the other end hears nothing
    of it.
    """

    def __init__(
        self, exchange: Exchange, memory: InProcessMemory | None = None, breaks_after: int | None = None
    ) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.order: list[str] = []
        self.weight_version = ""
        self.calls: list[str] = []
        self.init_info: dict[str, Any] = {}
        self.killed = threading.Event()
        self.breaks_after = breaks_after
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        manager = SimpleNamespace(processes=[SimpleNamespace(kill=self.killed.set)], finished_procs=dict)
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
        self._exchange = exchange
        self.memory = memory
        self._loading: dict[str, torch.Tensor] = {}

    @property
    def errored(self) -> bool:
        return self.killed.is_set()

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.init_info = request.init_info
        if "master_port" in self.init_info:
            self._pipe = self._exchange.pipe(self.init_info["master_port"])
            await asyncio.to_thread(self._pipe.met.wait, WAIT_S)

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(f"sleep {level}")

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    async def start_weight_update(self) -> None:
        self.calls.append("start")
        self._loading, self.order = {}, []

    async def update_weights(self, request: Any) -> None:
        self.calls.append("update")
        if self.memory is not None:
            self._loading |= self.memory.read(request.update_info)
            self.order += request.update_info["names"]
        else:
            await asyncio.to_thread(self._receive, request.update_info)

    async def finish_weight_update(self, weight_version: str) -> None:
        self.calls.append("finish")
        self.weights, self.weight_version = self._loading, weight_version

    def _receive(self, info: dict[str, Any]) -> None:
        for number, (name, dtype, shape) in enumerate(
            zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        ):
            got, tensor = self._next(number)
            assert (got, str(tensor.dtype), list(tensor.shape)) == (name, f"torch.{dtype}", shape)
            self._loading[name] = tensor
            self.order.append(name)

    def _next(self, number: int) -> tuple[str, torch.Tensor]:
        while not self.killed.is_set():
            if self.breaks_after is None or number < self.breaks_after:
                try:
                    return self._pipe.slot.get(timeout=POLL_S)
                except queue.Empty:
                    continue
            self.killed.wait(POLL_S)
        raise RuntimeError("the engine process was killed")
