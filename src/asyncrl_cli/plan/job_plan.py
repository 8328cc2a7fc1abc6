"""Profile -> JobPlan: roles, their workers, devices and bundles. Pure: asks nobody, starts nothing.

    placement group   bundles                                 who lives in a bundle
    trainer           one per rank: 1 device, c CPUs          that rank
    rollout           one per worker: g GPUs, c CPUs          that worker
    colocated         one per place, instead of both          a rank and a worker, in turns

c is `placement.cpus_per_worker`, g is `placement.gpus_per_rollout_worker`. A colocated bundle has one rank and one worker, which
share its GPU by halves, and each computes with all of its cores, because the other one is paused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl_cli.plan.cluster import ClusterResources, counted
from asyncrl_cli.plan.counts import COLOCATED, ROLLOUT, TRAINER, Counts, cpu_counts, cuda_counts
from asyncrl_cli.plan.packing import check_fit
from asyncrl_cli.profile.arithmetic import tensor_parallel_size
from asyncrl_cli.profile.place import Place
from asyncrl_cli.profile.schema import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """One role's workers, worker i in bundle i of placement group `group`; the rest is per worker."""

    name: str
    group: str
    workers: int
    cpus: int
    gpus: float
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Everything placement needs. `engine` is what every rollout worker starts; `warnings` are for people, one line each."""

    device: str
    counts: Counts
    engine: str = "transformers"
    warnings: tuple[str, ...] = ()

    @property
    def colocate(self) -> bool:
        return self.counts.colocate

    @property
    def cpus(self) -> int:
        return self.counts.cpus

    @property
    def gpus(self) -> int:
        return self.counts.gpus

    @property
    def roles(self) -> tuple[RolePlan, RolePlan]:
        return self.role(TRAINER), self.role(ROLLOUT)

    def role(self, name: str) -> RolePlan:
        counts, group = self.counts, COLOCATED if self.colocate else name
        bundle = counts.groups[group][0]
        # What a rank has reserved on shared cores, its worker cannot reserve again.
        shares_cores = counts.colocate and not counts.gpus and name == ROLLOUT
        return RolePlan(
            name=name,
            group=group,
            workers=counts.trainer_workers if name == TRAINER else counts.rollout_workers,
            cpus=0 if shares_cores else counts.cpus_per_worker,
            gpus=bundle.gpus / 2 if counts.colocate else bundle.gpus,
            threads=bundle.cpus,
        )

    def __str__(self) -> str:
        sides = f"{self.counts.trainer_workers} {TRAINER} + {self.counts.rollout_workers} {ROLLOUT} with {self.engine}"
        return f"{sides} ({'colocated' if self.colocate else 'apart'}): {self.gpus} GPUs and {self.cpus} CPUs"


def compile_job(profile: Profile, cluster: ClusterResources) -> JobPlan:
    """Raises ConfigError if the profile's numbers do not go together, PreflightError if the cluster has too little."""
    device = device_of(profile, cluster)
    tensor_parallel_size(profile, device)
    counts = cuda_counts(profile, cluster) if device == "cuda" else cpu_counts(profile)
    check_fit(counts, cluster)
    plan = JobPlan(device=device, counts=counts, engine=profile.rollout.engine)
    return replace(plan, warnings=tuple(_warnings(profile, plan, cluster)))


def plan_rows(plan: JobPlan) -> list[dict[str, str | int | float]]:
    """One row per role, for `asyncrl plan`: plain values, ready for a table or for JSON."""
    return [
        {
            "role": role.name,
            "workers": role.workers,
            "device": plan.device,
            "gpus_per_worker": role.gpus,
            "cpus_per_worker": role.cpus,
            "threads": role.threads,
            "placement_group": role.group,
            "bundles": " ".join(map(str, range(role.workers))),
        }
        for role in plan.roles
    ]


def place_of(plan: JobPlan, name: str, model_dir: Path, version: int = 0) -> Place:
    """Where each worker of a role computes. `version`: of the weights in `model_dir`."""
    role, path = plan.role(name), str(model_dir.absolute())
    return Place(model_dir=path, device=plan.device, threads=role.threads, workers=role.workers, version=version)


def device_of(profile: Profile, cluster: ClusterResources) -> str:
    """`cpu` or `cuda`, for all roles."""
    if profile.placement.device != "auto":
        return profile.placement.device
    return "cuda" if cluster.gpus or profile.placement.gpus is not None else "cpu"


def _warnings(profile: Profile, plan: JobPlan, cluster: ClusterResources) -> Iterator[str]:
    on_cpus, rollout = plan.device == "cpu", plan.role(ROLLOUT)
    if on_cpus and profile.placement.gpus is not None:
        yield f"placement.gpus = {profile.placement.gpus} is not used: the job runs on CPUs"
    if on_cpus and profile.model.dtype == "bfloat16" and cluster.cpu_bfloat16 is False:
        yield (
            "model.dtype = bfloat16: this CPU has no instructions for it and emulates every matrix product, several times "
            "slower than in float32 (--set model.dtype=float32)"
        )
    # On CPUs each of the processes that share a model computes with all of its worker's threads.
    more = rollout.workers * rollout.threads * (tensor_parallel_size(profile, plan.device) - 1) if on_cpus else 0
    if cluster.elastic_cpus and plan.cpus + more > cluster.cpus:
        cores = counted(cluster.cpus, "core")
        yield f"the job's workers compute with {plan.cpus + more} threads on {cores} and slow each other down"
