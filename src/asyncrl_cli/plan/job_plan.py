"""A job's plan: its roles, their workers and devices, and the bundles that they reserve. compiling.py makes it from a profile.

    placement group   bundles                                 what runs in a bundle (of `nnodes`: all of a node's share)
    trainer           one per rank: 1 device, c CPUs          that rank
    ref, prox, critic, reward: one per process, likewise      that process of the scorer, if it has resources of its own
    rollout           one per worker: g GPUs, c CPUs          that worker
    colocated         one per place, instead of both          a rank and a worker, in turns

c is `placement.cpus_per_worker`, g is `placement.gpus_per_rollout_worker`. In a colocated bundle the rank and the worker reserve
half of the GPU each, and each computes with all of the bundle's cores while the other one is paused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from asyncrl_cli.plan.cluster import counted
from asyncrl_cli.profile.schema import Place

TRAINER, ROLLOUT, COLOCATED = "trainer", "rollout", "colocated"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Bundle:
    """What one bundle of a placement group reserves on one node."""

    gpus: int = 0
    cpus: int

    def times(self, number: int) -> Bundle:
        return Bundle(gpus=number * self.gpus, cpus=number * self.cpus)

    def __str__(self) -> str:
        return f"{counted(self.gpus, 'GPU')} and {counted(self.cpus, 'CPU')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Which nodes a role may be on: by their labels, and by a strategy. `nodes`: it has one bundle on each of so many nodes, which
    its processes share; 0: a bundle for each process."""

    strategy: str = "pack"
    labels: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 0


ANYWHERE = Spot()


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


def plan_rows(plan: JobPlan) -> list[dict[str, str | int | float]]:
    """One row per role, for `asyncrl plan`: plain values, ready for a table or for JSON."""
    bundles = {role.role: {plan.bundle_of(role, index) for index in range(role.workers)} for role in plan.roles}
    return [asdict(role) | {"bundles": " ".join(map(str, sorted(bundles[role.role])))} for role in plan.roles]


def place_of(plan: JobPlan, name: str, model_dir: Path, version: int = 0) -> Place:
    """What a role's workers need to know of their place. `version`: of the weights in `model_dir`."""
    role, path = plan.role(name), str(model_dir.absolute())
    return Place(model_dir=path, device=plan.device, threads=role.threads, workers=role.workers, version=version)
