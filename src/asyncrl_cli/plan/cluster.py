"""The nodes of a cluster with their CPUs and GPUs, the nodes on which the bundles of a plan fit, and what to
change where there is no room. Those of this machine are found without Ray or torch.

    strategy        the bundles of a placement group are
    pack            on few nodes
    spread          on many nodes
    strict_pack     all on one node
    strict_spread   each on a different node

First fit: exact for bundles of one size on equal nodes, a good guess otherwise. Ray's placement groups decide
in the end, within `placement.timeout_s`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl_cli.base.errors import PreflightError, counted
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, Bundle, JobPlan
from asyncrl_cli.plan.processor import has_bfloat16_instructions
from asyncrl_cli.profile.schema import Profile

LOOPBACK = "127.0.0.1"
"""The address of a local session's node."""
MOST_NODES_SHOWN = 16
MOST_SHAPES_TRIED = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """One node. On a local session `cpus` are cores; Ray gets as many logical CPUs as the plan needs. `id`:
    Ray's, unique. `memory_bytes`: of the host, None if unknown."""

    name: str
    cpus: int
    gpus: int = 0
    id: str = ""
    memory_bytes: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.id or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResources:
    """All nodes a job may use. `elastic_cpus`: CPUs are logical and grow with the plan (a local session).

    `cpu_bfloat16`: whether the CPUs have instructions for products in bfloat16; None if unknown.
    """

    nodes: tuple[NodeResources, ...]
    elastic_cpus: bool = False
    cpu_bfloat16: bool | None = None

    @property
    def cpus(self) -> int:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    def __str__(self) -> str:
        devices = f"{counted(self.gpus, 'GPU')} and {counted(self.cpus, 'CPU')}"
        return f"{devices} on {counted(len(self.nodes), 'node')}"


def local_cluster() -> ClusterResources:
    """This machine: its cores, and the NVIDIA devices that `CUDA_VISIBLE_DEVICES` leaves visible."""
    # CUDA_VISIBLE_DEVICES hides devices; an empty entry or -1 is none.
    gpus = len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        gpus = min(gpus, sum(entry.strip() not in ("", "-1") for entry in visible.split(",")))
    node = NodeResources(name="local", cpus=usable_cores(), gpus=gpus, memory_bytes=host_memory_bytes())
    return ClusterResources(nodes=(node,), elastic_cpus=True, cpu_bfloat16=has_bfloat16_instructions())


def planned_nodes(
    profile: Profile, number: int, gpus: int, *, least_cpus: int = 0, memory_bytes: int | None = None
) -> Iterator[NodeResources]:
    """Hypothetical nodes with enough CPUs for two processes per GPU: a colocated rank and worker share one
    GPU."""
    cpus = max(2 * profile.placement.cpus_per_worker * gpus, least_cpus)
    for index in range(number):
        yield NodeResources(name=f"node {index + 1}", cpus=cpus, gpus=gpus, memory_bytes=memory_bytes)


