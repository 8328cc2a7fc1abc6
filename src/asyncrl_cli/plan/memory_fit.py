"""Compares a memory estimate with what there is: a GPU's memory, a node's host memory and, on CPUs, the
machine's with its object store.

On a node with GPUs its processes' host memory counts: what they always hold, the phase in which they hold
most besides (a start, or a sync beside a checkpoint), and the object store, where a rank publishes or a
worker receives versions. A rank holds what it sends of them, and so does its node's store.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.models.shape import ShapeUnknown, shape_of
from asyncrl_cli.plan.cluster import ClusterResources, Unplaced, assigned, host_memory_bytes
from asyncrl_cli.plan.job_plan import COLOCATED, LENT, ROLLOUT, TRAINER, JobPlan
from asyncrl_cli.plan.memory import (
    CACHE,
    SHARED_CACHE,
    MemoryEstimate,
    MemoryItem,
    estimate_memory,
    kv_cache_bytes,
    peak,
    published_bytes,
)
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile

GIB = 2**30
SMALLER = "a smaller model, more GPUs or larger ones"
GPU, MACHINE, NODE, SHARE = "GPU", "machine", "node", "engine's share"
"""Names of devices. On CPUs all processes share the machine's memory. An engine may have a share of a GPU."""
STORE = "object store"
PROBE_TIMEOUT_S = 10.0
FETCHED_BYTES_PER_S = 1e9
"""What the one thread of a node fetches, checks and copies (docs/weights.md, "At size")."""


