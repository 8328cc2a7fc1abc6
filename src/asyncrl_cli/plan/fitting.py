"""Finds settings with which a job fits its devices, for the hint of a plan that does not.

The search repeats one step until the estimate fits: take the largest item at the fullest device's peak whose
keys can make it smaller, and change one of these keys. Then it takes back every change that was not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.plan import cluster, memory_fit
from asyncrl_cli.plan.cluster import ClusterResources, planned_nodes
from asyncrl_cli.plan.compiling import compile_job, device_of
from asyncrl_cli.plan.host_fit import NODE, STORE, host_items, node_needs
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER
from asyncrl_cli.plan.memory import SHARED_CACHE, MemoryEstimate, MemoryItem, estimate_memory
from asyncrl_cli.plan.memory_fit import MACHINE, DeviceNeed, device_needs
from asyncrl_cli.plan.resolving import for_device
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.keys import values_of
from asyncrl_cli.profile.loaded import Loaded
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import toml_value

SHARE = "engine's share"
"""Name of the device of an engine that is given a share of a GPU."""
GPUS_PER_NODE = 8
"""The most GPUs of a node that are proposed where there are fewer."""
MORE_GPUS = (2, 4, 8, 16, 32, 64)
"""How many times as many GPUs are tried, if no settings fit those that there are."""
Values = Mapping[str, Any]
"""Changed keys of a profile."""
Change = Callable[[MemoryEstimate], Values]
"""The next change of its kind, given the estimate so far; empty if there is none."""


def _halved(key: str, least: int = 1) -> Change:
    def change(estimate: MemoryEstimate) -> Values:
        present = values_of(estimate.profile)[key]
        return {key: max(present // 2, least)} if present > least else {}

    return change


def _fewer_slots(estimate: MemoryEstimate) -> Values:
    rollout = estimate.profile.rollout
    return {"rollout.slots": max(rollout.slots // 2, rollout.n)} if rollout.slots > rollout.n else {}


def _recompute_more(estimate: MemoryEstimate) -> Values:
    stronger = {"none": "selective", "selective": "full"}.get(
        estimate.profile.trainer.activation_checkpointing
    )
    return {"trainer.activation_checkpointing": stronger} if stronger else {}


def _offload(estimate: MemoryEstimate) -> Values:
    offloads = estimate.plan.device == "cuda" and not estimate.profile.trainer.offload_optimizer
    return {"trainer.offload_optimizer": True} if offloads else {}


def _sum_each_time(estimate: MemoryEstimate) -> Values:
    keeps = estimate.plan.device == "cuda" and estimate.profile.trainer.whole_gradients is not False
    return {"trainer.whole_gradients": False} if keeps else {}


def _bfloat16(estimate: MemoryEstimate) -> Values:
    is_wide = estimate.plan.device == "cuda" and estimate.profile.model.dtype == "float32"
    return {"model.dtype": "bfloat16"} if is_wide else {}


def _more_ranks(estimate: MemoryEstimate) -> Values:
    """One rank more, from the rollout's GPUs."""
    plan, placement = estimate.plan, estimate.profile.placement
    counts_nodes = estimate.profile.trainer.n_gpus_per_node or estimate.profile.rollout.n_gpus_per_node
    if plan.device == "cpu" or plan.colocate or counts_nodes or placement.tasks or plan.rollout_workers < 2:
        return {}
    ranks, left = plan.trainer_workers + plan.gpus_per_rollout_worker, plan.rollout_workers - 1
    return {"placement.trainer_workers": ranks, "rollout.workers": left}


