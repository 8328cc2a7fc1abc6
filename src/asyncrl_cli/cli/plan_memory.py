"""The memory part of a plan: what each process holds, and what its devices, its node and its object store
have room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.table import Column
from rich.text import Text

from asyncrl_cli.cli.console import print_prose, print_table
from asyncrl_cli.plan import memory_fit
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.plan.machine import SHARED_MEMORY, free_shared_memory
from asyncrl_cli.plan.memory import MemoryEstimate
from asyncrl_cli.plan.memory_fit import NODE

MIB = 2**20
NOT_COUNTED = "not counted: Python, torch and a GPU's context (about 1 GiB per process), and fragmentation"


def memory_document(memory: MemoryEstimate | str, needs: Sequence[memory_fit.DeviceNeed]) -> dict[str, Any]:
    if isinstance(memory, str):
        return {"unknown": memory}
    return {
        "estimate": True,
        "parameters": memory.shape.parameters,
        "kv_values_per_token": memory.shape.kv_values_per_token,
        "items": [
            {"place" if name == "kind" else name: value for name, value in asdict(item).items()}
            for item in memory.items
        ],
        "devices": [
            {
                "device": need.device,
                "roles": need.roles,
                "num_bytes": need.num_bytes,
                "available_bytes": need.available_bytes,
                "fits": need.fits,
            }
            for need in needs
        ],
        "object_store_bytes": memory.store_bytes,
        "remarks": [*memory.shape.remarks, NOT_COUNTED],
    }


def print_memory(
    memory: MemoryEstimate | str, plan: JobPlan, needs: Sequence[memory_fit.DeviceNeed], *, is_here: bool
) -> None:
    if isinstance(memory, str):
        print_prose(f"\nmemory: no estimate: {memory}")
        return
    is_apart = plan.device != "cpu"  # the GPU's memory is not the host's
    model = f"{memory.shape.model_type}, {memory.shape.parameters:,} parameters"
    title = f"\nmemory per {'GPU and process' if is_apart else 'process'}, an estimate ({model})"
    rows: list[list[str | Text]] = []
    for role, grouped in groupby(memory.items, key=lambda item: item.role):
        items = list(grouped)
        rows.append([Text(f"{role} x {max(item.processes for item in items)}", "bold")])
        for item in items:
            where = ["GPU" if item.kind == "device" else "host"] if is_apart else []
            rows.append([item.what, item.phase, size(item.num_bytes), *where, item.how])
    sizes, places = Column("size", justify="right", no_wrap=True), ["where"] if is_apart else []
    print_table(["what", "when", sizes, *places, "meaning"], rows, title)
    for need in needs:
        one = "one node's host" if need.device == NODE else f"one {need.device}"
        line = f"{' and '.join(need.roles)} on {one}: about {size(need.num_bytes)} at the peak"
        if need.available_bytes is None:
            flag = "--node-memory" if need.device == NODE else "--gpu-memory"
            print_prose(f"{line} (the memory of a {need.device} is not known here: {flag} GIB)")
        else:
            fits = "fits" if need.fits else "does not fit"
            print_prose(f"{line} of {size(need.available_bytes)}: {fits}, by this estimate")
    needed, free = memory.store_bytes, free_shared_memory()
    room = f" ({SHARED_MEMORY})"
    if is_here and free is not None:
        enough = "enough" if needed <= free else "not enough"
        room = f", {SHARED_MEMORY} has {size(free)} free: {enough}"
    print_prose(f"object store of a local session: {size(needed)} of shared memory{room}")
    for line in (*memory.shape.remarks, NOT_COUNTED):
        print_prose(line)


def size(num_bytes: int) -> str:
    """The size in MiB below one GiB, otherwise in GiB."""
    mib = num_bytes / MIB
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