class DoesNotFit(PreflightError):
    """A device has too little memory for a job. `key`: of the setting that the hint proposes, or ""."""

    def __init__(self, message: str, *, hint: str = "", key: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """A device, the roles that share it, the bytes they need, the bytes it has (None: unknown), and the items
    that coincide when it is fullest."""

    device: str
    roles: tuple[str, ...]
    num_bytes: int
    available_bytes: int | None
    items: tuple[MemoryItem, ...]

    @property
    def fits(self) -> bool | None:
        return None if self.available_bytes is None else self.num_bytes <= self.available_bytes


def estimate_or_reason(profile: Profile, plan: JobPlan, available_bytes: int | None) -> MemoryEstimate | str:
    """The estimate, or the reason why there is none: the model's shape is not known here."""
    try:
        return estimate_memory(profile, plan, shape_of(profile.model.path), available_bytes)
    except ShapeUnknown as reason:
        return str(reason)


def device_needs(estimate: MemoryEstimate) -> list[DeviceNeed]:
    """One need per kind of GPU: the trainer's and the rollout's, or the one they share. On CPUs: one for this
    machine."""
    plan, of, every = estimate.plan, estimate.of, tuple(role.role for role in estimate.plan.roles)
    device, available = GPU, estimate.available_bytes
    if plan.device == "cpu":
        device = MACHINE
        on_host = ([*of(role, "device"), *of(role, "host")] for role in every)
        machine = [peak(items, lambda item: item.total_bytes) for items in on_host]
        items = tuple(item for _, items in machine for item in items)
        num_bytes = sum(total for total, _ in machine) + estimate.store_bytes
        needs = {every: (num_bytes, (*items, _store(estimate)))}
    else:
        needs = {(role,): peak(of(role, "device")) for role in every}
    if plan.device == "cuda" and plan.shares_gpus:
        guest = ROLLOUT if plan.colocate else LENT
        (training, ranks), (generating, workers) = needs.pop((TRAINER,)), needs.pop((guest,))
        together = training + generating
        if estimate.engine is not None:
            # The engine frees its memory while the trainer trains. A rank keeps its weights and moments.
            together = max(training, estimate.always_bytes(TRAINER) + generating)
        needs = {(TRAINER, guest): (together, ranks + workers), **needs}
    return [DeviceNeed(device, roles, size, available, items) for roles, (size, items) in needs.items()]


def node_needs(estimate: MemoryEstimate, there: ClusterResources) -> list[DeviceNeed]:
    """One need for each kind of node, those with most processes first. Empty on CPUs, and while there is no
    room for the job."""
    plan, memory = estimate.plan, {node.key: node.memory_bytes for node in there.nodes}
    if plan.device == "cpu" or isinstance(placed := assigned(plan, there), Unplaced):
        return []
    on: dict[str, Counter[str]] = {node: Counter() for nodes in placed.values() for node in nodes}
    for group, nodes in placed.items():
        both = {COLOCATED: (TRAINER, ROLLOUT), TRAINER: (TRAINER, LENT) if plan.lend else (TRAINER,)}
        for role in both.get(group, (group,)):
            for node in nodes:
                on[node][role] += plan.role(role).workers // len(nodes)
    first = placed[COLOCATED if plan.colocate else TRAINER][0]
    store = _store(estimate)
    needs = []
    for node, processes in on.items():
        items = [store] if node == first or processes[ROLLOUT] else []
        if estimate.is_sent_by_rows and processes[TRAINER] and not processes[ROLLOUT]:
            share = ceil(store.num_bytes * processes[TRAINER] / plan.role(TRAINER).workers)
            items = [replace(store, num_bytes=share, how=f"{store.how}: the share of this node's ranks")]
        for item in estimate.items:
            is_of_rank_zero = item.role == TRAINER and item.processes == 1
            num_here = int(node == first) if is_of_rank_zero else min(item.processes, processes[item.role])
            if item.kind == "host" and num_here:
                items.append(replace(item, processes=num_here))
        num_bytes, at_peak = peak(items, lambda item: item.total_bytes)
        roles = tuple(f"{number} {role}" for role, number in processes.items())
        needs.append(DeviceNeed(NODE, roles, num_bytes, memory[node], at_peak))
    return list(dict.fromkeys(needs))


def _store(estimate: MemoryEstimate) -> MemoryItem:
    how = "two versions of the weights, and payloads in flight"
    return MemoryItem(NODE, 1, "host", "always", STORE, estimate.store_bytes, how)


def refusal_of(estimate: MemoryEstimate, there: ClusterResources) -> DoesNotFit | None:
    """Why the job is refused on this machine or cluster; None if it fits, by the estimate."""
    needs = [*device_needs(estimate), *node_needs(estimate, there)]
    checks = estimate.profile.placement.check_memory
    return cannot_fit(estimate) or (shortage(needs) if checks else None)


def shortage(needs: Iterable[DeviceNeed]) -> DoesNotFit | None:
    """The refusal of a job whose peak is larger than a device, by the estimate. None if all fit."""
    for need in needs:
        if need.available_bytes is not None and not need.fits:
            verb = "needs" if len(need.roles) == 1 else "need"
            has = f"a {need.device}'s {need.available_bytes / GIB:.1f} GiB"
            message = (
                f"{' and '.join(need.roles)} {verb} about {need.num_bytes / GIB:.1f} GiB of {has}, by an "
                "estimate (to start it all the same: --set placement.check_memory=false)"
            )
            other = f"a smaller model, or a {need.device} with more memory"
            return DoesNotFit(message, hint=SMALLER if need.device == GPU else other)
    return None


def cannot_fit(estimate: MemoryEstimate) -> DoesNotFit | None:
    """The refusal of a run that certainly cannot work: a GPU too small for what one process always holds on
    it. None if all fit.

    That is a rank's share of weights and moments, or a rollout worker's weights (its cache may be smaller
    than its slots want).
    """
    plan, available, engine = estimate.plan, estimate.available_bytes, estimate.engine
    if plan.device == "cpu" or available is None:
        return None
    state = estimate.always_bytes(TRAINER)
    weights = 0 if plan.servers else estimate.rollout_weights.num_bytes
    ranks = -(-state * plan.trainer_workers // available)
    what, num_bytes, key, value = "a rollout worker's weights", weights, "", ""
    has = f"which has {available / GIB:.1f} GiB"
    if state > available:
        what, num_bytes = "a trainer rank's weights and moments", state
        if ranks < plan.gpus and not plan.colocate:
            key, value = "placement.trainer_workers", str(ranks)
    elif weights > available:
        if estimate.profile.model.dtype == "float32" and weights <= 2 * available:
            key, value = "model.dtype", "bfloat16"
    elif (
        engine is not None
        and engine.cache_bytes is None
        and engine.share * available < weights <= engine.default_share * available
    ):
        share = f"rollout.gpu_memory_utilization = {engine.share:g}"
        has = f"and {share} gives {engine.name} {engine.share * available / GIB:.1f} GiB of it"
        key, value = "rollout.gpu_memory_utilization", str(engine.default_share)
    else:
        return None
    why = f"{what} take {num_bytes / GIB:.1f} GiB of a GPU, {has}: this cannot run"
    return DoesNotFit(why, hint=f"--set {key}={value}" if key else SMALLER, key=key)


def cache_warnings(estimate: MemoryEstimate) -> list[str]:
    """A warning if the KV cache is too small for all slots. The transformers engine gives it half of the
    memory free at its start, vLLM what its share leaves; both evict responses when it is full."""
    plan, rollout, engine = estimate.plan, estimate.profile.rollout, estimate.engine
    if estimate.available_bytes is None or plan.servers:
        return []
    needed = kv_cache_bytes(estimate.profile, estimate.shape) // max(plan.gpus_per_rollout_worker, 1)
    caches = (item for item in estimate.of(ROLLOUT, "device") if item.what in (CACHE, SHARED_CACHE))
    room = sum(item.num_bytes for item in caches)
    if needed <= room:
        return []
    leaves, then = "the engine takes at most half of what is free", "evicted and prefilled again"
    if engine is not None:
        leaves, then = f"{engine.name}'s share of the GPU leaves less", "preempted and computed again"
    slots = room * rollout.slots // needed
    way_out = f"rollout.slots = {slots} fits" if slots >= rollout.n else "fewer slots alone do not help"
    return [
        f"a KV cache for {rollout.slots} slots at full length is {needed / GIB:.1f} GiB, and {leaves} "
        f"({room / GIB:.1f} GiB): long responses may be {then} ({way_out})"
    ]


def transfer_warnings(estimate: MemoryEstimate) -> list[str]:
    """A warning if a version is too large for a node to have it within `weights.timeout_s`."""
    weights, num_bytes = estimate.profile.weights, published_bytes(estimate.profile, estimate.shape)
    expected_s = num_bytes / FETCHED_BYTES_PER_S
    if weights.transport in DIRECT_TRANSPORTS or expected_s <= weights.timeout_s:
        return []
    return [
        f"a version has {num_bytes / GIB:.0f} GiB, and a node must have it within weights.timeout_s = "
        f"{weights.timeout_s:g} s: one thread, which does about {FETCHED_BYTES_PER_S / 1e9:g} GB/s, fetches, "
        f"checks and copies it, and a slow link takes longer (--set weights.timeout_s={ceil(2 * expected_s)})"
    ]


def known_memory_bytes(device: str) -> int | None:
    """This machine's memory, or that of its smallest GPU; None if unknown."""
    if device == "cpu":
        return host_memory_bytes()
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes_mib = (int(line) for line in done.stdout.splitlines() if line.strip().isdigit())
    return min((mib * 2**20 for mib in sizes_mib), default=None)
