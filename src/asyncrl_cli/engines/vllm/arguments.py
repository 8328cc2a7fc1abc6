"""Arguments of vLLM: which there are, and which are not the user's to set. Imports no vLLM: every profile is checked with it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from asyncrl_cli.errors import ConfigError

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


def not_yours(name: str) -> ConfigError | None:
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
