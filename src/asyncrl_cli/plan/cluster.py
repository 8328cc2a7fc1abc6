"""The nodes of a cluster with their CPUs and GPUs, and how many trainer ranks and rollout workers a profile
gets there.

Explicit counts win over a ratio of GPUs. This machine's own resources are found without Ray or torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl_cli.base.errors import ConfigError, PreflightError, counted
from asyncrl_cli.profile.nodes import asked_ranks, asked_workers, shape_of
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Profile
from asyncrl_cli.profile.sharing import ROLLOUT, TRAIN, share_of, tasks_apart

LOOPBACK = "127.0.0.1"
"""The address of a local session's node."""
CPUINFO = Path("/proc/cpuinfo")
MATRIX_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""CPU flags that matter for matrix products: x86's first, then Arm's."""
BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
Counts = tuple[int, int]
"""Trainer ranks and rollout workers."""


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
        return (
            f"{counted(self.gpus, 'GPU')} and {counted(self.cpus, 'CPU')} on "
            f"{counted(len(self.nodes), 'node')}"
        )


def cache_bytes_left(memory_bytes: int, share: float, held_bytes: int) -> int:
    """Bytes of the KV cache of an engine that may use this share of the memory and holds `held_bytes`
    besides."""
    return max(int(share * memory_bytes) - held_bytes, 0)


def local_cluster() -> ClusterResources:
    """This machine: its cores, and the NVIDIA devices that `CUDA_VISIBLE_DEVICES` leaves visible."""
    node = NodeResources(
        name="local", cpus=usable_cores(), gpus=_visible_gpus(), memory_bytes=host_memory_bytes()
    )
    return ClusterResources(nodes=(node,), elastic_cpus=True, cpu_bfloat16=computes_bfloat16())


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


def _visible_gpus() -> int:
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(devices)
    return min(len(devices), len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]))


def cpu_facts() -> dict[str, str]:
    """The first core's entries in /proc/cpuinfo, under the kernel's names; empty on a system without that
    file."""
    try:
        first, _, _ = CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    except OSError:
        return {}
    return {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())
    }


def matrix_features() -> tuple[str, ...] | None:
    """The MATRIX_FEATURES that this machine's CPU has; None if unknown."""
    facts = cpu_facts()
    flags = facts.get("flags") or facts.get("Features")
    return None if flags is None else tuple(name for name in MATRIX_FEATURES if name in flags.split())


def computes_bfloat16() -> bool | None:
    """Whether the CPU has bfloat16 instructions; without them every matrix product in bfloat16 is emulated.
    None: unknown."""
    features = matrix_features()
    return None if features is None else not BFLOAT16_FEATURES.isdisjoint(features)


def cpu_counts(profile: Profile) -> Counts:
    """One worker per role unless the profile says more; `placement.gpus` is ignored (the plan warns about
    it).

    Colocated, a place of `cpus_per_worker` cores has a rank and a worker, and there are as many places as
    there would be ranks and workers apart: both placements use the same cores. (One rank and one worker with
    more threads would be slower: small matrices do not gain from threads.)
    """
    ranks = profile.placement.trainer_workers or share_of(profile, TRAIN) or 1
    workers = profile.rollout.workers or share_of(profile, ROLLOUT) or 1
    return (ranks + workers, ranks + workers) if profile.placement.colocate else (ranks, workers)


def scorer_processes(profile: Profile, cluster: ClusterResources, device: str) -> dict[str, int]:
    """The number of processes of each task with resources of its own: on GPUs, its share by
    `placement.ratios`."""
    return {task: _scorer_processes(profile, cluster, device, task) for task in tasks_apart(profile)}


