"""Arguments of vLLM that are not the user's to set. They are checked with every profile, before anything knows of vLLM itself."""

from __future__ import annotations

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
"""The key of ours that sets it, if there is one; asyncrl relies on all of them."""


def not_yours(name: str) -> ConfigError | None:
    if name not in OURS:
        return None
    instead = f"--set {OURS[name]}=..." if OURS[name] else "asyncrl sets it, and relies on it"
    return ConfigError(f"rollout.engine_args.{name} is not yours to set", hint=instead)