def _more_gpus_per_worker(estimate: MemoryEstimate) -> Values:
    plan, profile = estimate.plan, estimate.profile
    if plan.device == "cpu" or plan.colocate or plan.rollout_workers < 2 or plan.engine == "transformers":
        return {}
    workers = (
        {"rollout.workers": plan.rollout_workers // 2}
        if profile.rollout.workers or plan.rollout_workers % 2
        else {}
    )
    size = (
        {"rollout.tensor_parallel_size": 2 * plan.gpus_per_rollout_worker}
        if profile.rollout.tensor_parallel_size
        else {}
    )
    return {"placement.gpus_per_rollout_worker": 2 * plan.gpus_per_rollout_worker, **workers, **size}


def _no_second_buffer(estimate: MemoryEstimate) -> Values:
    return {"weights.dual_buffer": False} if estimate.profile.weights.dual_buffer else {}


def _not_through_the_store(estimate: MemoryEstimate) -> Values:
    """vLLM on GPUs of its own gets versions over NCCL, without a copy in any host's memory but rank 0's."""
    if estimate.profile.weights.transport != "object-store":
        return {}
    is_direct = (
        estimate.plan.engine == "vllm" and estimate.plan.device == "cuda" and not estimate.plan.colocate
    )
    return (
        {"weights.transport": "nccl", "placement.device": "cuda"}
        if is_direct
        else {"weights.transport": "disk"}
    )


def _fewer_processes(key: str, role: str) -> Change:
    def change(estimate: MemoryEstimate) -> Values:
        processes = estimate.plan.role(role).workers
        return (
            {key: processes // 2}
            if estimate.plan.device == "cpu" and not estimate.plan.colocate and processes > 1
            else {}
        )

    return change


_FEWER_TOKENS = _halved("trainer.max_tokens_per_microbatch", 256)
_TRAINER = (_bfloat16, _offload, _more_ranks, _fewer_processes("placement.trainer_workers", TRAINER))
_ROLLOUT = (_fewer_slots, _bfloat16, _fewer_processes("rollout.workers", ROLLOUT))
CHANGES: Mapping[tuple[str, str], tuple[Change, ...]] = {
    (TRAINER, "activations"): (_FEWER_TOKENS, _recompute_more, _bfloat16),
    (TRAINER, "recomputed layer"): (_FEWER_TOKENS, _bfloat16),
    (TRAINER, "logits"): (_FEWER_TOKENS, _bfloat16),
    (TRAINER, "wire buffers"): (_halved("weights.load_bucket_size_mb", 64),),
    (TRAINER, "optimizer"): (_offload, _more_ranks, _fewer_processes("placement.trainer_workers", TRAINER)),
    **{(TRAINER, what): _TRAINER for what in ("parameters", "optimizer's step", "gradients", "gathered")},
    (TRAINER, "whole gradients"): (_sum_each_time, *_TRAINER),
    (ROLLOUT, "KV cache"): _ROLLOUT,
    (ROLLOUT, "prefill"): _ROLLOUT,
    (ROLLOUT, "sampling"): _ROLLOUT,
    (ROLLOUT, SHARED_CACHE): _ROLLOUT,
    (ROLLOUT, "weights"): (_bfloat16, _more_gpus_per_worker, _fewer_processes("rollout.workers", ROLLOUT)),
    (ROLLOUT, "wire buffers"): (_halved("weights.load_bucket_size_mb", 64),),
    (ROLLOUT, "load buffer"): (_not_through_the_store, _no_second_buffer, _more_gpus_per_worker),
    (NODE, STORE): (_not_through_the_store,),
}
"""(Role, item) -> changes that make the item smaller, those that cost least speed first."""


def refuse_what_cannot_fit(loaded: Loaded) -> None:
    """Called before a run on this machine. Raises PreflightError if its GPUs are too small for what a process
    always holds."""
    here = cluster.local_cluster()
    if (device := device_of(loaded.profile, here)) == "cpu":
        return
    profile = for_device(loaded, device).profile
    estimate = memory_fit.estimate_or_reason(
        profile, compile_job(profile, here), memory_fit.known_memory_bytes("cuda")
    )
    if isinstance(estimate, MemoryEstimate) and (refusal := memory_fit.cannot_fit(estimate)) is not None:
        raise with_hint(refusal, estimate, here)


def with_hint(refusal: PreflightError, estimate: MemoryEstimate, there: ClusterResources) -> PreflightError:
    """The refusal with a hint that leads to a job that fits, by the estimate, on the cluster `there` or on
    more GPUs. If none was found, it keeps its own."""
    hint = fitting_sets(estimate, there)
    for factor in MORE_GPUS if hint is None and estimate.plan.device == "cuda" else ():
        gpus = factor * there.gpus
        nodes = -(-gpus // max(GPUS_PER_NODE, there.nodes[0].gpus))
        more = planned(estimate.profile, nodes, gpus // nodes, there.nodes[0].memory_bytes)
        if (sets := fitting_sets(estimate, more)) is not None:
            on = f" --nodes {nodes}" if nodes > 1 else ""
            hint = (
                f"{nodes * (gpus // nodes)} such GPUs: asyncrl plan --gpus {gpus // nodes}{on} {sets}"
            ).rstrip()
            break
    return PreflightError(refusal.message, hint=hint or refusal.hint)


def planned(profile: Profile, nodes: int, gpus: int, memory_bytes: int | None) -> ClusterResources:
    made = planned_nodes(profile, nodes, gpus, memory_bytes=memory_bytes)
    return ClusterResources(nodes=tuple(made), elastic_cpus=nodes == 1)


def fitting_sets(estimate: MemoryEstimate, there: ClusterResources) -> str | None:
    """The `--set`s with which the job fits the devices of the cluster `there`; None if none were found."""
    changed: dict[str, Any] = {}
    present = _estimated(estimate, changed, there)
    while present is not None and (need := _fullest(present, there)) is not None:
        present, changed = next(_smaller(estimate, changed, present, need, there), (None, changed))
    if present is None:
        return None
    for key in list(changed):
        fewer = {other: value for other, value in changed.items() if other != key}
        if (made := _estimated(estimate, fewer, there)) is not None and _fullest(made, there) is None:
            changed = fewer
    return " ".join(
        f"--set {key}={value if isinstance(value, str) else toml_value(value)}"
        for key, value in changed.items()
    )


def _smaller(
    given: MemoryEstimate, changed: Values, present: MemoryEstimate, need: DeviceNeed, there: ClusterResources
) -> Iterator[tuple[MemoryEstimate, dict[str, Any]]]:
    """The estimates, with all changes so far, in which one more change makes the need smaller."""
    for item in sorted(_at_peak(present, need), key=lambda item: -item.total_bytes):
        for change in CHANGES.get((item.role, item.what), ()):
            if not (values := change(present)):
                continue
            made = _estimated(given, {**changed, **values}, there)
            same = (
                [new for new in _needs(made, there) if (new.device, new.roles) == (need.device, need.roles)]
                if made
                else []
            )
            if made is not None and all(new.num_bytes < need.num_bytes for new in same):
                yield made, {**changed, **values}


def _estimated(given: MemoryEstimate, changed: Values, there: ClusterResources) -> MemoryEstimate | None:
    """The estimate with the changed keys; None if such a profile is refused."""
    profile = given.profile
    for key, value in changed.items():
        section, _, name = key.partition(".")
        profile = profile.model_copy(
            update={section: getattr(profile, section).model_copy(update={name: value})}
        )
    try:
        check(profile)
        plan = compile_job(profile, there)
    except (ConfigError, PreflightError):
        return None
    return estimate_memory(profile, plan, given.shape, given.available_bytes)


def _fullest(estimate: MemoryEstimate, there: ClusterResources) -> DeviceNeed | None:
    """The device that lacks the most; None if all fit."""
    return max(
        (need for need in _needs(estimate, there) if need.fits is False),
        key=lambda need: need.num_bytes,
        default=None,
    )


def _needs(estimate: MemoryEstimate, there: ClusterResources) -> list[DeviceNeed]:
    """Those of the devices and nodes, and that of an engine with a share of the device: its weights."""
    needs, engine, available = device_needs(estimate), estimate.engine, estimate.available_bytes
    needs += node_needs(estimate, there)
    if estimate.plan.device == "cpu" or engine is None or engine.cache_bytes is not None or available is None:
        return needs
    weights = sum(item.num_bytes for item in estimate.of(ROLLOUT, "device") if item.what == "weights")
    share = int(engine.share * available)
    return [*needs, DeviceNeed(device=SHARE, roles=(ROLLOUT,), num_bytes=weights, available_bytes=share)]


def _at_peak(estimate: MemoryEstimate, need: DeviceNeed) -> list[MemoryItem]:
    """The items that coincide when the device is fullest."""
    if need.device == SHARE:
        return [item for item in estimate.of(ROLLOUT, "device") if item.what == "weights"]
    if need.device == NODE:
        return host_items(estimate)
    if need.device == MACHINE:
        return [item for role in need.roles for item in estimate.at_peak(role)]
    on_device = [replace(estimate, items=tuple(estimate.of(role, "device"))) for role in need.roles]
    return [item for role, part in zip(need.roles, on_device, strict=True) for item in part.at_peak(role)]
