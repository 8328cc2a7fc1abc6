"""On which nodes the bundles of a plan fit, and what to change where there is no room.

    strategy        the bundles of a placement group are
    pack            on few nodes
    spread          on many nodes
    strict_pack     all on one node
    strict_spread   each on a different node

First fit: exact for bundles of one size on equal nodes, a good guess otherwise. Ray's placement groups decide
in the end, within `placement.timeout_s`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from asyncrl_cli.base.errors import PreflightError, counted
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, Bundle, JobPlan, Spot

MOST_NODES_SHOWN = 16
MOST_SHAPES_TRIED = 5_000


class Unplaced(NamedTuple):
    """The first bundle that finds no node."""

    group: str
    index: int
    bundles: Sequence[Bundle]

    def __str__(self) -> str:
        return (
            f"bundle {self.index + 1} of {len(self.bundles)} of the {self.group} "
            f"({self.bundles[self.index]}) finds no node"
        )


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
        own = on[name] = []
        while len(own) < len(bundles):
            wanted = bundles[0].times(together)
            wanted = replace(wanted, cpus=0) if cluster.elastic_cpus else wanted
            order = sorted(allowed, key=own.count) if spot.strategy == "spread" else allowed
            spare = (i for i in order if not (spot.strategy == "strict_spread" and i in own))
            node = next(
                (i for i in spare if free[i].gpus >= wanted.gpus and free[i].cpus >= wanted.cpus), None
            )
            if node is None:
                return Unplaced(name, len(own), bundles)
            free[node] = Bundle(gpus=free[node].gpus - wanted.gpus, cpus=free[node].cpus - wanted.cpus)
            own += [node] * together
    return {name: [nodes[i].key for i in on[name]] for name in plan.groups}


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """By Ray's rules: a value, `in(a, b)`, and `!` before either for none of them."""
    return all(_is_one_of(labels.get(key), wanted) for key, wanted in selector.items())


def _is_one_of(value: str | None, wanted: str) -> bool:
    plain = wanted.removeprefix("!")
    values = [one.strip() for one in plain[3:-1].split(",")] if plain.startswith("in(") else [plain]
    return (value in values) != wanted.startswith("!")


def check_fit(plan: JobPlan, cluster: ClusterResources) -> None:
    """Raises PreflightError if the plan does not fit, with what it needs, what the cluster has, and the
    `--set` that would fit. Checks nothing if there is an autoscaler, which may add what is missing."""
    if not plan.autoscaler and isinstance(found := assigned(plan, cluster), Unplaced):
        lines = "" if cluster.elastic_cpus else f"; {found}:{node_lines(cluster, cluster)}"
        raise PreflightError(
            f"the cluster is too small: {asked(plan)}; it has {cluster}{lines}",
            hint=fitting_hint(plan, cluster),
        )


def node_lines(cluster: ClusterResources, free: ClusterResources) -> str:
    """What each node has free, a line each."""
    left = {node.key: node for node in free.nodes}
    lines = []
    for node in cluster.nodes[:MOST_NODES_SHOWN]:
        now = left.get(node.key, replace(node, gpus=0, cpus=0))
        own = [f"{key}={value}" for key, value in node.labels.items() if not key.startswith("ray.io/")]
        labels = f", with {' '.join(own)}" if own else ""
        lines.append(
            f"\n  {node.name}: free {now.gpus} of {counted(node.gpus, 'GPU')}, {now.cpus} of "
            f"{counted(node.cpus, 'CPU')}{labels}"
        )
    more = len(cluster.nodes) - MOST_NODES_SHOWN
    return "".join(lines) + (f"\n  and {counted(more, 'node')} more" if more > 0 else "")


def asked(plan: JobPlan) -> str:
    return (
        f"{counted(plan.trainer_workers, 'trainer rank')}"
        f"{''.join(f', {processes} of {task}' for task, processes in plan.scorers.items())} and "
        f"{counted(plan.rollout_workers, 'rollout worker')} "
        f"ask for {counted(plan.gpus, 'GPU')} and {counted(plan.cpus, 'CPU')}, "
        f"at most {max(plan.bundles)} of one node at a time"
    )


