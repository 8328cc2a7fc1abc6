"""Finds settings with which a job fits its devices, for the hint of a plan that does not.

The search repeats one step until the estimate fits: take the largest item at the fullest device's peak whose
keys can make it smaller, and change one of these keys. Then it takes back every change that was not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.plan import cluster, memory_fit
from asyncrl_cli.plan.cluster import ClusterResources, planned_nodes
from asyncrl_cli.plan.compiler import compile_job, device_of
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, for_device
from asyncrl_cli.plan.memory import (
    CACHE,
    PROCESS,
    SHARED_CACHE,
    WIRE_BUFFERS,
    MemoryEstimate,
    MemoryItem,
    estimate_memory,
)
from asyncrl_cli.plan.memory_fit import NODE, SHARE, STORE, DeviceNeed, DoesNotFit, device_needs, node_needs
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.keys import with_values
from asyncrl_cli.profile.loaded import Loaded
from asyncrl_cli.profile.resolved import may_change
from asyncrl_cli.profile.toml_files import Table, Values, toml_value

GPUS_PER_NODE = 8
"""The most GPUs of a node that are proposed where there are fewer."""
MORE_GPUS = (2, 4, 8, 16, 32, 64)
"""How many times as many GPUs are tried, if no settings fit those that there are."""
Estimated = Callable[[Values], MemoryEstimate | None]


def refuse_what_cannot_fit(loaded: Loaded, *, is_resumed: bool = False) -> None:
    """Called before a run on this machine. Raises the PreflightError of `asyncrl plan` if the job does not
    fit, by the estimate. `is_resumed`: its hint names no settings that a resume would refuse."""
    here = cluster.local_cluster()
    device = device_of(loaded.profile, here)
    profile, available = for_device(loaded, device).profile, memory_fit.known_memory_bytes(device)
    estimate = memory_fit.estimate_or_reason(profile, compile_job(profile, here), available)
    if isinstance(estimate, MemoryEstimate) and (refusal := memory_fit.refusal_of(estimate, here)):
        raise with_hint(refusal, estimate, here, is_resumed=is_resumed)


def with_hint(
    refusal: DoesNotFit, estimate: MemoryEstimate, there: ClusterResources, *, is_resumed: bool = False
) -> PreflightError:
    """The refusal with a hint that leads to a job that fits, by the estimate, on the cluster `there` or on
    more GPUs. If none was found, it keeps its own, unless a resume would refuse that."""
    hint = _fitting_sets(estimate, there, is_resumed)
    for factor in MORE_GPUS if hint is None and estimate.plan.device == "cuda" else ():
        memory_bytes, gpus = there.nodes[0].memory_bytes, factor * there.gpus
        num_nodes = -(-gpus // max(GPUS_PER_NODE, there.nodes[0].gpus))
        each = gpus // num_nodes
        nodes = tuple(planned_nodes(estimate.profile, num_nodes, each, memory_bytes=memory_bytes))
        more = ClusterResources(nodes=nodes, elastic_cpus=num_nodes == 1)
        if (sets := _fitting_sets(estimate, more, is_resumed)) is not None:
            on = f" --nodes {num_nodes}" if num_nodes > 1 else ""
            plan = "" if is_resumed else f"asyncrl plan --gpus {each}{on} "
            hint = f"{num_nodes * each} such GPUs: {plan}{sets}".rstrip(": ")
            break
    is_of_use = not is_resumed or (refusal.key and may_change(refusal.key))
    otherwise = refusal.hint if is_of_use else "resume it where devices have more memory"
    return PreflightError(refusal.message, hint=hint or otherwise)


def _fitting_sets(estimate: MemoryEstimate, there: ClusterResources, is_resumed: bool) -> str | None:
    """The `--set`s with which the job fits the devices of the cluster `there`; None if none were found."""
    changed: Table = {}
    estimated = partial(_estimated, estimate, there, is_resumed)
    present = estimated(changed)
    while present is not None and (need := _fullest(present, there)) is not None:
        present, changed = next(_smaller(estimated, changed, present, need, there), (None, changed))
    if present is None:
        return None
    for key in list(changed):
        fewer = {other: value for other, value in changed.items() if other != key}
        if (made := estimated(fewer)) is not None and _fullest(made, there) is None:
            changed = fewer
    shown = {key: value if isinstance(value, str) else toml_value(value) for key, value in changed.items()}
    return " ".join(f"--set {key}={value}" for key, value in shown.items())


def _smaller(
    estimated: Estimated, changed: Values, present: MemoryEstimate, need: DeviceNeed, there: ClusterResources
) -> Iterator[tuple[MemoryEstimate, Table]]:
    """The estimates, with all changes so far, in which one more change makes the need smaller."""
    for item in sorted(need.items, key=lambda item: -item.total_bytes):
        for values in _changes(item, present):
            made = estimated({**changed, **values})
            if made is not None and all(
                new.num_bytes < need.num_bytes
                for new in _needs(made, there)
                if (new.device, new.roles) == (need.device, need.roles)
            ):
                yield made, {**changed, **values}


def _changes(item: MemoryItem, estimate: MemoryEstimate) -> list[Values]:
    """Changes that make the item smaller, those that cost least speed first."""
    profile, plan, engine = estimate.profile, estimate.plan, estimate.plan.engine
    trainer, rollout, weights = profile.trainer, profile.rollout, profile.weights
    on_gpus, workers, each = plan.device == "cuda", plan.rollout_workers, plan.gpus_per_rollout_worker
    is_alone = on_gpus and not plan.colocate  # each role has GPUs of its own

    def halved(key: str, present: int, least: int) -> list[Values]:
        return [{key: max(present // 2, least)}] if present > least else []

    def fewer_processes(key: str, role: str) -> list[Values]:
        processes = plan.role(role).workers
        return [] if on_gpus or plan.colocate else halved(key, processes, 1)

    def change(values: Values, possible: object) -> list[Values]:
        return [values] if possible else []

    bfloat16 = change({"model.dtype": "bfloat16"}, on_gpus and profile.model.dtype == "float32")
    tokens = halved("trainer.max_tokens_per_microbatch", trainer.max_tokens_per_microbatch, 256)
    wires = halved("weights.load_bucket_size_mb", weights.load_bucket_size_mb, 64)
    slots = halved("rollout.slots", rollout.slots, rollout.n)
    fewer_workers = fewer_processes("rollout.workers", ROLLOUT)
    stronger = {"none": "selective", "selective": "full"}.get(trainer.activation_checkpointing, "")
    recompute = change({"trainer.activation_checkpointing": stronger}, stronger)
    offload = change({"trainer.offload_optimizer": True}, on_gpus and not trainer.offload_optimizer)
    sums_once = on_gpus and trainer.whole_gradients is not False
    sum_each_time = change({"trainer.whole_gradients": False}, sums_once)
    counts_nodes = trainer.n_gpus_per_node or rollout.n_gpus_per_node
    from_rollout = {"placement.trainer_workers": plan.trainer_workers + each, "rollout.workers": workers - 1}
    may_take = is_alone and workers > 1 and not counts_nodes and not profile.placement.tasks
    more_ranks = change(from_rollout, may_take)
    wider: Table = {"placement.gpus_per_rollout_worker": 2 * each}
    wider |= {"rollout.workers": workers // 2} if rollout.workers or workers % 2 else {}
    wider |= {"rollout.tensor_parallel_size": 2 * each} if rollout.tensor_parallel_size else {}
    more_gpus = change(wider, is_alone and workers > 1 and engine != "transformers")
    # vLLM on GPUs of its own gets versions over NCCL, without a copy in any host's memory but rank 0's.
    nccl: Table = {"weights.transport": "nccl", "placement.device": "cuda"}
    direct = nccl if is_alone and engine == "vllm" else {"weights.transport": "disk"}
    past_the_store = change(direct, weights.transport == "object-store")
    one_buffer = change({"weights.dual_buffer": False}, weights.dual_buffer)

    fewer_ranks = fewer_processes("placement.trainer_workers", TRAINER)
    state = [*bfloat16, *offload, *more_ranks, *fewer_ranks]
    generation = [*slots, *bfloat16, *fewer_workers]
    return {
        (TRAINER, "activations"): [*tokens, *recompute, *bfloat16],
        (TRAINER, "recomputed layer"): [*tokens, *bfloat16],
        (TRAINER, "logits"): [*tokens, *bfloat16],
        (TRAINER, WIRE_BUFFERS): wires,
        (TRAINER, "optimizer"): [*offload, *more_ranks, *fewer_ranks],
        (TRAINER, "parameters"): state,
        (TRAINER, PROCESS): fewer_ranks,
        (TRAINER, "optimizer's step"): state,
        (TRAINER, "gradients"): state,
        (TRAINER, "gathered"): state,
        (TRAINER, "whole gradients"): [*sum_each_time, *state],
        (ROLLOUT, CACHE): generation,
        (ROLLOUT, SHARED_CACHE): generation,
        (ROLLOUT, "prefill"): generation,
        (ROLLOUT, "sampling"): generation,
        (ROLLOUT, PROCESS): fewer_workers,
        (ROLLOUT, "weights"): [*bfloat16, *more_gpus, *fewer_workers],
        (ROLLOUT, WIRE_BUFFERS): wires,
        (ROLLOUT, "load buffer"): [*past_the_store, *one_buffer, *more_gpus],
        (NODE, STORE): past_the_store,
    }.get((item.role, item.what), [])


def _estimated(
    given: MemoryEstimate, there: ClusterResources, is_resumed: bool, changed: Values
) -> MemoryEstimate | None:
    """The estimate with the changed keys; None if such a profile is refused, or such a resume."""
    if is_resumed and not all(map(may_change, changed)):
        return None
    profile = with_values(given.profile, changed)
    try:
        check(profile)
        plan = compile_job(profile, there)
    except (ConfigError, PreflightError):
        return None
    return estimate_memory(profile, plan, given.shape, given.available_bytes)


def _needs(estimate: MemoryEstimate, there: ClusterResources) -> list[DeviceNeed]:
    needs = [*device_needs(estimate), *node_needs(estimate, there)]
    engine, available = estimate.engine, estimate.available_bytes
    if estimate.plan.device == "cuda" and engine and engine.cache_bytes is None and available is not None:
        # the engine's weights must fit into its share of a GPU, too
        weights, share = estimate.rollout_weights, int(engine.share * available)
        needs.append(DeviceNeed(SHARE, (ROLLOUT,), weights.num_bytes, share, items=(weights,)))
    return needs


def _fullest(estimate: MemoryEstimate, there: ClusterResources) -> DeviceNeed | None:
    """The device that lacks the most; None if all fit."""
    lacking = (need for need in _needs(estimate, there) if need.fits is False)
    return max(lacking, key=lambda need: need.num_bytes, default=None)
