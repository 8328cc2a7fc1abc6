"""Derives the colocated baseline of a user's own profile: the same model, task, W and resources, taken in
turns."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.bench.entries import OWN_KEYS
from asyncrl_cli.plan.job_plan import ROLLOUT, JobPlan
from asyncrl_cli.profile.arithmetic import mode_of
from asyncrl_cli.profile.loaded import DEFAULT, Loaded, to_toml
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile

IN_TURNS: dict[str, dict[str, Any]] = {
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


def baseline_toml(own: Loaded, plan: JobPlan, *, keep_k: bool) -> str:
    """The profile file of the baseline. `plan`: that of `own`, whose resources the baseline gets. `keep_k`:
    with K = 1, as in the profile `colocate`, instead of the K of `own`.

    Raises ConfigError for a profile that cannot take turns, or already does.
    """
    profile = own.profile
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
    changed["placement"] |= _resources(profile, plan)
    if plan.gpus:
        changed["rollout"] |= {"workers": None, "tensor_parallel_size": None}
        changed["trainer"] = {"nnodes": None, "n_gpus_per_node": None}
    if profile.weights.transport in DIRECT_TRANSPORTS:
        changed["weights"] = {"transport": "ipc" if plan.gpus == 1 else "object-store"}
    if keep_k:
        changed["async_training"]["trigger_parameter_sync_step"] = 1
    tables = {
        section: getattr(profile, section).model_copy(update=values) for section, values in changed.items()
    }
    derived = profile.model_copy(
        update={
            **tables,
            "name": f"{profile.name}-colocate",
            "purpose": f"The baseline of {profile.name}: trainer and rollout workers take turns on all "
            "resources.",
        }
    )
    ours = {f"{section}.{name}": "bench" for section, values in changed.items() for name in values}
    return to_toml(derived, {**own.origins, **ours, **dict.fromkeys(OWN_KEYS, DEFAULT)})


def _resources(profile: Profile, plan: JobPlan) -> dict[str, Any]:
    """On CPUs a colocated profile has a place for each rank and each worker; scorers' cores become ranks'."""
    if plan.gpus:
        return {"gpus": plan.gpus, "trainer_workers": None, "gpus_per_rollout_worker": 1}
    places = plan.cpus // plan.cpus_per_worker
    return {"trainer_workers": places - plan.role(ROLLOUT).workers}