def fitting_hint(plan: JobPlan, cluster: ClusterResources) -> str:
    """The largest smaller job that fits, as `--set`s."""
    for smaller, sets in _smaller_jobs(plan):
        if not isinstance(assigned(smaller, cluster), Unplaced):
            return sets
    if plan.gpus and cluster.cpus:
        return "--set placement.device=cpu" if plan.device == "cuda" else "--set placement.gpu_bundles=false"
    return f"the smallest job of this profile needs {2 * plan.cpus_per_worker} CPUs"


def _smaller_jobs(plan: JobPlan) -> Iterator[tuple[JobPlan, str]]:
    """Smaller plans and their `--set`s: first the same job without the rules about its nodes, then smaller
    ones, with the rules and without."""
    looser = list(_looser(plan))
    yield from looser
    yield from _with_less(plan)
    if looser:
        loosest, rules = looser[-1]
        yield from ((smaller, f"{rules} {sets}") for smaller, sets in _with_less(loosest))


def _with_less(plan: JobPlan) -> Iterator[tuple[JobPlan, str]]:
    """Fewer CPUs per worker, then fewer workers, divided between the roles as before."""
    for cpus in range(plan.cpus_per_worker - 1, 0, -1):
        yield replace(plan, cpus_per_worker=cpus), f"--set placement.cpus_per_worker={cpus}"
    if plan.scorers:  # placement.ratios decides how many of each there are
        return
    if plan.trainer_spot.nodes or plan.rollout_spot.nodes:
        yield from _smaller_shapes(plan)
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


def _looser(plan: JobPlan) -> Iterator[tuple[JobPlan, str]]:
    """The same job with fewer rules about its nodes: without each rule in turn, then without any."""
    rules: list[tuple[dict[str, object], str]] = []
    if plan.disjoint_nodes:
        rules.append(({"disjoint_nodes": False}, "--set placement.disjoint_nodes=false"))
    for name in (TRAINER, ROLLOUT):
        spot = plan.spot(name)
        if spot.strategy.startswith("strict") and not spot.nodes:
            looser = spot.strategy.removeprefix("strict_")
            rules.append(
                (
                    {f"{name}_spot": replace(spot, strategy=looser)},
                    f"--set placement.{name}_strategy={looser}",
                )
            )
        if spot.labels:
            rules.append(({f"{name}_spot": replace(spot, labels={})}, f"--set placement.{name}_labels={{}}"))
    for changes, sets in rules:
        yield replace(plan, **changes), sets  # type: ignore[arg-type]
    if len(rules) > 1:
        without = {key: value for changes, _ in rules for key, value in changes.items()}
        yield replace(plan, **without), " ".join(sets for _, sets in rules)  # type: ignore[arg-type]


def _smaller_shapes(plan: JobPlan) -> Iterator[tuple[JobPlan, str]]:
    """Fewer nodes, or fewer GPUs of each, the most GPUs first."""

    def shapes(spot: Spot, workers: int, each: int) -> list[tuple[int, int]]:
        """(nodes, GPUs of each); (0, workers) for a role that is on any nodes."""
        if not spot.nodes:
            return [(0, workers)]
        return list(product(range(spot.nodes, 0, -1), range(workers // spot.nodes * each, 0, -each)))

    each = 1 if plan.colocate else max(plan.gpus_per_rollout_worker, 1)
    of_trainer = shapes(plan.trainer_spot, plan.trainer_workers, 1)
    of_rollout = shapes(plan.rollout_spot, plan.rollout_workers, each)

    def gpus(pair: tuple[tuple[int, int], tuple[int, int]]) -> int:
        return sum(max(nodes, 1) * number for nodes, number in pair)

    for trainer, rollout in sorted(product(of_trainer, of_rollout), key=gpus, reverse=True)[
        1:MOST_SHAPES_TRIED
    ]:
        ranks, workers = (
            max(trainer[0], 1) * trainer[1],
            max(rollout[0], 1) * rollout[1] // (each if rollout[0] else 1),
        )
        smaller = replace(
            plan,
            trainer_workers=ranks,
            rollout_workers=ranks if plan.colocate else workers,
            trainer_spot=replace(plan.trainer_spot, nodes=trainer[0]),
            rollout_spot=replace(plan.rollout_spot, nodes=rollout[0]),
        )
        named = (("trainer", *trainer), ("rollout", *rollout))
        yield (
            smaller,
            " ".join(
                f"--set {role}.nnodes={n} --set {role}.n_gpus_per_node={g}" for role, n, g in named if n
            ),
        )