def host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_cores() -> int:
    """Cores this process may run on: fewer than the machine's under taskset or a cpuset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Unplaced(NamedTuple):
    """The first bundle that finds no node."""

    group: str
    position: int
    bundles: Sequence[Bundle]

    def __str__(self) -> str:
        which = f"bundle {self.position + 1} of {len(self.bundles)} of the {self.group}"
        return f"{which} ({self.bundles[self.position]}) finds no node"


def assigned(plan: JobPlan, cluster: ClusterResources) -> dict[str, list[str]] | Unplaced:
    """The key of each bundle's node, by placement group. A local session's CPUs never run out."""
    sizes = sorted(plan.groups, key=lambda name: max(plan.groups[name]), reverse=True)
    smallest_first = sorted(cluster.nodes, key=lambda node: (node.gpus, node.cpus))
    attempts = [
        _first_fit(plan, cluster, nodes, names)
        for nodes in (cluster.nodes, smallest_first)
        for names in (sizes, sizes[::-1])
    ]
    return next((found for found in attempts if not isinstance(found, Unplaced)), attempts[0])


def _first_fit(
    plan: JobPlan, cluster: ClusterResources, nodes: Sequence[NodeResources], names: Sequence[str]
) -> dict[str, list[str]] | Unplaced:
    free = [Bundle(gpus=node.gpus, cpus=node.cpus) for node in nodes]
    on: dict[str, list[int]] = {}
    for name in names:
        spot, bundles = plan.spot(name), plan.groups[name]
        others = [other for other in on if plan.disjoint_nodes and (other == ROLLOUT) != (name == ROLLOUT)]
        taken = {node for other in others for node in on[other]}
        allowed = [i for i, node in enumerate(nodes) if i not in taken and matches(node.labels, spot.labels)]
        together = len(bundles) if spot.strategy == "strict_pack" else 1
        chosen = on[name] = []
        while len(chosen) < len(bundles):
            wanted = bundles[0].times(together)
            wanted = replace(wanted, cpus=0) if cluster.elastic_cpus else wanted
            order = sorted(allowed, key=chosen.count) if spot.strategy == "spread" else allowed
            open_nodes = (i for i in order if not (spot.strategy == "strict_spread" and i in chosen))
            fits = (i for i in open_nodes if free[i].gpus >= wanted.gpus and free[i].cpus >= wanted.cpus)
            if (node := next(fits, None)) is None:
                return Unplaced(name, len(chosen), bundles)
            free[node] = Bundle(gpus=free[node].gpus - wanted.gpus, cpus=free[node].cpus - wanted.cpus)
            chosen += [node] * together
    return {name: [nodes[i].key for i in on[name]] for name in plan.groups}


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """By Ray's rules: a value, `in(a, b)`, and `!` before either for none of them."""
    for key, wanted in selector.items():
        plain = wanted.removeprefix("!")
        values = [one.strip() for one in plain[3:-1].split(",")] if plain.startswith("in(") else [plain]
        if (labels.get(key) in values) == wanted.startswith("!"):
            return False
    return True


def check_fit(plan: JobPlan, cluster: ClusterResources) -> None:
    """Raises PreflightError if the plan does not fit, with what it needs, what the cluster has, and the
    `--set` that would fit. Checks nothing if there is an autoscaler, which may add what is missing."""
    if not plan.autoscaler and isinstance(found := assigned(plan, cluster), Unplaced):
        lines = "" if cluster.elastic_cpus else f"; {found}:{node_lines(cluster, cluster)}"
        why = f"the cluster is too small: {asked(plan)}; it has {cluster}{lines}"
        raise PreflightError(why, hint=fitting_hint(plan, cluster))


def node_lines(cluster: ClusterResources, free: ClusterResources) -> str:
    """What each node has free, a line each."""
    left = {node.key: node for node in free.nodes}
    lines = []
    for node in cluster.nodes[:MOST_NODES_SHOWN]:
        now = left.get(node.key, replace(node, gpus=0, cpus=0))
        labels = [f"{key}={value}" for key, value in node.labels.items() if not key.startswith("ray.io/")]
        shown = f", with {' '.join(labels)}" if labels else ""
        gpus, cpus = counted(node.gpus, "GPU"), counted(node.cpus, "CPU")
        lines.append(f"\n  {node.name}: free {now.gpus} of {gpus}, {now.cpus} of {cpus}{shown}")
    more = len(cluster.nodes) - MOST_NODES_SHOWN
    return "".join(lines) + (f"\n  and {counted(more, 'node')} more" if more > 0 else "")


def asked(plan: JobPlan) -> str:
    scorers = "".join(f", {processes} of {task}" for task, processes in plan.scorers.items())
    return (
        f"{counted(plan.trainer_workers, 'trainer rank')}{scorers} and "
        f"{counted(plan.rollout_workers, 'rollout worker')} ask for {counted(plan.gpus, 'GPU')} and "
        f"{counted(plan.cpus, 'CPU')}, at most {max(plan.bundles)} of one node at a time"
    )


