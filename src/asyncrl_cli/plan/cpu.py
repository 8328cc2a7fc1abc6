"""Which instructions this machine's CPU has for matrices, as the kernel tells them: no torch."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
MATRIX_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""x86's first, then Arm's."""
BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def cpu_facts() -> dict[str, str]:
    """The first core's entries, by the kernel's names; none on a system without them."""
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
