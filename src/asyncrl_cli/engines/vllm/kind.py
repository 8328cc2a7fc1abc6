"""vLLM as the rest of the code knows it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncrl_cli.engines.port import Engine, EngineKind
from asyncrl_cli.engines.vllm import preflight
from asyncrl_cli.engines.vllm.launch import memory
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, Place, Profile, WeightsSection

if TYPE_CHECKING:
    import torch

    from asyncrl_cli.weights.held import HeldVersions


def _make(profile: Profile, place: Place, on_running: Callable[[int], None]) -> Engine:
    from asyncrl_cli.engines.vllm.engine import VllmEngine

    return VllmEngine(profile, place, on_running)


def _rank_zero_end(weights: WeightsSection, held: HeldVersions, device: torch.device) -> Any:
    if weights.transport == "nccl":
        from asyncrl_cli.engines.vllm.nccl import NcclGroup, NcclLinks

        return NcclLinks(held, lambda meeting: NcclGroup(meeting, device), timeout_s=weights.timeout_s)
    from asyncrl_cli.engines.vllm.ipc import IpcExports, produce_on

    return IpcExports(held, partial(produce_on, device), buffer_bytes=weights.load_bucket_size_mb * 2**20)


KIND = EngineKind(
    make=_make,
    keys=frozenset({"tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "enforce_eager", "engine_args"}),
    direct_transports=frozenset(DIRECT_TRANSPORTS),
    rank_zero_end=_rank_zero_end,
    memory=memory,
    conflicts=preflight.conflicts,
    check_arguments=preflight.check_arguments,
    check_here=preflight.check_vllm,
    check_driver=preflight.check_stray_packages,
)
