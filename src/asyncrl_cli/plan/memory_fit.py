"""Compares a memory estimate with what there is: per GPU if its memory is known; on CPUs, all processes with
the machine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.models.shape import ShapeUnknown, shape_of
from asyncrl_cli.plan.cluster import host_memory_bytes
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan
from asyncrl_cli.plan.memory import SHARED_CACHE, MemoryEstimate, estimate_memory, kv_cache_bytes
from asyncrl_cli.profile.schema import Profile

GIB = 2**30
SMALLER = "a smaller model, more GPUs or larger ones"
GPU, MACHINE = "GPU", "machine"
"""Names of devices. On CPUs all processes share the machine's memory."""
PROBE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNeed:
    """A device, the roles that share it, the bytes they need, and the bytes it has (None: unknown)."""

    device: str
    roles: tuple[str, ...]
    num_bytes: int
    available_bytes: int | None

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
    plan = estimate.plan
    every = tuple(role.role for role in plan.roles)
    if plan.device == "cpu":
        needs = {every: sum(item.total_bytes for role in every for item in estimate.at_peak(role))}
    else:
        peaks = {role: estimate.peak_bytes(role, "device") for role in every}
        needs = (
            {every: _shared_gpu(estimate, peaks)}
            if plan.colocate
            else {(role,): peaks[role] for role in every}
        )
    device = MACHINE if plan.device == "cpu" else GPU
    return [
        DeviceNeed(device=device, roles=roles, num_bytes=num_bytes, available_bytes=estimate.available_bytes)
        for roles, num_bytes in needs.items()
    ]


def _shared_gpu(estimate: MemoryEstimate, peaks: dict[str, int]) -> int:
    if estimate.engine is None:
        return sum(peaks.values())
    # The engine frees its GPU memory while the trainer trains; a rank always keeps its weights and moments.
    return max(peaks[TRAINER], estimate.always_bytes(TRAINER) + peaks[ROLLOUT])


def shortage(needs: Iterable[DeviceNeed]) -> PreflightError | None:
    """The refusal of a job whose peak is larger than a device, by the estimate: a run would start and may
    fail. None if all fit."""
    for need in needs:
        if need.available_bytes is not None and not need.fits:
            needed = f"{'needs' if len(need.roles) == 1 else 'need'} about {need.num_bytes / GIB:.1f} GiB"
            return PreflightError(
                f"{' and '.join(need.roles)} {needed} of a {need.device}'s {need.available_bytes / GIB:.1f} "
                "GiB, by an estimate: "
                "a run would start and may fail",
                hint=SMALLER
                if need.device == GPU
                else f"a smaller model, or a {need.device} with more memory",
            )
    return None


def cannot_fit(estimate: MemoryEstimate) -> PreflightError | None:
    """The refusal of a run that certainly cannot work: a GPU too small for what one process always holds on
    it. None if all fit.

    That is a rank's share of weights and moments, or a rollout worker's weights (its cache may be smaller
    than its slots want).
    """
    plan, available_bytes, engine = estimate.plan, estimate.available_bytes, estimate.engine
    if plan.device == "cpu" or available_bytes is None:
        return None
    moments = estimate.always_bytes(TRAINER)
    if moments > available_bytes:
        ranks = -(-moments * plan.role(TRAINER).workers // available_bytes)
        fewer = (
            (f"--set placement.trainer_workers={ranks}")
            if ranks < plan.gpus and not plan.colocate
            else SMALLER
        )
        return _too_small(
            "a trainer rank's weights and moments",
            moments,
            f"which has {available_bytes / GIB:.1f} GiB",
            fewer,
        )
    weights = sum(item.num_bytes for item in estimate.of(ROLLOUT, "device") if item.what == "weights")
    if weights > available_bytes:
        halved = estimate.profile.model.dtype == "float32" and weights <= 2 * available_bytes
        hint = "--set model.dtype=bfloat16" if halved else SMALLER
        return _too_small(
            "a rollout worker's weights", weights, f"which has {available_bytes / GIB:.1f} GiB", hint
        )
    if engine is None or engine.cache_bytes is not None:
        return None
    given = engine.share * available_bytes
    if not given < weights <= engine.default_share * available_bytes:
        return None
    share = (
        f"and rollout.gpu_memory_utilization = {engine.share:g} gives {engine.name} {given / GIB:.1f} "
        "GiB of it"
    )
    return _too_small(
        "a rollout worker's weights",
        weights,
        share,
        f"--set rollout.gpu_memory_utilization={engine.default_share}",
    )


def _too_small(what: str, num_bytes: int, but: str, hint: str) -> PreflightError:
    return PreflightError(
        f"{what} take {num_bytes / GIB:.1f} GiB of a GPU, {but}: this cannot run", hint=hint
    )


def known_memory_bytes(device: str) -> int | None:
    """This machine's memory, or that of its smallest GPU; None if unknown."""
    if device == "cpu":
        return host_memory_bytes()
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return min(
        (int(line) * 2**20 for line in done.stdout.splitlines() if line.strip().isdigit()), default=None
    )


def cache_warnings(estimate: MemoryEstimate) -> list[str]:
    """A warning if the KV cache is too small for all slots. The transformers engine gives it half of the
    memory free at its start, vLLM what its share leaves; both evict responses when it is full."""
    plan, rollout = estimate.plan, estimate.profile.rollout
    if plan.device == "cpu" or estimate.available_bytes is None:
        return []
    needed = kv_cache_bytes(estimate.profile, estimate.shape) // max(plan.gpus_per_rollout_worker, 1)
    held = {item.what: item.num_bytes for item in estimate.of(ROLLOUT, "device")}
    if estimate.engine is not None:
        room = held.get("KV cache", 0) + held.get(SHARED_CACHE, 0)
        leaves, then = (
            (f"{estimate.engine.name}'s share of the GPU leaves less"),
            "preempted and computed again",
        )
    else:
        room = held.get("KV cache", 0)
        leaves, then = "the engine takes at most half of what is free", "evicted and prefilled again"
    if needed <= room:
        return []
    slots = room * rollout.slots // needed
    way_out = f"rollout.slots = {slots} fits" if slots >= rollout.n else "fewer slots alone do not help"
    return [
        f"a KV cache for {rollout.slots} slots at full length is {needed / GIB:.1f} GiB, and "
        f"{leaves} ({room / GIB:.1f} GiB): long responses may be {then} ({way_out})"
    ]
