"""The memory part of `asyncrl plan`: the estimate per process, what a device needs of it, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl_cli.cli.console import stdout

if TYPE_CHECKING:
    from asyncrl_cli.errors import PreflightError
    from asyncrl_cli.plan.job_plan import JobPlan
    from asyncrl_cli.plan.memory import MemoryEstimate
    from asyncrl_cli.plan.memory_fit import DeviceNeed
    from asyncrl_cli.profile.schema import Profile

MIB = 2**20
NOT_COUNTED = "not counted: Python, torch and a GPU's context (about 1 GiB per process), and fragmentation"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """`unknown`: why there is no estimate, else empty. `refusal`: what is sure not to fit, which a run refuses, too."""

    estimate: MemoryEstimate | None
    needs: tuple[DeviceNeed, ...] = ()
    warnings: tuple[str, ...] = ()
    unknown: str = ""
    refusal: PreflightError | None = None


def refuse_what_cannot_fit(profile: Profile) -> None:
    """Before a run on this machine: PreflightError if its GPUs are too small for what a process holds all the time."""
    from asyncrl_cli.plan.cluster import local_cluster
    from asyncrl_cli.plan.job_plan import compile_job, device_of
    from asyncrl_cli.plan.memory_fit import known_memory_bytes

    cluster = local_cluster()
    if device_of(profile, cluster) == "cpu":
        return
    report = memory_report(profile, compile_job(profile, cluster), known_memory_bytes("cuda"))
    if report.refusal is not None:
        raise report.refusal


def memory_report(profile: Profile, plan: JobPlan, available_bytes: int | None) -> MemoryReport:
    from asyncrl_cli.models.shape import ShapeUnknown, shape_of
    from asyncrl_cli.plan.memory import estimate_memory
    from asyncrl_cli.plan.memory_fit import cannot_fit, device_needs, memory_warnings

    try:
        shape = shape_of(profile.model.path)
    except ShapeUnknown as reason:
        return MemoryReport(estimate=None, unknown=str(reason))
    estimate = estimate_memory(profile, plan, shape, available_bytes)
    refusal = cannot_fit(estimate)
    warnings = () if refusal else tuple(memory_warnings(estimate))
    return MemoryReport(estimate=estimate, needs=tuple(device_needs(estimate)), warnings=warnings, refusal=refusal)


def memory_document(report: MemoryReport) -> dict[str, Any]:
    from dataclasses import asdict

    if report.estimate is None:
        return {"unknown": report.unknown}
    return {
        "estimate": True,
        "parameters": report.estimate.shape.parameters,
        "kv_values_per_token": report.estimate.shape.kv_values_per_token,
        "items": [asdict(item) for item in report.estimate.items],
        "devices": [{**asdict(need), "fits": need.fits} for need in report.needs],
        "remarks": [*report.estimate.shape.remarks, NOT_COUNTED],
    }


def print_memory(report: MemoryReport, plan: JobPlan) -> None:
    from rich.table import Table

    if report.estimate is None:
        stdout().print(f"\nmemory: no estimate: {report.unknown}", soft_wrap=True)
        return
    each = "process" if plan.device == "cpu" else "GPU and process"
    parameters = report.estimate.shape.parameters
    title = f"\nmemory per {each}, an estimate ({report.estimate.shape.model_type}, {parameters:,} parameters)"
    table = Table("role", "what", "where", "when", title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("processes", justify="right")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("meaning")
    for item in report.estimate.items:
        where = "memory" if plan.device == "cpu" else "GPU" if item.place == "device" else "host"
        table.add_row(item.role, item.what, where, item.phase, str(item.processes), size(item.num_bytes), item.how)
    stdout().print(table)
    for line in (*map(_need_line, report.needs), *report.estimate.shape.remarks, NOT_COUNTED):
        stdout().print(line, soft_wrap=True)


def size(num_bytes: int) -> str:
    """In MiB below one GiB, else in GiB."""
    mib = num_bytes / MIB
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"


def _need_line(need: DeviceNeed) -> str:
    who = " and ".join(need.roles)
    text = f"{who} on one {need.device}: about {size(need.num_bytes)} at the peak"
    if need.available_bytes is None:
        return f"{text} (how much a {need.device} has is not known here: --gpu-memory GIB)"
    return f"{text} of {size(need.available_bytes)}: {'fits' if need.fits else 'does not fit'}, by this estimate"
