"""Profile -> JobPlan: roles, their workers, devices and bundles. Pure: asks nobody, starts nothing.

    placement group   bundles                                 who lives in a bundle
    trainer           one per rank: 1 device, c CPUs          that rank
    rollout           one per worker: g GPUs, c CPUs          that worker
    colocated         one per place, instead of both          a rank and a worker, in turns

c is `placement.cpus_per_worker`, g is `placement.gpus_per_rollout_worker`. A colocated bundle has one rank and one worker, which
share its GPU by halves, and each computes with all of its cores, because the other one is paused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl_cli.plan.cluster import ClusterResources, counted
from asyncrl_cli.plan.counts import Counts, cpu_counts, cuda_counts
from asyncrl_cli.plan.packing import Bundle, bundles_of, check_fit
from asyncrl_cli.profile.arithmetic import tensor_parallel_size
from asyncrl_cli.profile.place import Place
from asyncrl_cli.profile.schema import Profile

TRAINER = "trainer"
ROLLOUT = "rollout"
COLOCATED = "colocated"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One placement group. PACK: as few nodes as possible, but no refusal if it takes more."""

    name: str
    bundles: tuple[Bundle, ...]
    strategy: str = "PACK"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """One role's workers. `bundles[i]` is the bundle of worker i in placement group `group`; the rest is per worker."""

    name: str
    group: str
    bundles: tuple[int, ...]
    cpus: int
    gpus: float
    threads: int

    @property
    def workers(self) -> int:
        return len(self.bundles)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Everything placement needs. `engine` is what every rollout worker starts; `warnings` are for people, one line each."""

    device: str
    colocate: bool
    counts: Counts
    groups: tuple[GroupPlan, ...]
    roles: tuple[RolePlan, ...]
    engine: str = "transformers"
    warnings: tuple[str, ...] = ()

    @property
    def cpus(self) -> int:
        return sum(bundle.cpus for group in self.groups for bundle in group.bundles)

    @property
    def gpus(self) -> int:
        return sum(bundle.gpus for group in self.groups for bundle in group.bundles)

    def role(self, name: str) -> RolePlan:
        return next(role for role in self.roles if role.name == name)

    def __str__(self) -> str:
        named = {TRAINER: TRAINER, ROLLOUT: f"{ROLLOUT} with {self.engine}"}
        roles = " + ".join(f"{role.workers} {named[role.name]}" for role in self.roles)
        return f"{roles} ({'colocated' if self.colocate else 'apart'}): {self.gpus} GPUs and {self.cpus} CPUs"


def compile_job(profile: Profile, cluster: ClusterResources) -> JobPlan:
    """Raises ConfigError if the profile's numbers do not go together, PreflightError if the cluster has too little."""
    device = device_of(profile, cluster)
    tensor_parallel_size(profile, device)
    counts = cuda_counts(profile, cluster) if device == "cuda" else cpu_counts(profile)
    check_fit(counts, cluster)
    groups = tuple(GroupPlan(name=name, bundles=bundles) for name, bundles in bundles_of(counts).items())
    roles = tuple(_role(name, counts, groups) for name in (TRAINER, ROLLOUT))
    plan = JobPlan(
        device=device, colocate=counts.colocate, counts=counts, groups=groups, roles=roles, engine=profile.rollout.engine
    )
    return replace(plan, warnings=_warnings(profile, plan, cluster))


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
            "bundles": " ".join(str(index) for index in role.bundles),
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


def _role(name: str, counts: Counts, groups: Sequence[GroupPlan]) -> RolePlan:
    """A role's workers, one in each bundle of the group it lives in."""
    group = next(group for group in groups if group.name in (name, COLOCATED))
    workers = counts.trainer_workers if name == TRAINER else counts.rollout_workers
    bundle = group.bundles[0]
    # What a rank has reserved on shared cores, its worker cannot reserve again.
    shares_cores = counts.colocate and not counts.gpus and name == ROLLOUT
    assert not (counts.colocate and bundle.gpus > 1), "a shared GPU has one rank and one worker"
    return RolePlan(
        name=name,
        group=group.name,
        bundles=tuple(range(workers)),
        cpus=0 if shares_cores else counts.cpus_per_worker,
        gpus=bundle.gpus / 2 if counts.colocate else bundle.gpus,
        threads=bundle.cpus,
    )


def _warnings(profile: Profile, plan: JobPlan, cluster: ClusterResources) -> tuple[str, ...]:
    warnings = []
    if plan.device == "cpu" and profile.placement.gpus is not None:
        warnings.append(f"placement.gpus = {profile.placement.gpus} is not used: the job runs on CPUs")
    if plan.device == "cpu" and profile.model.dtype == "bfloat16" and cluster.cpu_bfloat16 is False:
        warnings.append(
            "model.dtype = bfloat16: this CPU has no instructions for it and emulates every matrix product, several times "
            "slower than in float32 (--set model.dtype=float32)"
        )
    rollout = plan.role(ROLLOUT)
    # On CPUs each of the processes that share a model computes with all of its worker's threads.
    more = rollout.workers * rollout.threads * (tensor_parallel_size(profile, plan.device) - 1) if plan.device == "cpu" else 0
    if cluster.elastic_cpus and plan.cpus + more > cluster.cpus:
        cores = counted(cluster.cpus, "core")
        warnings.append(f"the job's workers compute with {plan.cpus + more} threads on {cores} and slow each other down")
    return tuple(warnings)
