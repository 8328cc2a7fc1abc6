"""Reserves the bundles of a plan on the cluster: a placement group for each role, within
`placement.timeout_s`. Runs in the driver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import TypedDict

import ray
from ray._private import state
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl_cli.base.errors import PreflightError, timeout
from asyncrl_cli.job.ray.lifeline import lost_session
from asyncrl_cli.plan.cluster import (
    ClusterResources,
    NodeResources,
    asked,
    check_fit,
    fitting_hint,
    node_lines,
)
from asyncrl_cli.plan.job_plan import ROLLOUT, JobPlan

logger = logging.getLogger(__name__)

NODE_ID = "ray.io/node-id"
"""The label that Ray gives to every node."""
WAITING_S = 3.0
"""After this time a placement says what it is waiting for."""
RELEASE_S = 1.0
"""How long Ray's view of free resources lags behind a removed placement group."""

Say = Callable[[str], None]


class ActorOptions(TypedDict):
    """Ray's options for an actor: its bundle, CPUs and GPUs."""

    num_cpus: float
    num_gpus: float
    scheduling_strategy: PlacementGroupSchedulingStrategy


Options = Callable[[str, int], ActorOptions]
"""By the actor's role and its index."""


@asynccontextmanager
async def placed(plan: JobPlan, *, timeout_s: float, say: Say = lambda text: None) -> AsyncIterator[Options]:
    """Reserve every bundle within `timeout_s` in total. Raises PreflightError otherwise, at once if the
    cluster is too small.

    Leaving the block releases the bundles and kills whatever still runs in them.
    """
    check_fit(plan, ray_cluster())
    groups: dict[str, PlacementGroup] = {}

    def options(role_name: str, index: int) -> ActorOptions:
        """`num_gpus` is set although the bundle has the GPUs: without it, Ray leaves the actor's
        CUDA_VISIBLE_DEVICES empty."""
        role = plan.role(role_name)
        group, number = groups[role.placement_group], plan.bundle_of(role, index)
        bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        cpus, gpus = role.cpus_per_worker, role.gpus_per_worker
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": bundle}

    async def tell_what_is_waited_for() -> None:
        await asyncio.sleep(WAITING_S)
        try:
            free = await asyncio.to_thread(ray_cluster, free=True)
            whom = "an autoscaler, or for other jobs to end" if plan.autoscaler else "other jobs to end"
            most = f"{timeout_s:g} s at most (placement.timeout_s)"
            say(f"waiting for {whom}, {most}: {asked(plan)}; free: {free}")
        except RayError as error:
            logger.warning("cannot tell what is free in the cluster: %s", error)

    try:
        telling = asyncio.create_task(tell_what_is_waited_for(), name="what a placement waits for")
        try:
            async with timeout(timeout_s):
                await _reserve(plan, groups)
        except TimeoutError:
            _remove(groups)
            await asyncio.sleep(RELEASE_S)
            cluster, free = ray_cluster(), ray_cluster(free=True)
            longer = "--set placement.timeout_s=... if the autoscaler needs longer"
            instead = longer if plan.autoscaler else "wait until other jobs end"
            raise PreflightError(
                f"no room within placement.timeout_s = {timeout_s:g} s: {asked(plan)}; "
                f"the cluster has {cluster}; free: {free}:{node_lines(cluster, free)}",
                hint=f"{instead}; what would fit now: {fitting_hint(plan, free)}",
            ) from None
        finally:
            telling.cancel()
            await asyncio.wait([telling])
        yield options
    finally:
        _remove(groups)


async def _reserve(plan: JobPlan, groups: dict[str, PlacementGroup]) -> None:
    """Create the placement groups in `groups` and wait for them. With disjoint nodes, the rollout's group is
    requested last, when the nodes of the others, which it must not use, are known."""
    for name in plan.groups:  # the rollout's is the last
        taken = nodes_of(groups.values()) if plan.disjoint_nodes and name == ROLLOUT else ()
        spot, bundles = plan.spot(name), plan.groups[name]
        amounts = {"CPU": float(bundles[0].cpus), "GPU": float(bundles[0].gpus)}
        each = {resource: amount for resource, amount in amounts.items() if amount}
        selector = dict(spot.labels) | ({NODE_ID: f"!in({','.join(sorted(taken))})"} if taken else {})
        groups[name] = placement_group(
            [each] * len(bundles),
            strategy=spot.strategy.upper(),
            bundle_label_selector=[selector] * len(bundles) if selector else None,
        )
        if plan.disjoint_nodes:
            await _ready(groups[name])
    await asyncio.gather(*(_ready(group) for group in groups.values()))


async def _ready(group: PlacementGroup) -> None:
    """Wait in a thread, because `wait` blocks; for a second at a time, so that the thread ends soon after a
    timeout."""
    while not await asyncio.to_thread(group.wait, 1):
        pass


def nodes_of(groups: Collection[PlacementGroup]) -> list[str]:
    """The ids of all nodes on which these groups have bundles. The groups must be ready."""
    tables = [placement_group_table(group)["bundles_to_node_id"] for group in groups]
    return list(dict.fromkeys(node for table in tables for node in table.values()))


def ray_cluster(*, free: bool = False) -> ClusterResources:
    """All resources of the connected cluster's living nodes; with `free`, only those that no job uses now."""
    left = state.available_resources_per_node() if free else {}
    nodes = []
    for node in (node for node in ray.nodes() if node["Alive"]):
        has = left.get(node["NodeID"], {}) if free else node["Resources"]
        name, cpus, gpus = node["NodeManagerAddress"], int(has.get("CPU", 0)), int(has.get("GPU", 0))
        # What Ray counts as memory is what the node had free at its start, in two parts.
        memory = sum(node["Resources"].get(part, 0) for part in ("memory", "object_store_memory"))
        nodes.append(
            NodeResources(
                name=name,
                cpus=cpus,
                gpus=gpus,
                id=node["NodeID"],
                memory_bytes=int(memory) or None,
                labels=node.get("Labels") or {},
            )
        )
    return ClusterResources(nodes=tuple(nodes))


def _remove(groups: dict[str, PlacementGroup]) -> None:
    """Release the bundles, unless the session is lost: Ray would wait for a daemon that is gone."""
    while groups and lost_session() is None:
        remove_placement_group(groups.popitem()[1])
