"""Derives the colocated baseline of a user's own profile: the same model, task, W and resources, taken in
turns."""

from __future__ import annotations

from decimal import Decimal

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.plan.job_plan import ROLLOUT, JobPlan
from asyncrl_cli.profile.arithmetic import mode_of
from asyncrl_cli.profile.loaded import DEFAULT, Loaded, to_toml
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS

NO_SWITCH = "the bench scores the first and the last version, and writes no checkpoints"
BENCH_KEYS = {
    "run.seed": "use --seed",
    "run.total_rollout_steps": "use --groups",
    "run.train_steps": "use --groups",
    "run.name": "use --out",
    "eval.every_versions": NO_SWITCH,
    "checkpoint.every_steps": NO_SWITCH,
}
"""Keys that the bench sets itself, and the hint for a user who sets one."""
IN_TURNS: dict[str, dict[str, object]] = {
    "async_training": {
        "staleness_threshold": Decimal(0),
        "partial_rollout": False,
        "max_staleness": None,
        "on_stale": "wait",
    },
    "placement": {
        "colocate": True,
        "ratio": "1:1",
        "tasks": None,
        "ratios": None,
        "rollout_strategy": "pack",
        "rollout_labels": {},
        "disjoint_nodes": False,
    },
    "rollout": {"interrupt": None, "min_workers": None, "nnodes": None, "n_gpus_per_node": None},
}
"""What has no meaning where both sides take turns on everything."""


def baseline_toml(base: Loaded, plan: JobPlan, *, keep_k: bool) -> str:
    """The profile file of the baseline of `base`. `plan`: that of `base`, whose resources the baseline gets.
    `keep_k`: with K = 1, as in the profile `colocate`, instead of the K of `base`.

    Raises ConfigError for a profile that cannot take turns, or already does.
    """
    profile = base.profile
    if mode_of(profile) == "colocate":
        raise ConfigError(
            f"'{profile.name}' is colocated, like its baseline would be",
            hint="--compare NAME, another profile",
        )
    if profile.reward_model.path is not None:
        raise ConfigError(
            f"'{profile.name}' has a reward model, which needs its own resources: it has no colocated "
            "baseline",
            hint="--compare NAME, another profile with this reward model",
        )
    changed = {section: dict(values) for section, values in IN_TURNS.items()}
    if plan.gpus:
        changed["placement"] |= {"gpus": plan.gpus, "trainer_workers": None, "gpus_per_rollout_worker": 1}
        changed["rollout"] |= {"workers": None, "tensor_parallel_size": None}
        changed["trainer"] = {"nnodes": None, "n_gpus_per_node": None}
    else:
        # On CPUs each rank and each worker has a place of its own; scorers' places become ranks'.
        places = plan.cpus // plan.cpus_per_worker
        changed["placement"] |= {"trainer_workers": places - plan.role(ROLLOUT).workers}
    if profile.weights.transport in DIRECT_TRANSPORTS:
        changed["weights"] = {"transport": "ipc" if plan.gpus == 1 else "object-store"}
    if keep_k:
        changed["async_training"]["trigger_parameter_sync_step"] = 1
    update: dict[str, object] = {
        section: getattr(profile, section).model_copy(update=values) for section, values in changed.items()
    }
    takes_turns = "trainer and rollout workers take turns on all resources."
    update |= {
        "name": f"{profile.name}-colocate",
        "purpose": f"The baseline of {profile.name}: {takes_turns}",
    }
    origins = {f"{section}.{name}": "bench" for section, values in changed.items() for name in values}
    return to_toml(
        profile.model_copy(update=update), {**base.origins, **origins, **dict.fromkeys(BENCH_KEYS, DEFAULT)}
    )
