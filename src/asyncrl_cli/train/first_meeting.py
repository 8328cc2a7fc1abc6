"""How the ranks of a process group find each other. The wait has its own limit, and its error names the missing ranks.

Later collectives may wait as long as a train step takes. The first one depends on the network alone. Behind a firewall, or on an
interface that other nodes cannot reach, it would hang.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from asyncrl_cli.errors import ExecutorFailed

KEY = "trainer.meeting_timeout_s"
NETWORK_HINT = "`asyncrl doctor --address` tries the network between the nodes; NCCL_DEBUG=INFO makes NCCL say more"
POLL_S = 0.01


class RanksMissing(ExecutorFailed):
    """These ranks did not join the process group."""

    def __init__(self, ranks: Sequence[int], world_size: int, timeout_s: float) -> None:
        self.ranks = tuple(ranks)
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        super().__init__(
            f"{names} of {world_size} did not join the process group within {KEY} = {timeout_s:g} s", hint=NETWORK_HINT
        )


def met(init_method: str, *, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The store of a process group, once all ranks have joined. Raises RanksMissing, or ExecutorFailed if rank 0 is unreachable."""
    place, wait = urlparse(init_method), timedelta(seconds=timeout_s)
    store: dist.Store
    if place.scheme == "file":
        store = dist.FileStore(place.path, world_size)
    else:
        try:
            store = dist.TCPStore(
                str(place.hostname), place.port or 0, world_size, is_master=rank == 0, timeout=wait, wait_for_workers=False
            )
        except dist.DistError as error:
            raise ExecutorFailed(f"cannot reach rank 0 at {place.netloc}: {error}", hint=NETWORK_HINT) from error
    store.set(f"came/{rank}", "")
    came = {other: f"came/{other}" for other in range(world_size)}
    try:
        store.wait(list(came.values()), wait)
    except RuntimeError as error:  # from a FileStore; a TCPStore's error derives from it
        missing = [other for other, key in came.items() if not store.check([key])]
        raise RanksMissing(missing, world_size, timeout_s) from error
    return store


def first_collective(device: torch.device, timeout_s: float) -> None:
    """Raises ExecutorFailed if the ranks, which have all joined, do not complete an all-reduce in time."""
    work = dist.all_reduce(torch.ones(1, device=device), async_op=True)
    assert work is not None
    deadline_s = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > deadline_s:
            raise ExecutorFailed(
                f"all ranks joined, but their first sum over {dist.get_backend()} did not finish within {KEY} = {timeout_s:g} s",
                hint=NETWORK_HINT,
            )
        time.sleep(POLL_S)
    work.wait()
