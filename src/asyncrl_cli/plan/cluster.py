"""The nodes of a cluster with their CPUs and GPUs: plain values. This machine's own are found without Ray and torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
"""The address of a local session's node."""
CPUINFO = Path("/proc/cpuinfo")
MATRIX_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""x86's first, then Arm's."""
BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """One node. On a local session `cpus` are cores; Ray gets as many logical CPUs as the plan needs."""

    name: str
    cpus: int
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResources:
    """All nodes a job may use. `elastic_cpus`: CPUs are logical and grow with the plan (a local session).

    `cpu_bfloat16`: whether its CPUs have instructions for products in bfloat16; None where nobody can tell.
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
        return f"{counted(self.gpus, 'GPU')} and {counted(self.cpus, 'CPU')} on {counted(len(self.nodes), 'node')}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def local_cluster() -> ClusterResources:
    """This machine: its cores, and the NVIDIA devices that `CUDA_VISIBLE_DEVICES` leaves visible."""
    node = NodeResources(name="local", cpus=usable_cores(), gpus=_visible_gpus())
    return ClusterResources(nodes=(node,), elastic_cpus=True, cpu_bfloat16=computes_bfloat16())


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
    """The first core's entries in /proc/cpuinfo, by the kernel's names; none on a system without them."""
    try:
        first, _, _ = CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def matrix_features() -> tuple[str, ...] | None:
    """Those of MATRIX_FEATURES that it has; None where nobody can tell."""
    facts = cpu_facts()
    flags = facts.get("flags") or facts.get("Features")
    return None if flags is None else tuple(name for name in MATRIX_FEATURES if name in flags.split())


def computes_bfloat16() -> bool | None:
    """Whether a matrix product in bfloat16 is computed as such: without instructions for it each is emulated. None: unknown."""
    features = matrix_features()
    return None if features is None else not BFLOAT16_FEATURES.isdisjoint(features)
