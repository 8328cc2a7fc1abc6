"""What of a profile vLLM would refuse, told before it is imported: every profile is checked with this."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.profile.arithmetic import tensor_parallel_size
from asyncrl_cli.profile.schema import Profile, RolloutSection
from asyncrl_cli.weights.probes import PROBE_TOKENS

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
"""Arguments of vLLM that have a key of ours (the value), or that asyncrl relies on."""


def max_model_len(rollout: RolloutSection) -> int:
    """vLLM scores a sequence as a prompt, with room for one token more: a probe fits, too."""
    return rollout.max_model_len or max(rollout.max_prompt_tokens + rollout.max_response_tokens, PROBE_TOKENS + 1)


def conflicts(profile: Profile) -> Iterator[ConfigError]:
    """What can be told without asking vLLM."""
    yield from filter(None, map(_not_yours, profile.rollout.engine_args))
    yield from _lengths(profile)
    yield from _sampling(profile)


def _lengths(profile: Profile) -> Iterator[ConfigError]:
    rollout = profile.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    needed, what = longest, "max_prompt_tokens + max_response_tokens"
    if profile.weights.probe_sequences and longest <= PROBE_TOKENS:
        needed, what = PROBE_TOKENS + 1, "a probe (weights.probe_sequences) and one token"
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        yield ConfigError(
            f"rollout.max_model_len = {rollout.max_model_len} is less than {what} = {needed}",
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
    """ConfigError for one of the user's arguments that vLLM would refuse, or that is not theirs to set.

    `known`: the names of its AsyncEngineArgs; None where nobody can tell them.
    """
    engine_args = profile.rollout.engine_args
    for name in engine_args:
        if (error := _not_yours(name)) is not None:
            raise error
        if known is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "names are those of vLLM's AsyncEngineArgs"
            if near and (ours := _not_yours(near[0])) is not None:
                hint = ours.hint
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


def _not_yours(name: str) -> ConfigError | None:
    if name not in OURS:
        return None
    instead = f"--set {OURS[name]}=..." if OURS[name] else "asyncrl sets it, and relies on it"
    return ConfigError(f"rollout.engine_args.{name} is not yours to set", hint=instead)


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
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if not {"EngineArgs", "AsyncEngineArgs"} <= classes.keys():
        return None
    names = frozenset(_fields(classes["EngineArgs"]) | _fields(classes["AsyncEngineArgs"]))
    return names if OURS.keys() <= names else None


def _fields(dataclass: ast.ClassDef) -> set[str]:
    annotated = [node for node in dataclass.body if isinstance(node, ast.AnnAssign)]
    return {node.target.id for node in annotated if isinstance(node.target, ast.Name)}
