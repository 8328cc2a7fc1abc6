"""Where a search begins: the `--set`s, the profile that they make, and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from asyncrl_cli.bench.space import DEFAULT_PROFILE, RANKS_KEY, WORKERS_KEY, split_sets
from asyncrl_cli.errors import ConfigError
from asyncrl_cli.plan.cluster import counted
from asyncrl_cli.plan.compiling import compile_job
from asyncrl_cli.plan.job_plan import TRAINER, JobPlan
from asyncrl_cli.profile.loaded import set_layer
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.sharing import ROLLOUT, TRAIN, share_of, tasks_apart
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import virtual_cluster


def starting_point(
    workload: Workload, reference: str, sets: tuple[str, ...], gpus: int | None
) -> tuple[tuple[str, ...], Profile, JobPlan]:
    """The `--set`s that the search starts from, the profile that they make of `reference`, and its plan.

    Raises ConfigError if it has no split, bounds no staleness, or cannot use `gpus` GPUs.
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
    if gpus is not None:
        sets = scaled_sets(workload.name, profile, sets, gpus)
        profile = profile_for(workload, reference, sets).profile
    plan = compile_job(profile, virtual_cluster(profile))
    if gpus not in (None, plan.gpus):
        raise ConfigError(
            f"--gpus {gpus}, but {RANKS_KEY} and {WORKERS_KEY} come to {plan.gpus}",
            hint=f"--gpus {plan.gpus}, or leave the counts to the search",
        )
    return sets, profile, plan


def scaled_sets(workload_name: str, profile: Profile, sets: Sequence[str], gpus: int) -> tuple[str, ...]:
    """The `--set`s of a search on `gpus` GPUs: the profile's own split in proportion, or the counts that the user set.

    Raises ConfigError for a workload on CPUs, and for too few GPUs to split.
    """
    placement, each = profile.placement, profile.placement.gpus_per_rollout_worker
    sharing = profile.trainer.sequence_parallel_size
    if placement.device == "cpu":
        raise ConfigError(
            f"{workload_name} runs on CPUs, where --gpus {gpus} means nothing",
            hint="leave --gpus out; --set placement.trainer_workers=2 --set rollout.workers=2 gives it more processes",
        )
    total = sum(placement.ratios or (gpus,))
    scorers = {task: max(1, round(gpus * (share_of(profile, task) or 1) / total)) for task in tasks_apart(profile)}
    sides = gpus - sum(scorers.values())
    if sides < sharing + each:
        own = "what the profile says" if placement.gpus is None else f"the workload's own {placement.gpus}"
        fewest = sharing + each + len(scorers)
        also = "".join(f" and {task}" for task in scorers)
        raise ConfigError(
            f"--gpus {gpus}: there is no split of fewer than {fewest}, for {counted(sharing, 'trainer rank')} "
            f"and a rollout worker of {each}{also}",
            hint=f"--gpus {fewest} or more, or no --gpus: then it is {own}",
        )
    is_given = set_layer(sets).values.keys() & {RANKS_KEY, WORKERS_KEY}
    if is_given or (scorers and placement.tasks is None):  # the plan refuses scorers without a list of tasks
        return (*sets, f"placement.gpus={gpus}")
    left, right = map(int, placement.ratio.split(":"))
    if placement.trainer_workers is not None and profile.rollout.workers is not None:
        left, right = placement.trainer_workers, profile.rollout.workers * each
    left, right = share_of(profile, TRAIN) or left, share_of(profile, ROLLOUT) or right
    possible = [ranks for ranks in range(sharing, sides, sharing) if (sides - ranks) % each == 0]
    if not possible:
        raise ConfigError(
            f"--gpus {gpus}: {sides} for trainer and rollout cannot be split, as ranks come in multiples of {sharing} "
            f"(trainer.sequence_parallel_size) and a rollout worker has {each}",
            hint=f"--gpus {gpus - sides % gcd(sharing, each)}",
        )
    proportional = round(sides * left / (left + right))
    ranks = next((ranks for ranks in possible if ranks >= proportional), possible[-1])
    return (*sets, *split_sets({TRAINER: ranks, **scorers, ROLLOUT: sides - ranks}, each))
