"""A plan's placement groups on a running Ray: created together, waited for with one deadline, removed together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl_cli.errors import PreflightError
from asyncrl_cli.job.lifeline import lost_session
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.job_plan import Bundle, JobPlan, asked, check_fit, fitting_hint

RELEASE_S = 1.0
"""How long Ray's view of free resources lags behind a removed placement group."""


@dataclass(slots=True, kw_only=True)
class Placement:
    """The reserved bundles of a plan. `options` puts a worker into its bundle."""

    plan: JobPlan
    groups: dict[str, PlacementGroup] = field(default_factory=dict)

    def options(self, role_name: str, index: int) -> dict[str, Any]:
        """Actor options of worker `index`: GPUs named on the actor, or CUDA_VISIBLE_DEVICES stays empty in a bundle."""
        role = self.plan.role(role_name)
        return {
            "num_cpus": role.cpus,
            "num_gpus": role.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.groups[role.group], placement_group_bundle_index=index
            ),
        }

    def remove(self) -> None:
        """Give the bundles back; kills what still runs in them. In a lost session Ray would wait for who should take them."""
        while self.groups and lost_session() is None:
            remove_placement_group(self.groups.popitem()[1])


async def place(plan: JobPlan, *, timeout_s: float) -> Placement:
    """Reserve every bundle within `timeout_s` in total. Raises PreflightError, at once if the cluster is too small."""
    check_fit(plan, ray_cluster())
    placement = Placement(plan=plan)
    try:
        async with asyncio.timeout(timeout_s):
            for name, group in plan.groups.items():
                placement.groups[name] = _create(group)
            await asyncio.gather(*(_ready(group) for group in placement.groups.values()))
    except TimeoutError:
        placement.remove()
        await asyncio.sleep(RELEASE_S)
        free = free_cluster()
        raise PreflightError(
            f"no room within placement.timeout_s = {timeout_s:g} s: {asked(plan)}; "
            f"the cluster has {ray_cluster()}, of which are free {free}",
            hint=f"wait until other jobs end; now this would fit: {fitting_hint(plan, free)}",
        ) from None
    except BaseException:
        placement.remove()
        raise
    return placement


def ray_cluster() -> ClusterResources:
    """All resources of the connected cluster's living nodes."""
    return _cluster_of({node["NodeID"]: node["Resources"] for node in ray.nodes()})


def free_cluster() -> ClusterResources:
    """What other jobs leave free now."""
    return _cluster_of(ray._private.state.available_resources_per_node())


def _cluster_of(resources: Mapping[str, Mapping[str, float]]) -> ClusterResources:
    """`resources` by node."""
    nodes = []
    for node in (node for node in ray.nodes() if node["Alive"]):
        has = resources.get(node["NodeID"], {})
        name, cpus, gpus = node["NodeManagerAddress"], int(has.get("CPU", 0)), int(has.get("GPU", 0))
        nodes.append(NodeResources(name=name, cpus=cpus, gpus=gpus))
    return ClusterResources(nodes=tuple(nodes))


def _create(group: Sequence[Bundle]) -> PlacementGroup:
    """PACK: as few nodes as possible, but no refusal if it takes more."""
    amounts = [{"CPU": float(bundle.cpus), "GPU": float(bundle.gpus)} for bundle in group]
    return placement_group([{name: amount for name, amount in bundle.items() if amount} for bundle in amounts], strategy="PACK")


async def _ready(group: PlacementGroup) -> None:
    """In a thread, since `wait` blocks; by the second, so that it outlives a timeout by no more."""
    is_ready = False
    while not is_ready:
        is_ready = await asyncio.to_thread(group.wait, 1)
