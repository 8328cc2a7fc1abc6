"""Where `plan --tune --gpus N` starts: the profile's own split, scaled to N GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.plan.cluster import counted
from asyncrl_cli.profile.layers import set_layer
from asyncrl_cli.profile.schema import Profile

SPLIT_KEYS = ("placement.trainer_workers", "rollout.workers")


def starting_sets(workload_name: str, profile: Profile, sets: Sequence[str], gpus: int) -> tuple[str, ...]:
    """The `--set`s of a search on `gpus` GPUs. Counts that the user set stay: what they come to is the compiler's to judge.

    Raises ConfigError for a workload on CPUs, and for too few GPUs to split.
    """
    if profile.placement.device == "cpu":
        raise ConfigError(
            f"{workload_name} runs on CPUs, where --gpus {gpus} means nothing",
            hint="leave --gpus out; --set placement.trainer_workers=2 --set rollout.workers=2 gives it more processes",
        )
    each = profile.placement.gpus_per_rollout_worker
    if gpus < 1 + each:
        raise ConfigError(
            f"--gpus {gpus}: a trainer rank and a rollout worker of {counted(each, 'GPU')} need {1 + each}, so there is no split "
            "to search for",
            hint=f"--gpus {1 + each} or more, or no --gpus: then it is {_own_gpus(profile)}",
        )
    base = (*sets, f"placement.gpus={gpus}")
    if set_layer(sets).values.keys() & set(SPLIT_KEYS):
        return base
    ranks = _ranks(profile, gpus)
    return (*base, f"placement.trainer_workers={ranks}", f"rollout.workers={(gpus - ranks) // each}")


def check_gpus(gpus: int, found: int) -> None:
    """Counts that the user set may come to fewer GPUs than `--gpus` says."""
    if found != gpus:
        raise ConfigError(
            f"--gpus {gpus}, but {' and '.join(SPLIT_KEYS)} come to {found}",
            hint=f"--gpus {found}, or leave the counts to the search",
        )


def _ranks(profile: Profile, gpus: int) -> int:
    """In proportion to the profile's split, with whole rollout workers in what is left."""
    each = profile.placement.gpus_per_rollout_worker
    left, right = (int(part) for part in profile.placement.ratio.split(":"))
    if profile.placement.trainer_workers is not None and profile.rollout.workers is not None:
        left, right = profile.placement.trainer_workers, profile.rollout.workers * each
    ranks = min(max(round(gpus * left / (left + right)), 1), gpus - each)
    return ranks + (gpus - ranks) % each


def _own_gpus(profile: Profile) -> str:
    own = profile.placement.gpus
    return "what the profile says" if own is None else f"the workload's own {own}"
