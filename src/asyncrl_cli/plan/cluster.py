"""The nodes of a cluster with their CPUs and GPUs. Those of this machine are found without Ray or torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl_cli.base.errors import counted
from asyncrl_cli.profile.schema import Profile

LOOPBACK = "127.0.0.1"
"""The address of a local session's node."""
CPUINFO = Path("/proc/cpuinfo")
MATRIX_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""CPU flags that matter for matrix products: x86's first, then Arm's."""
BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


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
    # CUDA_VISIBLE_DEVICES hides devices; an empty entry or -1 is none.
    gpus = len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        gpus = min(gpus, sum(entry.strip() not in ("", "-1") for entry in visible.split(",")))
    node = NodeResources(name="local", cpus=usable_cores(), gpus=gpus, memory_bytes=host_memory_bytes())
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
    flags = cpu_facts().get("flags") or cpu_facts().get("Features")
    return None if flags is None else tuple(name for name in MATRIX_FEATURES if name in flags.split())


def computes_bfloat16() -> bool | None:
    """Whether the CPU has bfloat16 instructions; without them every matrix product in bfloat16 is emulated.
    None: unknown."""
    features = matrix_features()
    return None if features is None else not BFLOAT16_FEATURES.isdisjoint(features)
