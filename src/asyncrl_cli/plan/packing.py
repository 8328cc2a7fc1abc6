"""Do the bundles of a job fit into a cluster, and if not: what would.

Packs first-fit, largest first: exact for a plan's one or two sizes of bundles on equal nodes, a good guess
elsewhere. The placement groups themselves have the last word, within `placement.timeout_s`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from asyncrl_cli.errors import PreflightError
from asyncrl_cli.plan.cluster import ClusterResources, counted
from asyncrl_cli.plan.counts import Counts


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Bundle:
    """What one bundle of a placement group reserves on one node."""

    gpus: int = 0
    cpus: int


def bundles_of(counts: Counts) -> dict[str, tuple[Bundle, ...]]:
    """Bundles by placement group. A colocated one has one rank and one worker."""
    if counts.colocate:
        places = counts.trainer_workers
        bundle = Bundle(cpus=counts.cpus // places, gpus=counts.gpus // places)
        return {"colocated": (bundle,) * places}
    trainer = Bundle(cpus=counts.cpus_per_worker, gpus=1 if counts.gpus else 0)
    rollout = Bundle(cpus=counts.cpus_per_worker, gpus=counts.gpus_per_rollout_worker if counts.gpus else 0)
    return {"trainer": (trainer,) * counts.trainer_workers, "rollout": (rollout,) * counts.rollout_workers}


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
    if not fits(_all(counts), cluster):
        raise PreflightError(f"the cluster is too small: {asked(counts)}; it has {cluster}", hint=fitting_hint(counts, cluster))


def asked(counts: Counts) -> str:
    bundles = _all(counts)
    gpus, cpus = sum(bundle.gpus for bundle in bundles), sum(bundle.cpus for bundle in bundles)
    return (
        f"{counted(counts.trainer_workers, 'trainer rank')} and {counted(counts.rollout_workers, 'rollout worker')} "
        f"ask for {counted(gpus, 'GPU')} and {counted(cpus, 'CPU')}, "
        f"at most {counted(max(bundles).gpus, 'GPU')} and {counted(max(bundles).cpus, 'CPU')} of one node at a time"
    )


def fitting_hint(counts: Counts, cluster: ClusterResources) -> str:
    """The largest smaller job that fits, as `--set`s."""
    for smaller, sets in _smaller_jobs(counts, cluster):
        if fits(_all(smaller), cluster):
            return sets
    if counts.gpus and cluster.cpus:
        return "--set placement.device=cpu"
    return f"the smallest job of this profile needs {2 * counts.cpus_per_worker} CPUs"


def _smaller_jobs(counts: Counts, cluster: ClusterResources) -> Iterator[tuple[Counts, str]]:
    """Fewer CPUs per worker first (if that is what is short), then fewer workers, shared as before."""
    for cpus in range(counts.cpus_per_worker - 1, 0, -1):
        yield (
            _with(counts, counts.trainer_workers, counts.rollout_workers, cpus),
            f"--set placement.cpus_per_worker={cpus}",
        )
    total = counts.trainer_workers + counts.rollout_workers
    for workers in range(total - 1, 1, -1):
        ranks = min(max(1, round(workers * counts.trainer_workers / total)), workers - 1)
        rollouts = ranks if counts.colocate else workers - ranks
        for cpus in {counts.cpus_per_worker: None, 1: None}:
            sets = f"--set placement.trainer_workers={ranks} --set rollout.workers={rollouts}"
            if counts.gpus:
                sets += f" --set placement.gpus={_gpus(counts, ranks, rollouts)}"
            if cpus != counts.cpus_per_worker:
                sets += f" --set placement.cpus_per_worker={cpus}"
            yield _with(counts, ranks, rollouts, cpus), sets


def _all(counts: Counts) -> list[Bundle]:
    return [bundle for bundles in bundles_of(counts).values() for bundle in bundles]


def _gpus(counts: Counts, ranks: int, rollouts: int) -> int:
    if not counts.gpus:
        return 0
    return ranks if counts.colocate else ranks + rollouts * counts.gpus_per_rollout_worker


def _with(counts: Counts, ranks: int, rollouts: int, cpus: int) -> Counts:
    gpus = _gpus(counts, ranks, rollouts)
    return replace(counts, trainer_workers=ranks, rollout_workers=rollouts, cpus_per_worker=cpus, gpus=gpus)