def _scorer_processes(profile: Profile, cluster: ClusterResources, device: str, task: str) -> int:
    share, ratios = share_of(profile, task), profile.placement.ratios or ()
    if device == "cpu":
        return share or 1
    if share is None:
        tasks = profile.placement.tasks
        given = (
            ("placement.tasks without placement.ratios")
            if tasks and (task,) in tasks
            else f"no placement.tasks with {task}"
        )
        name = f'--set placement.tasks=[["train"],["{task}"],["rollout"]] ' if tasks is None else ""
        raise ConfigError(
            f"{given}: nothing says how many GPUs {task} gets",
            hint=f"{name}--set placement.ratios=[{','.join('1' * len(tasks or (1, 1, 1)))}]",
        )
    total = _total(profile, cluster)
    gpus, remainder = divmod(total * share, sum(ratios))
    if remainder:
        there = _there(cluster, total)
        fitting = there - there % sum(ratios) or sum(ratios)
        raise ConfigError(
            f"GPUs not divisible: placement.ratios = {list(ratios)} of {counted(total, 'GPU')}",
            hint=f"--set placement.gpus={fitting}",
        )
    return gpus


def cuda_counts(profile: Profile, cluster: ClusterResources) -> Counts:
    """Explicit counts win; the rest comes from `placement.gpus` (or all of the cluster's) and
    `placement.ratio`. The GPUs of scorers are taken off first."""
    if profile.placement.colocate:
        return _colocated_counts(profile, cluster)
    scorers = sum(scorer_processes(profile, cluster, "cuda").values())
    per_worker = profile.placement.gpus_per_rollout_worker
    ranks, workers = asked_ranks(profile), asked_workers(profile)
    if ranks is None and workers is None:
        ranks, workers = _by_ratio(profile, cluster, scorers)
    elif ranks is None:
        assert workers is not None
        ranks = _rest(profile, cluster, scorers, ROLLOUT, workers * per_worker)
    elif workers is None:
        workers = _rest(profile, cluster, scorers, "trainer", ranks)
    needed = ranks + workers * per_worker + scorers
    too_many = profile.placement.gpus is not None and needed > profile.placement.gpus
    if too_many and needed <= _there(cluster, needed):  # else a later error says what fits the cluster
        raise ConfigError(
            f"placement.gpus = {profile.placement.gpus}, but {ranks} trainer ranks and {workers} rollout "
            "workers "
            f"of {per_worker}{f' beside {scorers} for scorers' if scorers else ''} need {needed}",
            hint=f"--set placement.gpus={needed}",
        )
    return ranks, workers


def _unit(profile: Profile, role: str) -> tuple[str, int]:
    """The key that sets a role's number of processes, and the GPUs that one more of it takes."""
    shape = shape_of(getattr(profile, role))
    if shape is not None:
        return f"{role}.n_gpus_per_node", shape.nodes
    return (
        ("rollout.workers", profile.placement.gpus_per_rollout_worker)
        if role == ROLLOUT
        else ("placement.trainer_workers", 1)
    )


def asked_gpus(profile: Profile) -> int:
    """How many GPUs a profile's placement asks for; 0 if it names no number."""
    placement = profile.placement
    if total := placement.gpus or sum(placement.ratios or ()):
        return total
    ranks, workers = asked_ranks(profile) or 0, asked_workers(profile) or 0
    return max(ranks, workers) if placement.colocate else ranks + workers * placement.gpus_per_rollout_worker


def _colocated_counts(profile: Profile, cluster: ClusterResources) -> Counts:
    placement = profile.placement
    if placement.gpus_per_rollout_worker > 1:
        raise ConfigError(
            f"placement.colocate shares each GPU between one rank and one rollout worker, but "
            f"placement.gpus_per_rollout_worker = {placement.gpus_per_rollout_worker}",
            hint="--set placement.gpus_per_rollout_worker=1",
        )
    asked = {
        "placement.trainer_workers": asked_ranks(profile),
        "rollout.workers": profile.rollout.workers,
        "placement.gpus": placement.gpus,
    }
    given = {key: value for key, value in asked.items() if value is not None}
    if len(set(given.values())) > 1:
        numbers = ", ".join(f"{key} = {value}" for key, value in given.items())
        raise ConfigError(
            f"placement.colocate needs one rank and one rollout worker per GPU, but {numbers}",
            hint=" ".join(f"--set {key}={min(given.values())}" for key in given),
        )
    gpus = next(iter(given.values())) if given else _total(profile, cluster)
    if profile.weights.transport == "ipc" and gpus > 1:
        raise ConfigError(
            f'weights.transport = "ipc" with {gpus} GPUs: weights pass through the memory of rank 0\'s GPU, '
            "which the rollout "
            "workers of the others cannot map",
            hint=" ".join(f"--set {key}=1" for key in given or ("placement.gpus",)) + ", or --set "
            "weights.transport=object-store",
        )
    return gpus, gpus


