"""What the processes on a node with GPUs need of its host memory, against what it has.

Per node: what its processes always hold, the phase in which they hold most besides (a start, or a sync beside
a checkpoint), and the object store's two versions of the weights, where a rank publishes or a worker receives
them. Rank 0 holds what is published. On CPUs, `memory_fit.device_needs` compares all processes with the
machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from asyncrl_cli.plan.cluster import ClusterResources
from asyncrl_cli.plan.job_plan import COLOCATED, ROLLOUT, TRAINER, JobPlan
from asyncrl_cli.plan.memory import MemoryEstimate, MemoryItem, object_store_bytes, published_parameters
from asyncrl_cli.plan.memory_fit import DeviceNeed
from asyncrl_cli.plan.node_fit import Unplaced, assigned

NODE = "node"
"""Name of the device, and of the role that has the object store."""
STORE = "object store"


def node_needs(estimate: MemoryEstimate, there: ClusterResources) -> list[DeviceNeed]:
    """One need for each kind of node, those with most processes first. Empty on CPUs, and while there is no
    room for the job."""
    plan, memory = estimate.plan, {node.key: node.memory_bytes for node in there.nodes}
    if plan.device == "cpu" or isinstance(placed := assigned(plan, there), Unplaced):
        return []
    first = placed[COLOCATED if plan.colocate else TRAINER][0]
    on = _processes(plan, placed)
    needs = {
        DeviceNeed(
            device=NODE,
            roles=tuple(f"{number} {role}" for role, number in on[node].items()),
            num_bytes=_peak_bytes(estimate, on[node], has_rank_zero=node == first),
            available_bytes=memory[node],
        ): None
        for node in on
    }
    return list(needs)


def host_items(estimate: MemoryEstimate) -> list[MemoryItem]:
    """All that takes host memory, with the object store."""
    return [*(item for item in estimate.items if item.place == "host"), _store(estimate)]


def store_bytes(estimate: MemoryEstimate) -> int:
    return object_store_bytes(estimate.profile, published_parameters(estimate.profile, estimate.shape))


def _store(estimate: MemoryEstimate) -> MemoryItem:
    return MemoryItem(
        NODE,
        1,
        "host",
        "always",
        STORE,
        store_bytes(estimate),
        "two versions of the weights, and payloads in flight",
    )


def _processes(plan: JobPlan, placed: Mapping[str, list[str]]) -> dict[str, Counter[str]]:
    """How many processes of each role a node has."""
    on: dict[str, Counter[str]] = {node: Counter() for nodes in placed.values() for node in nodes}
    for group, nodes in placed.items():
        for role in (TRAINER, ROLLOUT) if group == COLOCATED else (group,):
            each = plan.role(role).workers // len(nodes)
            for node in nodes:
                on[node][role] += each
    return on


def _peak_bytes(estimate: MemoryEstimate, processes: Counter[str], *, has_rank_zero: bool) -> int:
    phases: Counter[str] = Counter()
    for item in (item for item in host_items(estimate) if item.role in processes):
        of_rank_zero = item.role == TRAINER and item.processes == 1
        phases[item.phase] += item.num_bytes * (int(has_rank_zero) if of_rank_zero else processes[item.role])
    if has_rank_zero or processes[ROLLOUT]:
        phases["always"] += store_bytes(estimate)
    return phases.pop("always", 0) + max(phases.values(), default=0)
