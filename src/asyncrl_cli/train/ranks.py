"""The trainer ranks as torch.distributed sees them: process groups, device meshes, sums over ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class Ranks:
    """This rank's place among the others. One per process; `close` it before another is made.

    `mesh` is where parameters are sharded (gloo on CPU, nccl on CUDA). `host_mesh` and `host_group` belong to a gloo
    group of their own: a checkpoint is written through it from another thread, beside the collectives of training.
    """

    def __init__(self, *, rank: int, world_size: int, device: torch.device, init_method: str, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = indexed(device)
        if device.type == "cuda":
            torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        everyone = list(range(world_size))
        self.host_group = dist.new_group(everyone, backend="gloo", timeout=timeout)
        self.host_mesh = DeviceMesh.from_group(self.host_group, "cpu", mesh=everyone)
        world = dist.group.WORLD
        assert world is not None
        self.mesh = DeviceMesh.from_group(world, device.type, mesh=everyone)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def synchronize(self) -> None:
        """Wait for queued device work, so that seconds measured on the host are the device's."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        dist.destroy_process_group()


def indexed(device: torch.device) -> torch.device:
    """`cuda` is the first GPU that this process sees (Ray shows a rank its own one only): torch wants it by its number."""
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device
