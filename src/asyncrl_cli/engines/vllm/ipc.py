"""Rank 0's end of `weights.transport = "ipc"`: a version passes through one buffer on the GPU that rank 0 and
vLLM share.

    export(part 0)   allocate the buffer, copy the first tensors into it -> its CUDA IPC handle, names, sizes
    export(part i)   the next tensors into the same buffer: vLLM has copied the part before (its `update_weights` has returned)
    leave            free the buffer

Producer and consumer are vLLM's own. A handle is exported for each load, never in advance, because torch
expects exactly one consumer to open and close each export. If no process opens a handle, or two open it in
turn, its memory is never freed.
"""

from __future__ import annotations

import base64
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.weights.senders import HeldVersions

Produce = Callable[[Iterator[tuple[str, torch.Tensor]], int], Iterator[Any]]
"""(tensors, buffer size) -> one `PackedIpcChunk` of vLLM for each filling of the buffer: its contents and its
handle."""


def produce_on(
    device: torch.device, tensors: Iterator[tuple[str, torch.Tensor]], buffer_bytes: int
) -> Iterator[Any]:
    """A `Produce`: vLLM's own producer, on the GPU `device`."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

    torch.cuda.set_device(device)
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return packed_ipc_producer(tensors, uuid, lambda item: item[1], buffer_bytes)


class IpcExports:
    """Rank 0's exports to all workers, one load at a time per worker. `leave` may be called in another thread
    during `export`."""

    def __init__(
        self,
        held: HeldVersions,
        produce: Produce,
        *,
        buffer_bytes: int,
        collect: Callable[[], None] = torch.cuda.ipc_collect,
    ) -> None:
        """`buffer_bytes`: minimum size of the buffer, which grows to the largest tensor. `collect` frees
        closed exports."""
        self._held = held
        self._produce = produce
        self._buffer_bytes = buffer_bytes
        self._collect = collect
        self._open: dict[str, tuple[int, int, Iterator[Any]]] = {}
        self._lock = threading.Lock()

    def export(self, worker: str, version: int, names: Mapping[str, str], part: int) -> dict[str, Any] | None:
        """Fill the buffer with the next part and return vLLM's update info for it; None after the last part.

        Raises:
            ValueError: if the version is not held, or the part is not the next one.
            ExecutorFailed: if the worker leaves meanwhile.
        """
        if part == 0:
            self.leave(worker)
            tensors = list(self._held.tensors(version, names))
            largest = max((tensor.nbytes for _, tensor in tensors), default=0)
            with self._lock:
                self._open[worker] = (
                    version,
                    0,
                    self._produce(iter(tensors), max(largest, self._buffer_bytes)),
                )
        with self._lock:
            begun, expected, chunks = self._open.get(worker, (-1, -1, iter(())))
            if (version, part) != (begun, expected):
                raise ValueError(
                    f"{worker} asked for part {part} of version {version}, next is part "
                    f"{expected} of version {begun}"
                )
            asked = self._open[worker] = version, part + 1, chunks
        chunk = next(chunks, None)
        with self._lock:
            has_left = self._open.get(worker) is not asked
        if has_left:  # `leave` could not free the buffer while this call was using it
            del asked, chunks, chunk
            self._collect()
            raise ExecutorFailed(f"{worker} has left while rank 0 made part {part} of version {version}")
        return None if chunk is None else update_info(chunk)

    def leave(self, worker: str) -> None:
        """End a worker's load and free the exports that its processes closed. A killed process leaves one
        buffer allocated."""
        with self._lock:
            is_open = self._open.pop(worker, None) is not None
        if is_open:
            self._collect()


def update_info(chunk: Any) -> dict[str, Any]:
    """vLLM's IPCWeightTransferUpdateInfo, with the handle encoded so that it can pass through vLLM's
    sockets."""
    return {
        "names": chunk.names,
        "dtype_names": chunk.dtype_names,
        "shapes": chunk.shapes,
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(chunk.ipc_handle)).decode("ascii"),
        "tensor_sizes": chunk.tensor_sizes,
    }
