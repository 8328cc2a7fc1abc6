"""torch.distributed for the trainer: how the ranks of a process group find each other, device meshes, sums
over ranks.

Later collectives may wait as long as a train step takes. The first one depends on the network alone: behind a
firewall, or on an interface that other nodes cannot reach, it would hang. So the ranks' meeting has a limit
of its own, and its error names the missing ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from asyncrl_cli.base.daemon_threads import in_daemon
from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.profile.schema import ProcessPlace, Profile

KEY = "trainer.meeting_timeout_s"
NETWORK_HINT = (
    "`asyncrl doctor --address` tries the network between the nodes; NCCL_DEBUG=INFO makes NCCL say more"
)


class RanksMissing(ExecutorFailed):
    """These ranks did not join the process group."""

    def __init__(self, ranks: Sequence[int], world_size: int, timeout_s: float) -> None:
        self.ranks = tuple(ranks)
        super().__init__(
            f"{_names(ranks)} of {world_size} did not join the process group within {KEY} = {timeout_s:g} s",
            hint=NETWORK_HINT,
        )


class Ranks:
    """One process's rank among the processes of its role (`place.workers`). One per process; `close` it
    before making another.

    Ranks wait for each other at most `trainer.meeting_timeout_s` at the start, and `trainer.step_timeout_s`
    later. Parameters are sharded over `mesh`, which has all ranks (gloo on CPU, nccl on CUDA). Each
    `sequence_size` neighbouring ranks have the same trajectories and divide their tokens (packed_rows.py);
    `sequence` is this rank's group of neighbours, or None if it is alone. On a CPU, torch computes with
    `place.threads` threads from here on.
    """

    def __init__(
        self, profile: Profile, place: ProcessPlace, *, rank: int, init_method: str, sequence_size: int = 1
    ) -> None:
        self.rank = rank
        self.world_size = world_size = place.workers
        self.device = device = device_of(place)
        torch.use_deterministic_algorithms(profile.run.deterministic)
        timeout_s, meeting_s = profile.trainer.step_timeout_s, profile.trainer.meeting_timeout_s
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = meet(init_method, rank=rank, world_size=world_size, timeout_s=meeting_s)
        backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
        # NCCL connects the ranks in the first collective, gloo already here, and keeps this group's limit.
        first = timeout if backend == "nccl" else timedelta(seconds=min(meeting_s, timeout_s))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=first)
        first_collective(device, store, rank=rank, world_size=world_size, timeout_s=meeting_s)
        self._world = self._data = self._group([list(range(world_size))], timeout)
        self.mesh = DeviceMesh.from_group(self._world, device.type, mesh=list(range(world_size)))
        self.sequence_size = sequence_size
        self.sequence: dist.ProcessGroup | None = None
        if sequence_size > 1:
            grid = torch.arange(world_size).view(-1, sequence_size)
            self._data = self._group(grid.T.tolist(), timeout)
            self.sequence = self._group(grid.tolist(), timeout)

    def _group(self, divided: list[list[int]], timeout: timedelta) -> dist.ProcessGroup:
        """This rank's group, if all ranks are divided into these."""
        if len(divided) == 1 and self.device.type == "cuda" and dist.group.WORLD is not None:
            return dist.group.WORLD  # has this limit; another group would take memory for a communicator
        group, _ = dist.new_subgroups_by_enumeration(divided, timeout=timeout)
        return group

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum, in place, a value that each rank computed from its trajectories. Ranks that share trajectories
        count once."""
        if self.world_size > self.sequence_size:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._data)
        return tensor

    def sum_shards(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum, in place, a value that each rank computed from its shards of the parameters."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._world)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._world)
        return tensor

    def synchronize(self) -> None:
        """Wait for queued device work, so that seconds measured on the host are the device's."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release_cache(self) -> None:
        """Return freed device memory, which torch keeps for itself, to the device: another process takes its
        turn there."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        dist.destroy_process_group()


def device_of(place: ProcessPlace) -> torch.device:
    """This process's device. On a CPU, torch computes with `place.threads` threads from here on. `cuda`
    becomes `cuda:0`, because torch needs an index. (With Ray, each process sees only its own GPU, as number
    0.)"""
    if place.device == "cpu":
        torch.set_num_threads(place.threads)
    return torch.device("cuda:0" if place.device == "cuda" else place.device)


def meet(init_method: str, *, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The store of a process group, once all ranks have joined. Raises RanksMissing, or ExecutorFailed if
    rank 0 is unreachable."""
    place, wait = urlparse(init_method), timedelta(seconds=timeout_s)
    store: dist.Store
    if place.scheme == "file":
        store = dist.FileStore(place.path, world_size)
    else:
        try:
            host, port, is_first = str(place.hostname), place.port or 0, rank == 0
            store = dist.TCPStore(
                host, port, world_size, is_master=is_first, timeout=wait, wait_for_workers=False
            )
        except dist.DistError as error:
            why = f"cannot reach rank 0 at {place.netloc}: {error}"
            raise ExecutorFailed(why, hint=NETWORK_HINT) from error
    store.set(f"came/{rank}", "")
    came = {other: f"came/{other}" for other in range(world_size)}
    try:
        store.wait(list(came.values()), wait)
    except RuntimeError as error:  # from a FileStore; a TCPStore's error derives from it
        missing = [other for other, key in came.items() if not store.check([key])]
        raise RanksMissing(missing, world_size, timeout_s) from error
    return store


def first_collective(
    device: torch.device, store: dist.Store, *, rank: int, world_size: int, timeout_s: float
) -> None:
    """Sum a number over all ranks, in a thread: NCCL connects within the first call, which may then block for
    ever.

    `store`: of the process group. Raises ExecutorFailed if the sum is not finished in time, with the ranks
    that it misses.
    """
    progress = store.clone()  # the group's own is locked while NCCL waits for it

    def first_sum() -> None:
        ones = torch.ones(1, device=device)
        dist.all_reduce(ones)
        ones.item()  # waits for the device
        progress.set(f"summed/{rank}", "")

    summed = in_daemon(first_sum, "first sum")
    try:
        summed.result(timeout_s)
    except TimeoutError as error:
        if summed.done():  # at the last moment, or torch raised a TimeoutError itself
            return summed.result()
        missing = [other for other in range(world_size) if not progress.check([f"summed/{other}"])]
        names = "none of them" if len(missing) == world_size else f"not {_names(missing)} of {world_size}"
        why = f"{names} finished the first sum over {dist.get_backend()} within {KEY} = {timeout_s:g} s"
        raise ExecutorFailed(f"all ranks joined, but {why}", hint=NETWORK_HINT) from error


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
