"""Compiles a profile into a JobPlan: roles, their workers, devices and bundles. Pure: it reads nothing and starts nothing.

    placement group   bundles                                 what runs in a bundle
    trainer           one per rank: 1 device, c CPUs          that rank
    ref               one per process: likewise               that process of the reference, if it has resources of its own
    rollout           one per worker: g GPUs, c CPUs          that worker
    colocated         one per place, instead of both          a rank and a worker, in turns

c is `placement.cpus_per_worker`, g is `placement.gpus_per_rollout_worker`. In a colocated bundle the rank and the worker reserve
half of the GPU each, and each computes with all of the bundle's cores while the other one is paused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from asyncrl_cli.errors import PreflightError
from asyncrl_cli.plan.cluster import ClusterResources, counted, cpu_counts, cuda_counts, ref_processes
from asyncrl_cli.profile.arithmetic import tensor_parallel_size
from asyncrl_cli.profile.schema import Place, Profile

TRAINER, REF, ROLLOUT, COLOCATED = "trainer", "ref", "rollout", "colocated"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Bundle:
    """What one bundle of a placement group reserves on one node."""

    gpus: int = 0
    cpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """One role's workers: worker i is in bundle i of the placement group. `threads` are per worker."""

    role: str
    workers: int
    device: str
    gpus_per_worker: float
    cpus_per_worker: int
    threads: int
    placement_group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Everything placement needs. On CPUs `gpus_per_rollout_worker` is 0. `engine`: the rollout engine's name. `ref_workers`: the
    processes that the reference has of its own. `warnings`: one line each, for people."""

    device: str
    trainer_workers: int
    rollout_workers: int
    gpus_per_rollout_worker: int
    cpus_per_worker: int
    colocate: bool
    engine: str = "transformers"
    ref_workers: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        has_gpus_apart = self.gpus_per_rollout_worker and not self.colocate
        return self.rollout_workers * self.gpus_per_rollout_worker + (
            self.trainer_workers + self.ref_workers if has_gpus_apart else 0
        )

    @property
    def cpus(self) -> int:
        """CPUs of the whole job. Colocated on CPUs, a rank and a worker share their cores."""
        shared = self.colocate and not self.gpus
        return self.cpus_per_worker * (self.trainer_workers + self.ref_workers + (0 if shared else self.rollout_workers))

    @property
    def groups(self) -> dict[str, list[Bundle]]:
        """Bundles by placement group. A colocated bundle has one rank and one worker."""
        ranks, cpus = self.trainer_workers, self.cpus_per_worker
        if self.colocate:
            return {COLOCATED: [Bundle(cpus=self.cpus // ranks, gpus=self.gpus // ranks)] * ranks}
        rank = Bundle(cpus=cpus, gpus=min(self.gpus_per_rollout_worker, 1))
        rollout = Bundle(cpus=cpus, gpus=self.gpus_per_rollout_worker)
        refs = {REF: [rank] * self.ref_workers} if self.ref_workers else {}
        return {TRAINER: [rank] * ranks, **refs, ROLLOUT: [rollout] * self.rollout_workers}

    @property
    def bundles(self) -> list[Bundle]:
        return [bundle for group in self.groups.values() for bundle in group]

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        return tuple(self.role(name) for name in (TRAINER, *((REF,) if self.ref_workers else ()), ROLLOUT))

    def role(self, name: str) -> RolePlan:
        group = COLOCATED if self.colocate else name
        bundle = self.groups[group][0]
        # Where both share cores, the rank reserves them for both.
        shares_cores = self.colocate and not self.gpus and name == ROLLOUT
        return RolePlan(
            role=name,
            workers={TRAINER: self.trainer_workers, REF: self.ref_workers, ROLLOUT: self.rollout_workers}[name],
            device=self.device,
            gpus_per_worker=bundle.gpus / 2 if self.colocate else bundle.gpus,
            cpus_per_worker=0 if shares_cores else self.cpus_per_worker,
            threads=bundle.cpus,
            placement_group=group,
        )

    def __str__(self) -> str:
        refs = f"{self.ref_workers} {REF} + " if self.ref_workers else ""
        sides = f"{self.trainer_workers} {TRAINER} + {refs}{self.rollout_workers} {ROLLOUT} with {self.engine}"
        return f"{sides} ({'colocated' if self.colocate else 'apart'}): {self.gpus} GPUs and {self.cpus} CPUs"


def compile_job(profile: Profile, cluster: ClusterResources) -> JobPlan:
    """The plan of a profile's job. Raises ConfigError if its numbers contradict each other, PreflightError if the cluster is too
    small."""
    device, placement = device_of(profile, cluster), profile.placement
    tensor_parallel_size(profile, device)
    ranks, workers = cuda_counts(profile, cluster) if device == "cuda" else cpu_counts(profile)
    plan = JobPlan(
        device=device,
        trainer_workers=ranks,
        rollout_workers=workers,
        gpus_per_rollout_worker=placement.gpus_per_rollout_worker if device == "cuda" else 0,
        cpus_per_worker=placement.cpus_per_worker,
        colocate=placement.colocate,
        engine=profile.rollout.engine,
        ref_workers=ref_processes(profile, cluster, device),
    )
    check_fit(plan, cluster)
    return replace(plan, warnings=tuple(_warnings(profile, plan, cluster)))


def plan_rows(plan: JobPlan) -> list[dict[str, str | int | float]]:
    """One row per role, for `asyncrl plan`: plain values, ready for a table or for JSON."""
    return [asdict(role) | {"bundles": " ".join(map(str, range(role.workers)))} for role in plan.roles]


def place_of(plan: JobPlan, name: str, model_dir: Path, version: int = 0) -> Place:
    """What a role's workers need to know of their place. `version`: of the weights in `model_dir`."""
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


