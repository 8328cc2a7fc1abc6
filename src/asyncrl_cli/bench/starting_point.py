"""Where a search begins: the `--set`s, the profile that they make, and its plan."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl_cli.bench.space import DEFAULT_PROFILE, SPLIT_KEYS
from asyncrl_cli.errors import ConfigError
from asyncrl_cli.plan.job_plan import JobPlan, compile_job
from asyncrl_cli.profile.loaded import set_layer
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.sharing import REF, is_apart
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import virtual_cluster


def starting_point(
    workload: Workload, reference: str, sets: tuple[str, ...], gpus: int | None
) -> tuple[tuple[str, ...], Profile, JobPlan]:
    """The `--set`s that the search starts from, the profile that they make of `reference`, and its plan.

    Raises ConfigError if it has no split, bounds no staleness, cannot use `gpus` GPUs, or has a reference apart.
    """
    profile = profile_for(workload, reference, sets).profile
    if profile.placement.colocate:
        raise ConfigError(
            f"{reference} is colocated: trainer and rollout share all GPUs, so there is no split to tune",
            hint=f"--profile {DEFAULT_PROFILE}",
        )
    if (on_stale := profile.async_training.on_stale) != "wait":
        raise ConfigError(
            f'async_training.on_stale = "{on_stale}" bounds no staleness, and a search needs a bound',
            hint="--set async_training.on_stale=wait",
        )
    if is_apart(profile, REF):
        raise ConfigError(
            "placement.tasks gives the reference resources of its own, and a search has no axis for its share",
            hint="leave placement.tasks out here; compare a few placement.ratios with `asyncrl bench --simulate`",
        )
    if gpus is not None:
        sets = scaled_sets(workload.name, profile, sets, gpus)
        profile = profile_for(workload, reference, sets).profile
    plan = compile_job(profile, virtual_cluster(profile))
    if gpus not in (None, plan.gpus):
        raise ConfigError(
            f"--gpus {gpus}, but {' and '.join(SPLIT_KEYS)} come to {plan.gpus}",
            hint=f"--gpus {plan.gpus}, or leave the counts to the search",
        )
    return sets, profile, plan


def scaled_sets(workload_name: str, profile: Profile, sets: Sequence[str], gpus: int) -> tuple[str, ...]:
    """The `--set`s of a search on `gpus` GPUs: the profile's own split in proportion, or the counts that the user set.

    Raises ConfigError for a workload on CPUs, and for too few GPUs to split.
    """
    placement, each = profile.placement, profile.placement.gpus_per_rollout_worker
    if placement.device == "cpu":
        raise ConfigError(
            f"{workload_name} runs on CPUs, where --gpus {gpus} means nothing",
            hint="leave --gpus out; --set placement.trainer_workers=2 --set rollout.workers=2 gives it more processes",
        )
    if gpus < 1 + each:
        own = "what the profile says" if placement.gpus is None else f"the workload's own {placement.gpus}"
        raise ConfigError(
            f"--gpus {gpus}: there is no split of fewer than {1 + each}, for a trainer rank and a rollout worker of {each}",
            hint=f"--gpus {1 + each} or more, or no --gpus: then it is {own}",
        )
    base = (*sets, f"placement.gpus={gpus}")
    if set_layer(sets).values.keys() & set(SPLIT_KEYS):
        return base
    left, right = map(int, placement.ratio.split(":"))
    if placement.trainer_workers is not None and profile.rollout.workers is not None:
        left, right = placement.trainer_workers, profile.rollout.workers * each
    ranks = min(max(round(gpus * left / (left + right)), 1), gpus - each)
    ranks += (gpus - ranks) % each
    return (*base, f"{SPLIT_KEYS[0]}={ranks}", f"{SPLIT_KEYS[1]}={(gpus - ranks) // each}")
