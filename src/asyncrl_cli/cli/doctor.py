"""`asyncrl doctor`: what asyncrl finds on this machine, and what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli import __version__
from asyncrl_cli.cli.console import print_json, say, stdout
from asyncrl_cli.cli.options import JsonOption
from asyncrl_cli.errors import PreflightError

EXAMPLES = """[bold]Examples[/]

  asyncrl doctor

  asyncrl doctor --json || echo something needed is missing

  asyncrl doctor --fix"""

NEEDED = {
    "ray": "2.60.",
    "torch": "2.13.",
    "transformers": "5.19.0",
    "reasoning-gym": "",
    "numpy": "",
    "safetensors": "",
}
"""Packages, with the start of the version that this asyncrl works with; `pyproject.toml` says why."""
IMPORT_TIMEOUT_S = 180.0
"""vLLM takes 15 s on an idle machine."""
LEAST_SHARED_MEMORY_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `ok` is None for what is only information, and False for what is needed and missing."""

    what: str
    found: str
    ok: bool | None = None
    hint: str = ""


def command(
    as_json: JsonOption = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Uninstall packages that were installed with vLLM and cannot be loaded with this torch.")
    ] = False,
) -> None:
    """Check this machine: versions, cores, GPUs, Ray, engines. Exits with 3 if something that is needed is missing."""
    if fix and _remove_broken_packages():
        # A failed import leaves its traces in this process: what is left is looked at in a fresh one.
        again = [sys.executable, "-m", "asyncrl_cli", "doctor", *(["--json"] if as_json else [])]
        raise typer.Exit(subprocess.run(again, check=False).returncode)
    findings = list(examine())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(3)


def _remove_broken_packages() -> bool:
    """Whether there were any."""
    from asyncrl_cli.engines.vllm.preflight import broken_packages

    if not (broken := broken_packages()):
        return False
    listed = ", ".join(broken)
    say(f"uninstalling {listed}: not usable beside this torch, and not needed by vLLM")
    done = subprocess.run([sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", *broken], check=False)
    if done.returncode:
        raise PreflightError(f"pip could not uninstall {listed}", hint=f"remove them by hand: pip uninstall {' '.join(broken)}")
    return True


def examine() -> Iterator[Finding]:
    from asyncrl_cli.engines.vllm.preflight import broken_packages

    yield Finding("asyncrl", __version__)
    yield Finding("python", sys.version.split()[0], sys.version_info >= (3, 11), "asyncrl needs 3.11 or newer")
    yield from (_package(name, start) for name, start in NEEDED.items())
    yield from (_machine(), _cpu(), _threads(), _shared_memory(), _gpus())
    yield _importable("ray", "ray")
    yield _importable("engine transformers", "transformers.generation.continuous_batching")
    hint = "asyncrl doctor --fix removes what vLLM does not need"
    yield from (Finding(name, "does not load beside this torch", False, hint) for name in broken_packages())
    yield _vllm()


def _package(name: str, start: str) -> Finding:
    from importlib import metadata

    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        found = ""
    wanted = f"{name}=={start}*" if start.endswith(".") else f"{name}=={start}" if start else name
    return Finding(name, found or "missing", bool(found) and found.startswith(start), f"pip install '{wanted}'")


def _machine() -> Finding:
    from asyncrl_cli.plan.cluster import usable_cores

    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    return Finding("machine", f"{usable_cores()} cores, {memory_gib:.0f} GiB memory, {free_gib:.0f} GiB disk free here")


def _cpu() -> Finding:
    from asyncrl_cli.plan.cluster import computes_bfloat16, cpu_facts, matrix_features

    features = matrix_features()
    if features is None:
        return Finding("CPU", "its instructions are not known on this system")
    meaning = "computes in bfloat16 as well as in float32"
    if not computes_bfloat16():
        meaning = "has no bfloat16 instructions: model.dtype = bfloat16 would be emulated, several times slower than float32"
    name = cpu_facts().get("model name", "CPU")
    return Finding("CPU", f"{name}: {' '.join(features) or 'no vector instructions that count here'}; {meaning}")


def _threads() -> Finding:
    """On CPUs; where there are GPUs, they compute."""
    from asyncrl_cli.plan.cluster import usable_cores
    from asyncrl_cli.plan.counts import cpu_counts
    from asyncrl_cli.profile.schema import Profile

    cores, load, threads = usable_cores(), os.getloadavg()[0], cpu_counts(Profile()).cpus
    found = f"a run on the CPU computes with {threads} (one for a trainer, one for a rollout worker; placement.cpus_per_worker)"
    found += f" and builds its first model with 1; load {load:.1f} on {cores} cores"
    if load + threads > cores + 0.5:
        found += ": what else runs takes its share, and a run takes longer by as much"
    return Finding("threads", found)


def _shared_memory() -> Finding:
    """Ray keeps its objects there; with too little it falls back to the disk."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shared memory", "no /dev/shm")
    free = shutil.disk_usage(path).free
    is_enough = True if free >= LEAST_SHARED_MEMORY_BYTES else None
    hint = "give the container more, as docker run --shm-size=1g"
    return Finding("shared memory", f"{free / 2**20:.0f} MiB free in /dev/shm", is_enough, hint)


def _gpus() -> Finding:
    from asyncrl_cli.plan.cluster import local_cluster

    count = local_cluster().gpus
    if not count:
        return Finding("GPUs", "none: runs use the CPU")
    try:
        import torch

        usable = torch.cuda.is_available()
    except ImportError:
        usable = False
    hint = "this torch is built without CUDA, or the driver is missing; --set placement.device=cpu goes without"
    return Finding("GPUs", str(count), usable, hint)


def _vllm() -> Finding:
    """Optional; but one that is installed has to work."""
    from asyncrl_cli.engines.vllm.preflight import VLLM_VERSION, install_command, installed_version
    from asyncrl_cli.plan.cluster import local_cluster

    found, line = installed_version(), install_command("cuda" if local_cluster().gpus else "cpu")
    if found is None:
        return Finding("engine vllm", "not installed (optional)", hint=line)
    if found.split("+")[0] != VLLM_VERSION:
        return Finding("engine vllm", f"{found}, asyncrl works with {VLLM_VERSION} (optional)", hint=line)
    say("importing vLLM, which takes a while")
    return _importable("engine vllm", "vllm.v1.engine.async_llm", f"{found}, ", line)


def _importable(what: str, module: str, version: str = "", hint: str = "install asyncrl again: pip install .") -> Finding:
    if wrong := _import_fails(module):
        return Finding(what, f"{version}cannot be imported: {wrong}", False, hint)
    return Finding(what, f"{version}imports", True)


def _import_fails(module: str) -> str:
    """Why a fresh process cannot import it; "" if it can. Here it would stay, with its warnings."""
    child = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(child, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it takes longer than {IMPORT_TIMEOUT_S:g} s"
    said = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
    return said[-1] if done.returncode else ""


def _print(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    marks = {True: Text("ok", style="green"), False: Text("missing", style="red"), None: Text("")}
    for finding in findings:
        hint = f"  hint: {finding.hint}" if finding.hint and finding.ok is not True else ""
        table.add_row(finding.what, marks[finding.ok], Text(finding.found + hint))
    stdout().print(table)
