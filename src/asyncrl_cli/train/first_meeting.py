"""How the ranks of a process group find each other. The wait has its own limit, and its error names the
missing ranks.

Later collectives may wait as long as a train step takes. The first one depends on the network alone. Behind a
firewall, or on an interface that other nodes cannot reach, it would hang.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from asyncrl_cli.base.errors import ExecutorFailed

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


def met(init_method: str, *, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The store of a process group, once all ranks have joined. Raises RanksMissing, or ExecutorFailed if
    rank 0 is unreachable."""
    place, wait = urlparse(init_method), timedelta(seconds=timeout_s)
    store: dist.Store
    if place.scheme == "file":
        store = dist.FileStore(place.path, world_size)
    else:
        try:
            store = dist.TCPStore(
                str(place.hostname),
                place.port or 0,
                world_size,
                is_master=rank == 0,
                timeout=wait,
                wait_for_workers=False,
            )
        except dist.DistError as error:
            raise ExecutorFailed(
                f"cannot reach rank 0 at {place.netloc}: {error}", hint=NETWORK_HINT
            ) from error
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
    summed: Future[None] = Future()
    progress = store.clone()  # the group's own is locked while NCCL waits for it

    def first_sum() -> None:
        try:
            ones = torch.ones(1, device=device)
            dist.all_reduce(ones)
            ones.item()  # waits for the device
            progress.set(f"summed/{rank}", "")
            summed.set_result(None)
        except Exception as error:
            summed.set_exception(error)

    threading.Thread(target=first_sum, name="first sum", daemon=True).start()
    try:
        summed.result(timeout_s)
    except TimeoutError as error:
        if summed.done():  # at the last moment, or torch raised a TimeoutError itself
            return summed.result()
        missing = [other for other in range(world_size) if not progress.check([f"summed/{other}"])]
        names = "none of them" if len(missing) == world_size else f"not {_names(missing)} of {world_size}"
        raise ExecutorFailed(
            f"all ranks joined, but {names} finished the first sum over {dist.get_backend()} within {KEY} = "
            f"{timeout_s:g} s",
            hint=NETWORK_HINT,
        ) from error


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
