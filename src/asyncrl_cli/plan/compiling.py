"""Compiles a profile into a `JobPlan`. Pure: it reads nothing and starts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from asyncrl_cli.base.errors import ConfigError, counted
from asyncrl_cli.plan.cluster import (
    ClusterResources,
    asked_gpus,
    cpu_counts,
    cuda_counts,
    scorer_processes,
)
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan, Spot
from asyncrl_cli.plan.node_fit import check_fit
from asyncrl_cli.profile.arithmetic import groups_ahead, tensor_parallel_size, window_groups_of
from asyncrl_cli.profile.nodes import shape_of
from asyncrl_cli.profile.schema import Profile, RolloutSection

_MOST_ROUNDS = 4
"""A warning if a mini batch has more than this many times the groups that are generated at once."""


def compile_job(profile: Profile, cluster: ClusterResources) -> JobPlan:
    """The plan of a profile's job. Raises ConfigError if its numbers contradict each other, PreflightError if
    the cluster is too small."""
    device, placement = device_of(profile, cluster), profile.placement
    tensor_parallel_size(profile, device)
    if placement.gpu_bundles and cluster.elastic_cpus and len(cluster.nodes) == 1:
        (here,) = cluster.nodes  # this machine, whose GPUs are logical
        cluster = replace(cluster, nodes=(replace(here, gpus=max(here.gpus, asked_gpus(profile))),))
    claims = "cuda" if placement.gpu_bundles else device
    ranks, workers = cuda_counts(profile, cluster) if claims == "cuda" else cpu_counts(profile)
    if ranks % (sharing := profile.trainer.sequence_parallel_size):
        raise ConfigError(
            f"trainer.sequence_parallel_size = {sharing} does not divide {counted(ranks, 'trainer rank')}",
            hint=f"--set trainer.sequence_parallel_size={gcd(ranks, sharing)}",
        )
    plan = JobPlan(
        device=device,
        trainer_workers=ranks,
        rollout_workers=workers,
        gpus_per_rollout_worker=placement.gpus_per_rollout_worker if claims == "cuda" else 0,
        cpus_per_worker=placement.cpus_per_worker,
        colocate=placement.colocate,
        engine=profile.rollout.engine,
        scorers=scorer_processes(profile, cluster, claims),
        trainer_spot=_spot(profile, TRAINER, claims),
        rollout_spot=_spot(profile, ROLLOUT, claims),
        disjoint_nodes=placement.disjoint_nodes,
        autoscaler=placement.autoscaler,
    )
    check_fit(plan, cluster)
    return replace(plan, warnings=tuple(_warnings(profile, plan, cluster)))


def _spot(profile: Profile, role: str, claims: str) -> Spot:
    shape = shape_of(getattr(profile, role)) if claims == "cuda" else None
    placement = profile.placement
    strategy = "strict_spread" if shape else getattr(placement, f"{role}_strategy")
    return Spot(
        strategy=strategy, labels=getattr(placement, f"{role}_labels"), nodes=shape.nodes if shape else 0
    )


def device_of(profile: Profile, cluster: ClusterResources) -> str:
    """`cpu` or `cuda`, for all roles."""
    if profile.placement.device != "auto":
        return profile.placement.device
    return "cuda" if cluster.gpus or profile.placement.gpus is not None else "cpu"


def _warnings(profile: Profile, plan: JobPlan, cluster: ClusterResources) -> Iterator[str]:
    on_cpus, rollout = plan.device == "cpu", plan.role(ROLLOUT)
    yield from _slots_warnings(profile, rollout.workers)
    if not plan.gpus and profile.placement.gpus is not None:
        yield f"placement.gpus = {profile.placement.gpus} is not used: the job runs on CPUs"
    placement = profile.placement
    counts = {
        "placement.colocate": placement.colocate,
        "placement.trainer_workers": placement.trainer_workers,
        "rollout.workers": profile.rollout.workers,
        "trainer.n_gpus_per_node": profile.trainer.n_gpus_per_node,
        "rollout.n_gpus_per_node": profile.rollout.n_gpus_per_node,
    }
    if (
        plan.gpus
        and placement.ratio != "1:1"
        and (key := next((key for key, count in counts.items() if count), ""))
    ):
        yield f'placement.ratio = "{placement.ratio}" is not used: {key} decides instead'
    if on_cpus and profile.model.dtype == "bfloat16" and cluster.cpu_bfloat16 is False:
        yield (
            "model.dtype = bfloat16: this CPU has no instructions for it and emulates every matrix product, "
            "several times "
            "slower than in float32 (--set model.dtype=float32)"
        )
    if on_cpus and profile.trainer.offload_optimizer:
        yield (
            "trainer.offload_optimizer changes nothing on CPUs: the optimizer's moments are in the host's "
            "memory already"
        )
    # On CPUs each of the processes that share a model computes with all of its worker's threads.
    more = (
        rollout.workers * rollout.threads * (tensor_parallel_size(profile, plan.device) - 1) if on_cpus else 0
    )
    if cluster.elastic_cpus and plan.cpus + more > cluster.cpus:
        cores = counted(cluster.cpus, "core")
        yield f"the job's workers compute with {plan.cpus + more} threads on {cores} and slow each other down"


def _slots_warnings(profile: Profile, workers: int) -> Iterator[str]:
    """SkyRL asks for at least as many groups at once as a mini batch has, and for no more than its capacity
    admits. Fewer are fine here, because responses of the next groups fill the slots; very few are not. The
    default is not compared with small runs."""
    slots, n, mini_batch = profile.rollout.slots, profile.rollout.n, profile.trainer.ppo_mini_batch_size
    at_once, most = max(1, workers * slots // n), window_groups_of(profile) + groups_ahead(profile)
    there_are = f"rollout.slots = {slots} on {counted(workers, 'worker')}"
    if at_once * _MOST_ROUNDS < mini_batch:
        yield (
            f"{there_are}: {counted(at_once, 'group')} of rollout.n = {n} at a time, but a mini batch has "
            f"trainer.ppo_mini_batch_size = {mini_batch}: the trainer waits for about "
            f"{-(-mini_batch // at_once)} groups one after "
            "the other, each as long as its longest response (--set "
            f"rollout.slots={-(-mini_batch * n // workers)} has room for "
            "all)"
        )
    if at_once > most and slots > RolloutSection.model_fields["slots"].default:
        yield (
            f"{there_are}: at most {counted(most, 'group')} of rollout.n = {n}, {most * n} responses, are "
            "ever under way "
            f"((1 + eta) * W), so {workers * slots - most * n} slots only take memory, except in evals "
            f"(--set rollout.slots={-(-most * n // workers)})"
        )
