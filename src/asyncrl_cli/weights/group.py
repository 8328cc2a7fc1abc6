"""Weights from a trainer that is no part of a run, by a process group of torch: gloo on CPUs, NCCL on GPUs.

    trainer   rank 0   joins,  broadcasts each tensor in the announced order, ...
    server    rank r   WeightGroup.join  ->  receive(specs) -> buckets, in host memory, as from any transport

A trainer that calls `init_process_group` itself leaves the group's name empty here. With a name the group is
made as OpenRLHF, vLLM's examples and AsyncRL's recipe make it beside a default group. Every call blocks, for
`timeout_s` at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore, destroy_process_group
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

from asyncrl_cli.base.errors import AsyncrlError, first_line
from asyncrl_cli.weights.buckets import Bucket, Packing, Spec, plan_layout, torch_dtype

BUCKET_BYTES = 128 * 2**20
DEFAULT_STORE, DEFAULT_NAME = "default_pg", "0"
"""torch's own names for the group of `init_process_group`."""


class WeightGroup:
    """This process's place in a group whose rank 0 is the trainer."""

    def __init__(self, group: Any, device: str) -> None:
        self._group = group
        self._device = device

    @classmethod
    def join(
        cls, *, name: str, host: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float
    ) -> WeightGroup:
        """Wait until all have joined. Raises AsyncrlError if they have not in time."""
        limit = timedelta(seconds=timeout_s)
        try:
            meeting = TCPStore(host, port, world_size, is_master=False, timeout=limit)
            store = PrefixStore(name or DEFAULT_STORE, meeting)
            made = name or DEFAULT_NAME
            group, _ = _new_process_group_helper(
                world_size, rank, [], Backend(backend), store, made, timeout=limit
            )
            _world.pg_group_ranks[group] = {one: one for one in range(world_size)}
        except (RuntimeError, ValueError, OSError) as error:
            why = f"no group of {world_size} at {host}:{port} within {timeout_s:g} s: {first_line(error)}"
            hint = "the trainer is rank 0 and listens there; all join at the same time"
            raise AsyncrlError(why, hint=hint) from error
        return cls(group, "cuda" if backend == "nccl" else "cpu")

    def receive(self, specs: Sequence[Spec]) -> list[Bucket]:
        """The tensors that rank 0 broadcasts, in this order. Raises AsyncrlError if one does not come."""
        name = specs[0].name
        try:
            packing = Packing(plan_layout(specs, BUCKET_BYTES))
            for spec in specs:
                name = spec.name
                tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self._device)
                self._group.broadcast(tensor, 0).wait()
                packing.put(name, tensor)
        except (RuntimeError, OSError) as error:  # also if there is no room
            raise AsyncrlError(f"{name} did not arrive from rank 0: {first_line(error)}") from error
        return packing.seal()

    def close(self) -> None:
        destroy_process_group(self._group)


def specs_of(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], max_bytes: int
) -> list[Spec]:
    """Raises ValueError for lists that do not fit together, an unknown dtype, a name that comes twice, or
    more than `max_bytes`."""
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise ValueError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes")
    if len(set(names)) < len(names):
        raise ValueError("a name comes twice")
    specs = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        dtype = dtype.removeprefix("torch.")
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"{name}: torch has no dtype {dtype}")
        if math.prod(shape) > max_bytes:  # before torch computes with it
            raise ValueError(f"{name} has the shape {list(shape)}")
        specs.append(Spec(name=name, dtype=dtype, shape=tuple(shape)))
    if (total := sum(spec.num_bytes for spec in specs)) > max_bytes:
        raise ValueError(f"the tensors have {total:,} bytes together, more than {max_bytes:,}")
    return specs
