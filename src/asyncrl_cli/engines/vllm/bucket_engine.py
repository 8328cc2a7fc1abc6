"""Loads weights into vLLM from memory that the rollout worker shares with it (weights/receivers.py), on CPUs and
GPUs.

`update_weights` runs while generation is paused. It maps the shared buffer, and vLLM's layerwise reload loads
the weights. Each layer is processed as at startup (on CPUs, linear weights are packed into a special layout),
then copied into its old storage, which captured graphs refer to. On CPUs the reload misses experts and tied
layers; `load` handles them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl_cli.weights.buckets import mapped_tensors


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """What `SharedWeights.describe` returns: all weights of one version, in one update."""

    path: str
    num_bytes: int
    tensors: list[tuple[str, str, list[int], int]]


class BucketEngine(WeightTransferEngine[WeightTransferInitInfo, BucketUpdateInfo]):
    """vLLM makes one in each of its workers. With tensor parallelism each worker maps the buffer and takes
    its shards."""

    init_info_cls = WeightTransferInitInfo  # there is nothing to set up
    update_info_cls = BucketUpdateInfo
    supports_draft_weight_update = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Overridden because the base class synchronizes an accelerator even where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        weights = mapped_tensors(update_info.path, update_info.num_bytes, update_info.tensors)
        load(self.model, self.model_config, weights)

    def _nothing(self, *args: Any) -> None:
        """Used for the hooks before and after an update, which need nothing here."""

    init_transfer_engine = start_weight_update = finish_weight_update = shutdown = _nothing


def load(model: torch.nn.Module, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load a whole version into the model, layer by layer."""
    forget_kernels_of_experts(model)
    initialize_layerwise_reload(model)
    model.load_weights(iter(weights))
    finalize_layerwise_reload(model, model_config)
    pack_tied_layers(model)


def forget_kernels_of_experts(model: torch.nn.Module) -> None:
    """Make vLLM create the experts' CPU kernels again in the reload.

    On CPUs, vLLM packs experts once, when it creates their kernel. A reload would replace packed weights with
    plain ones, and generation would continue with wrong experts, without an error.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and layer.w13_weight.device.type == "cpu":
            method.moe_kernel = None


def pack_tied_layers(model: torch.nn.Module) -> None:
    """Repack layers that share a weight and keep a packed copy of it, as vLLM does on CPUs.

    A layer that shares its weight with another one (a tied lm_head) gets no tensor of its own, so the reload
    leaves its packed copy unchanged: generation would continue with an old head, without an error.
    """
    owners: dict[int, list[torch.nn.Module]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and weight.numel():
            owners.setdefault(weight.data_ptr(), []).append(layer)
    for layers in owners.values():
        for layer in layers if len(layers) > 1 else ():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase) and hasattr(layer, "cpu_linear"):
                method.process_weights_after_loading(layer)