def fits(bundles: Sequence[Bundle], cluster: ClusterResources) -> bool:
    """True if the bundles can be packed into the cluster's nodes; a local session's CPUs never run out.

    First-fit, largest first: exact for a plan's one or two bundle sizes on equal nodes, a good guess otherwise. Ray's placement
    groups decide in the end, within `placement.timeout_s`.
    """
    free = [[node.gpus, node.cpus] for node in cluster.nodes]
    for bundle in sorted(bundles, reverse=True):
        cpus = 0 if cluster.elastic_cpus else bundle.cpus
        node = next((node for node in free if node[0] >= bundle.gpus and node[1] >= cpus), None)
        if node is None:
            return False
        node[0] -= bundle.gpus
        node[1] -= cpus
    return True


def check_fit(plan: JobPlan, cluster: ClusterResources) -> None:
    """Raises PreflightError with what the plan needs, what the cluster has, and the `--set` that would fit."""
    if not fits(plan.bundles, cluster):
        raise PreflightError(f"the cluster is too small: {asked(plan)}; it has {cluster}", hint=fitting_hint(plan, cluster))


def asked(plan: JobPlan) -> str:
    largest = max(plan.bundles)
    return (
        f"{counted(plan.trainer_workers, 'trainer rank')}"
        f"{f', {plan.ref_workers} of the reference' if plan.ref_workers else ''} and "
        f"{counted(plan.rollout_workers, 'rollout worker')} "
        f"ask for {counted(plan.gpus, 'GPU')} and {counted(plan.cpus, 'CPU')}, "
        f"at most {counted(largest.gpus, 'GPU')} and {counted(largest.cpus, 'CPU')} of one node at a time"
    )


def fitting_hint(plan: JobPlan, cluster: ClusterResources) -> str:
    """The largest smaller job that fits, as `--set`s."""
    for smaller, sets in _smaller_jobs(plan):
        if fits(smaller.bundles, cluster):
            return sets
    if plan.gpus and cluster.cpus:
        return "--set placement.device=cpu"
    return f"the smallest job of this profile needs {2 * plan.cpus_per_worker} CPUs"


def _smaller_jobs(plan: JobPlan) -> Iterator[tuple[JobPlan, str]]:
    """Smaller plans and their `--set`s: first fewer CPUs per worker, then fewer workers, divided between the roles as before."""
    for cpus in range(plan.cpus_per_worker - 1, 0, -1):
        yield replace(plan, cpus_per_worker=cpus), f"--set placement.cpus_per_worker={cpus}"
    if plan.ref_workers:  # how many of each there are is for placement.ratios to say
        return
    total = plan.trainer_workers + plan.rollout_workers
    for workers in range(total - 1, 1, -1):
        ranks = min(max(1, round(workers * plan.trainer_workers / total)), workers - 1)
        rollouts = ranks if plan.colocate else workers - ranks
        for cpus in dict.fromkeys((plan.cpus_per_worker, 1)):
            smaller = replace(plan, trainer_workers=ranks, rollout_workers=rollouts, cpus_per_worker=cpus)
            sets = f"--set placement.trainer_workers={ranks} --set rollout.workers={rollouts}"
            sets += f" --set placement.gpus={smaller.gpus}" if smaller.gpus else ""
            sets += f" --set placement.cpus_per_worker={cpus}" if cpus != plan.cpus_per_worker else ""
            yield smaller, sets
