"""Do the bundles of a job fit into a cluster, and if not: what would.

Packs first-fit, largest first: exact for a plan's one or two sizes of bundles on equal nodes, a good guess
elsewhere. The placement groups themselves have the last word, within `placement.timeout_s`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from asyncrl_cli.errors import PreflightError
from asyncrl_cli.plan.cluster import ClusterResources, counted
from asyncrl_cli.plan.counts import Bundle, Counts


def fits(bundles: Sequence[Bundle], cluster: ClusterResources) -> bool:
    """True if the bundles can be packed into the cluster's nodes; a local session's CPUs never run out."""
    free = [[node.gpus, node.cpus] for node in cluster.nodes]
    for bundle in sorted(bundles, reverse=True):
        cpus = 0 if cluster.elastic_cpus else bundle.cpus
        node = next((node for node in free if node[0] >= bundle.gpus and node[1] >= cpus), None)
        if node is None:
            return False
        node[0] -= bundle.gpus
        node[1] -= cpus
    return True


def check_fit(counts: Counts, cluster: ClusterResources) -> None:
    """Raises PreflightError with what was asked, what there is, and the `--set` that would fit."""
    if not fits(counts.bundles, cluster):
        raise PreflightError(f"the cluster is too small: {asked(counts)}; it has {cluster}", hint=fitting_hint(counts, cluster))


def asked(counts: Counts) -> str:
    largest = max(counts.bundles)
    return (
        f"{counted(counts.trainer_workers, 'trainer rank')} and {counted(counts.rollout_workers, 'rollout worker')} "
        f"ask for {counted(counts.gpus, 'GPU')} and {counted(counts.cpus, 'CPU')}, "
        f"at most {counted(largest.gpus, 'GPU')} and {counted(largest.cpus, 'CPU')} of one node at a time"
    )


def fitting_hint(counts: Counts, cluster: ClusterResources) -> str:
    """The largest smaller job that fits, as `--set`s."""
    for smaller, sets in _smaller_jobs(counts):
        if fits(smaller.bundles, cluster):
            return sets
    if counts.gpus and cluster.cpus:
        return "--set placement.device=cpu"
    return f"the smallest job of this profile needs {2 * counts.cpus_per_worker} CPUs"


def _smaller_jobs(counts: Counts) -> Iterator[tuple[Counts, str]]:
    """Fewer CPUs per worker first (if that is what is short), then fewer workers, shared as before."""
    for cpus in range(counts.cpus_per_worker - 1, 0, -1):
        yield replace(counts, cpus_per_worker=cpus), f"--set placement.cpus_per_worker={cpus}"
    total = counts.trainer_workers + counts.rollout_workers
    for workers in range(total - 1, 1, -1):
        ranks = min(max(1, round(workers * counts.trainer_workers / total)), workers - 1)
        rollouts = ranks if counts.colocate else workers - ranks
        for cpus in dict.fromkeys((counts.cpus_per_worker, 1)):
            smaller = replace(counts, trainer_workers=ranks, rollout_workers=rollouts, cpus_per_worker=cpus)
            sets = f"--set placement.trainer_workers={ranks} --set rollout.workers={rollouts}"
            sets += f" --set placement.gpus={smaller.gpus}" if smaller.gpus else ""
            sets += f" --set placement.cpus_per_worker={cpus}" if cpus != counts.cpus_per_worker else ""
            yield smaller, sets
