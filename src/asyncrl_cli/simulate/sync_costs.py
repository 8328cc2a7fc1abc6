"""How long a sync takes, from what it sends over which link, for workloads with `[links]`. docs/simulation.md
has the phases as a table, and what is left out.

S bytes of a version, of which s travel (with deltas `changed_ratio` * S), from R ranks on T nodes to workers
of g GPUs each, on N other nodes. R and T are 1 where rank 0 sends all. With `nccl` and `ipc` the load is all:
rank 0 gathers, over the network and to its host, and sends to one worker after another.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from asyncrl_cli.profile.arithmetic import sends_deltas, sends_rows
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.simulate.workload import Links, Syncing


class SyncTimes(NamedTuple):
    """Seconds. `gather_s` stalls the trainer, `load_s` a worker; the other two nobody."""

    gather_s: float
    publish_s: float
    send_s: float
    load_s: float


def sync_times(
    syncing: Syncing, links: Links, profile: Profile, *, ranks: int, workers: int, worker_gpus: int
) -> SyncTimes:
    def num_nodes(gpus: int) -> int:
        return ceil(gpus / links.gpus_per_node)

    size = syncing.parameter_bytes
    is_one_node = num_nodes(ranks + workers * worker_gpus) == 1
    senders = ranks if sends_rows(profile) else 1
    gather_s = size / senders / links.device_bytes_per_s
    if senders < ranks and num_nodes(ranks) > 1:
        gather_s += size / links.group_bytes_per_s
    if profile.weights.transport in DIRECT_TRANSPORTS:
        slower = links.device_bytes_per_s if is_one_node else links.group_bytes_per_s
        return SyncTimes(gather_s, 0.0, 0.0, size / min(links.device_bytes_per_s, slower))
    deltas = sends_deltas(profile)
    publish_s = size / senders / links.copy_bytes_per_s
    publish_s += size / senders / links.compare_bytes_per_s if deltas else 0.0
    sources = max(num_nodes(workers * worker_gpus) / num_nodes(senders), 1.0)
    sent = size * (links.changed_ratio if deltas else 1.0)
    network_s = 0.0 if is_one_node else sent * sources / links.node_bytes_per_s
    arrival_s = size / links.copy_bytes_per_s
    arrival_s = max(arrival_s, size / links.apply_bytes_per_s) if deltas else arrival_s
    send_s = max(network_s, arrival_s) if profile.weights.overlap else network_s + arrival_s
    return SyncTimes(gather_s, publish_s, send_s, size / worker_gpus / links.device_bytes_per_s)