def _total(profile: Profile, cluster: ClusterResources) -> int:
    total = profile.placement.gpus or cluster.gpus
    if total == 0 and profile.placement.gpu_bundles:
        raise PreflightError(
            "placement.gpu_bundles: nothing says how many logical GPUs the job has",
            hint="--set placement.gpus=8",
        )
    if total == 0:
        needs_gpus = profile.weights.transport in DIRECT_TRANSPORTS
        without = "--set placement.device=cpu" + (
            " --set weights.transport=object-store" if needs_gpus else ""
        )
        raise PreflightError(
            f'placement.device = "cuda", but the cluster has no GPU: {cluster}',
            hint=f"{without}, or `asyncrl plan --gpus N` to plan for a machine that has some",
        )
    return total


def _there(cluster: ClusterResources, gpus: int) -> int:
    """The number of GPUs for a hint: `gpus`, or what the cluster has if that is less. A cluster without GPUs
    does not lower it."""
    return min(gpus, cluster.gpus or gpus)


def _by_ratio(profile: Profile, cluster: ClusterResources, scorers: int) -> Counts:
    """Divide GPUs between trainer and rollout by `placement.ratio`, or by their entries in
    `placement.ratios`, into whole GPUs and whole rollout workers."""
    total = _total(profile, cluster) - scorers
    per_worker = profile.placement.gpus_per_rollout_worker
    left, right = map(int, profile.placement.ratio.split(":"))
    left, right = share_of(profile, TRAIN) or left, share_of(profile, ROLLOUT) or right

    def divides(gpus: int) -> bool:
        ranks, remainder = divmod(gpus * left, left + right)
        return not remainder and (gpus - ranks) % per_worker == 0

    if not divides(total):
        fitting = next((gpus for gpus in range(_there(cluster, total), 0, -1) if divides(gpus)), None)
        hint = (
            ("--set placement.trainer_workers=N --set rollout.workers=M")
            if fitting is None
            else f"--set placement.gpus={fitting}"
        )
        raise ConfigError(
            f'GPUs not divisible: placement.ratio = "{left}:{right}" of {counted(total, "GPU")} '
            f"with {per_worker} per rollout worker",
            hint="--set placement.colocate=true (one GPU in turns), or --set placement.device=cpu"
            if total == 1
            else hint,
        )
    ranks = total * left // (left + right)
    return ranks, (total - ranks) // per_worker


def _rest(profile: Profile, cluster: ClusterResources, scorers: int, role: str, taken: int) -> int:
    """How many workers of the other role fit into the GPUs that are left when `role` takes `taken`."""
    total, each = (
        _total(profile, cluster) - scorers,
        1 if role == ROLLOUT else profile.placement.gpus_per_rollout_worker,
    )
    rest, (key, _) = total - taken, _unit(profile, role)
    if rest < each:
        raise PreflightError(
            f"{key} takes {taken} of {total} GPUs, which leaves {max(rest, 0)} for the other side; it needs "
            f"{each}",
            hint=_leaving(profile, cluster, scorers, role, each),
        )
    if rest % each:
        raise ConfigError(
            f"GPUs not divisible: {key} leaves {rest} of {total} GPUs for rollout workers of {each} each",
            hint=f"--set placement.gpus={taken + rest // each * each}",
        )
    return rest // each


def _leaving(profile: Profile, cluster: ClusterResources, scorers: int, role: str, each: int) -> str:
    """The `--set`s with which a role takes as many GPUs as it can if the other side needs `each`."""
    total = _total(profile, cluster)
    there = _there(cluster, total)
    (key, step), shape = _unit(profile, role), shape_of(getattr(profile, role))
    num_nodes = min(step, len(cluster.nodes)) if shape else 1
    fitting = (there - scorers - each) // (num_nodes if shape else step)
    sets = [f"--set {role}.nnodes={num_nodes}"] if shape and num_nodes != step else []
    sets += [f"--set {key}={fitting}", *([f"--set placement.gpus={there}"] if there < total else [])]
    return " ".join(sets) if fitting >= 1 else "--set placement.device=cpu"
