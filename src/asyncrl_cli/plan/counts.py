"""How many trainer ranks and rollout workers: from explicit counts, or from a ratio of GPUs."""

from __future__ import annotations

from asyncrl_cli.errors import ConfigError, PreflightError
from asyncrl_cli.plan.cluster import ClusterResources, counted
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile

Counts = tuple[int, int]
"""Trainer ranks and rollout workers."""


def cpu_counts(profile: Profile) -> Counts:
    """One worker per role unless the profile says more; GPU counts mean nothing here (the plan warns).

    Colocated, each place of `cpus_per_worker` cores has a rank and a worker, and there are as many places as ranks and workers
    would have apart: the same resources. (More threads for one of each would not help small matrices: they get slower.)
    """
    ranks, workers = profile.placement.trainer_workers or 1, profile.rollout.workers or 1
    return (ranks + workers, ranks + workers) if profile.placement.colocate else (ranks, workers)


def cuda_counts(profile: Profile, cluster: ClusterResources) -> Counts:
    """Explicit counts win; the rest comes from `placement.gpus` (or all of the cluster's) and `placement.ratio`."""
    if profile.placement.colocate:
        return _colocated_counts(profile, cluster)
    per_worker = profile.placement.gpus_per_rollout_worker
    ranks, workers = profile.placement.trainer_workers, profile.rollout.workers
    if ranks is None and workers is None:
        ranks, workers = _by_ratio(profile, _total(profile, cluster))
    elif ranks is None:
        assert workers is not None
        total = _total(profile, cluster)
        ranks = _rest(total, workers * per_worker, 1, "rollout.workers", (total - 1) // per_worker)
    elif workers is None:
        total = _total(profile, cluster)
        workers = _rest(total, ranks, per_worker, "placement.trainer_workers", total - per_worker)
    needed = ranks + workers * per_worker
    if profile.placement.gpus is not None and needed > profile.placement.gpus:
        raise ConfigError(
            f"placement.gpus = {profile.placement.gpus}, but {ranks} trainer ranks and {workers} rollout workers "
            f"of {per_worker} need {needed}",
            hint=f"--set placement.gpus={needed}",
        )
    return ranks, workers


def _colocated_counts(profile: Profile, cluster: ClusterResources) -> Counts:
    placement = profile.placement
    if placement.gpus_per_rollout_worker > 1:
        raise ConfigError(
            f"placement.colocate shares each GPU between one rank and one rollout worker, but "
            f"placement.gpus_per_rollout_worker = {placement.gpus_per_rollout_worker}",
            hint="--set placement.gpus_per_rollout_worker=1",
        )
    asked = {
        "placement.trainer_workers": placement.trainer_workers,
        "rollout.workers": profile.rollout.workers,
        "placement.gpus": placement.gpus,
    }
    given = {key: value for key, value in asked.items() if value is not None}
    if len(set(given.values())) > 1:
        numbers = ", ".join(f"{key} = {value}" for key, value in given.items())
        raise ConfigError(
            f"placement.colocate needs one rank and one rollout worker per GPU, but {numbers}",
            hint=" ".join(f"--set {key}={min(given.values())}" for key in given),
        )
    gpus = next(iter(given.values())) if given else _total(profile, cluster)
    if profile.weights.transport == "ipc" and gpus > 1:
        raise ConfigError(
            f'weights.transport = "ipc" with {gpus} GPUs: weights pass through the memory of rank 0\'s GPU, which the rollout '
            "workers of the others cannot map",
            hint=" ".join(f"--set {key}=1" for key in given or ("placement.gpus",)) + ", or --set weights.transport=object-store",
        )
    return gpus, gpus


def _total(profile: Profile, cluster: ClusterResources) -> int:
    total = profile.placement.gpus or cluster.gpus
    if total == 0:
        needs_gpus = profile.weights.transport in DIRECT_TRANSPORTS
        without = "--set placement.device=cpu" + (" --set weights.transport=object-store" if needs_gpus else "")
        raise PreflightError(
            f'placement.device = "cuda", but the cluster has no GPU: {cluster}',
            hint=f"{without}, or `asyncrl plan --gpus N` to plan for a machine that has some",
        )
    return total


def _by_ratio(profile: Profile, total: int) -> Counts:
    """trainer : rollout shares of all GPUs, in whole GPUs and whole rollout workers."""
    per_worker = profile.placement.gpus_per_rollout_worker
    left, right = map(int, profile.placement.ratio.split(":"))

    def divides(gpus: int) -> bool:
        ranks, remainder = divmod(gpus * left, left + right)
        return not remainder and (gpus - ranks) % per_worker == 0

    if not divides(total):
        fitting = next((gpus for gpus in range(total, 0, -1) if divides(gpus)), None)
        hint = "--set placement.trainer_workers=N --set rollout.workers=M" if fitting is None else f"--set placement.gpus={fitting}"
        raise ConfigError(
            f'GPUs not divisible: placement.ratio = "{profile.placement.ratio}" of {counted(total, "GPU")} '
            f"with {per_worker} per rollout worker",
            hint="--set placement.colocate=true (one GPU in turns), or --set placement.device=cpu" if total == 1 else hint,
        )
    ranks = total * left // (left + right)
    return ranks, (total - ranks) // per_worker


def _rest(total: int, taken: int, each: int, key: str, fitting: int) -> int:
    """Workers of `each` GPUs in what `key` leaves; `fitting` is the largest value of `key` that leaves enough."""
    rest = total - taken
    if rest < each:
        raise PreflightError(
            f"{key} takes {taken} of {total} GPUs, which leaves {max(rest, 0)} for the other side; it needs {each}",
            hint=f"--set {key}={fitting}" if fitting >= 1 else "--set placement.device=cpu",
        )
    if rest % each:
        raise ConfigError(
            f"GPUs not divisible: {key} leaves {rest} of {total} GPUs, in rollout workers of {each} each",
            hint=f"--set placement.gpus={taken + rest // each * each}",
        )
    return rest // each
