"""Compiles a profile into a JobPlan: roles, their workers, devices and bundles. Pure: it reads nothing and starts nothing.

    placement group   bundles                                 what runs in a bundle (of `nnodes`: all of a node's share)
    trainer           one per rank: 1 device, c CPUs          that rank
    ref, prox, critic, reward: one per process, likewise      that process of the scorer, if it has resources of its own
    rollout           one per worker: g GPUs, c CPUs          that worker
    colocated         one per place, instead of both          a rank and a worker, in turns

c is `placement.cpus_per_worker`, g is `placement.gpus_per_rollout_worker`. In a colocated bundle the rank and the worker reserve
half of the GPU each, and each computes with all of the bundle's cores while the other one is paused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import gcd
from pathlib import Path

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.plan.cluster import (
    ClusterResources,
    asked_gpus,
    counted,
    cpu_counts,
    cuda_counts,
    scorer_processes,
    with_logical_gpus,
)
from asyncrl_cli.plan.node_fit import ANYWHERE, COLOCATED, ROLLOUT, TRAINER, Bundle, Spot, check_fit
from asyncrl_cli.profile.arithmetic import tensor_parallel_size
from asyncrl_cli.profile.nodes import shape_of
from asyncrl_cli.profile.schema import Place, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """One role's workers; `JobPlan.bundle_of` says where in the placement group. `threads` are per worker."""

    role: str
    workers: int
    device: str
    gpus_per_worker: float
    cpus_per_worker: int
    threads: int
    placement_group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Everything placement needs. Without GPUs, logical ones included, `gpus_per_rollout_worker` is 0. `engine`: the rollout
    engine's name. `scorers`: the processes of each task that has some of its own. `warnings`: one line each, for people."""

    device: str
    trainer_workers: int
    rollout_workers: int
    gpus_per_rollout_worker: int
    cpus_per_worker: int
    colocate: bool
    engine: str = "transformers"
    scorers: Mapping[str, int] = field(default_factory=dict)
    trainer_spot: Spot = ANYWHERE
    rollout_spot: Spot = ANYWHERE
    disjoint_nodes: bool = False
    autoscaler: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        apart = self._one_device_each if self.gpus_per_rollout_worker and not self.colocate else 0
        return self.rollout_workers * self.gpus_per_rollout_worker + apart

    @property
    def cpus(self) -> int:
        """CPUs of the whole job. Colocated on CPUs, a rank and a worker share their cores."""
        shared = self.colocate and not self.gpus
        return self.cpus_per_worker * (self._one_device_each + (0 if shared else self.rollout_workers))

    @property
    def _one_device_each(self) -> int:
        """Trainer ranks and scorers' processes."""
        return self.trainer_workers + sum(self.scorers.values())

    @property
    def groups(self) -> dict[str, list[Bundle]]:
        """Bundles by placement group: one for each process or, with `Spot.nodes`, one for all processes on a node."""
        if self.colocate:
            return {COLOCATED: self._bundles(COLOCATED, self.trainer_workers)}
        scorers = {task: self._bundles(task, processes) for task, processes in self.scorers.items()}
        rollout = {ROLLOUT: self._bundles(ROLLOUT, self.rollout_workers)}
        return {TRAINER: self._bundles(TRAINER, self.trainer_workers), **scorers, **rollout}

    def _bundles(self, group: str, processes: int) -> list[Bundle]:
        num_bundles = self.spot(group).nodes or processes
        return [self._each(group).times(processes // num_bundles)] * num_bundles

    def _each(self, group: str) -> Bundle:
        """What one process reserves. A colocated rank and worker share theirs."""
        if group == COLOCATED:
            return Bundle(cpus=self.cpus // self.trainer_workers, gpus=self.gpus // self.trainer_workers)
        gpus = self.gpus_per_rollout_worker
        return Bundle(cpus=self.cpus_per_worker, gpus=gpus if group == ROLLOUT else min(gpus, 1))

    def spot(self, group: str) -> Spot:
        """What the trainer's nodes are is true of colocated processes, too, and of others apart, which may be on any of them."""
        if group == ROLLOUT:
            return self.rollout_spot
        return self.trainer_spot if group not in self.scorers else replace(self.trainer_spot, nodes=0, strategy="pack")

    @property
    def bundles(self) -> list[Bundle]:
        return [bundle for group in self.groups.values() for bundle in group]

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        return tuple(self.role(name) for name in (TRAINER, *self.scorers, ROLLOUT))

    def role(self, name: str) -> RolePlan:
        group = COLOCATED if self.colocate else name
        bundle = self._each(group)
        # Where both share cores, the rank reserves them for both.
        shares_cores = self.colocate and not self.gpus and name == ROLLOUT
        return RolePlan(
            role=name,
            workers={TRAINER: self.trainer_workers, **self.scorers, ROLLOUT: self.rollout_workers}[name],
            device=self.device,
            gpus_per_worker=bundle.gpus / 2 if self.colocate else bundle.gpus,
            cpus_per_worker=0 if shares_cores else self.cpus_per_worker,
            threads=bundle.cpus,
            placement_group=group,
        )

    def bundle_of(self, role: RolePlan, index: int) -> int:
        """The index of a worker's bundle."""
        return index * len(self.groups[role.placement_group]) // role.workers

    def __str__(self) -> str:
        scorers = "".join(f"{processes} {task} + " for task, processes in self.scorers.items())
        sides = f"{self.trainer_workers} {TRAINER} + {scorers}{self.rollout_workers} {ROLLOUT} with {self.engine}"
        return f"{sides} ({'colocated' if self.colocate else 'apart'}): {self.gpus} GPUs and {self.cpus} CPUs"


def compile_job(profile: Profile, cluster: ClusterResources) -> JobPlan:
    """The plan of a profile's job. Raises ConfigError if its numbers contradict each other, PreflightError if the cluster is too
    small."""
    device, placement = device_of(profile, cluster), profile.placement
    tensor_parallel_size(profile, device)
    if placement.gpu_bundles and cluster.elastic_cpus and len(cluster.nodes) == 1:
        cluster = with_logical_gpus(cluster, asked_gpus(profile))
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
    return Spot(strategy=strategy, labels=getattr(placement, f"{role}_labels"), nodes=shape.nodes if shape else 0)


def plan_rows(plan: JobPlan) -> list[dict[str, str | int | float]]:
    """One row per role, for `asyncrl plan`: plain values, ready for a table or for JSON."""
    bundles = {role.role: {plan.bundle_of(role, index) for index in range(role.workers)} for role in plan.roles}
    return [asdict(role) | {"bundles": " ".join(map(str, sorted(bundles[role.role])))} for role in plan.roles]


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
    if plan.gpus and placement.ratio != "1:1" and (key := next((key for key, count in counts.items() if count), "")):
        yield f'placement.ratio = "{placement.ratio}" is not used: {key} says who gets what'
    if on_cpus and profile.model.dtype == "bfloat16" and cluster.cpu_bfloat16 is False:
        yield (
            "model.dtype = bfloat16: this CPU has no instructions for it and emulates every matrix product, several times "
            "slower than in float32 (--set model.dtype=float32)"
        )
    if on_cpus and profile.trainer.offload_optimizer:
        yield "trainer.offload_optimizer changes nothing on CPUs: the optimizer's moments are in the host's memory already"
    # On CPUs each of the processes that share a model computes with all of its worker's threads.
    more = rollout.workers * rollout.threads * (tensor_parallel_size(profile, plan.device) - 1) if on_cpus else 0
    if cluster.elastic_cpus and plan.cpus + more > cluster.cpus:
        cores = counted(cluster.cpus, "core")
        yield f"the job's workers compute with {plan.cpus + more} threads on {cores} and slow each other down"