def fitting_hint(plan: JobPlan, cluster: ClusterResources) -> str:
    """The `--set`s of the largest smaller job that fits: first the same job without the rules about its
    nodes, then smaller ones, with the rules and without."""
    looser = list(_looser(plan))
    loosest, rules = looser[-1] if looser else (plan, "")
    bare = ((smaller, f"{rules} {sets}") for smaller, sets in _with_less(loosest)) if looser else ()
    for smaller, sets in chain(looser, _with_less(plan), bare):
        if not isinstance(assigned(smaller, cluster), Unplaced):
            return sets
    if plan.gpus and cluster.cpus:
        return "--set placement.device=cpu" if plan.device == "cuda" else "--set placement.gpu_bundles=false"
    return f"the smallest job of this profile needs {2 * plan.cpus_per_worker} CPUs"


def _looser(plan: JobPlan) -> Iterator[tuple[JobPlan, str]]:
    """The same job with fewer rules about its nodes: without each rule in turn, then without any."""
    rules: list[tuple[Callable[[JobPlan], JobPlan], str]] = []
    if plan.disjoint_nodes:
        rules.append((partial(replace, disjoint_nodes=False), "--set placement.disjoint_nodes=false"))
    for role in (TRAINER, ROLLOUT):
        spot = plan.spot(role)
        if spot.strategy.startswith("strict") and not spot.nodes:
            looser = spot.strategy.removeprefix("strict_")
            rule = partial(_with_spot, role=role, strategy=looser)
            rules.append((rule, f"--set placement.{role}_strategy={looser}"))
        if spot.labels:
            rule = partial(_with_spot, role=role, labels={})
            rules.append((rule, f"--set placement.{role}_labels={{}}"))
    yield from ((loosened(plan), sets) for loosened, sets in rules)
    if len(rules) > 1:
        loosest = reduce(lambda smaller, rule: rule[0](smaller), rules, plan)
        yield loosest, " ".join(sets for _, sets in rules)


def _with_spot(plan: JobPlan, *, role: str, **changes: Any) -> JobPlan:
    spot: dict[str, Any] = {f"{role}_spot": replace(plan.spot(role), **changes)}
    return replace(plan, **spot)


def _with_less(plan: JobPlan) -> Iterator[tuple[JobPlan, str]]:
    """Fewer CPUs per worker, then fewer workers, divided between the roles as before."""
    for cpus in range(plan.cpus_per_worker - 1, 0, -1):
        yield replace(plan, cpus_per_worker=cpus), f"--set placement.cpus_per_worker={cpus}"
    if plan.scorers:  # placement.ratios decides how many of each there are
        return
    if plan.trainer_spot.nodes or plan.rollout_spot.nodes:
        yield from _on_fewer_nodes(plan)
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


def _on_fewer_nodes(plan: JobPlan) -> Iterator[tuple[JobPlan, str]]:
    """Fewer nodes, or fewer GPUs of each, the most GPUs first. A role on any nodes is (0, workers)."""
    per_worker = 1 if plan.colocate else max(plan.gpus_per_rollout_worker, 1)
    shapes: list[Iterable[tuple[int, int]]] = []
    for spot, workers, each in (
        (plan.trainer_spot, plan.trainer_workers, 1),
        (plan.rollout_spot, plan.rollout_workers, per_worker),
    ):
        numbers = range(workers // spot.nodes * each, 0, -each) if spot.nodes else [workers]
        shapes.append(product(range(spot.nodes, 0, -1) if spot.nodes else [0], numbers))
    pairs = sorted(
        product(*shapes), key=lambda pair: sum(max(nodes, 1) * number for nodes, number in pair), reverse=True
    )
    for (nodes, gpus), (rollout_nodes, rollout_gpus) in pairs[1:MOST_SHAPES_TRIED]:
        ranks = max(nodes, 1) * gpus
        workers = max(rollout_nodes, 1) * rollout_gpus // (per_worker if rollout_nodes else 1)
        smaller = replace(
            plan,
            trainer_workers=ranks,
            rollout_workers=ranks if plan.colocate else workers,
            trainer_spot=replace(plan.trainer_spot, nodes=nodes),
            rollout_spot=replace(plan.rollout_spot, nodes=rollout_nodes),
        )
        named = ((TRAINER, nodes, gpus), (ROLLOUT, rollout_nodes, rollout_gpus))
        sets = (f"--set {role}.nnodes={n} --set {role}.n_gpus_per_node={g}" for role, n, g in named if n)
        yield smaller, " ".join(sets)
