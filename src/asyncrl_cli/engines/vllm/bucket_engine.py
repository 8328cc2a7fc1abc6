"""vLLM's side of a load from memory that a rollout worker shares with it (weights/held.py), on CPUs and GPUs.

`update_weights` does it all, while the model stands still: it maps the shared buffer, and vLLM's own layerwise reload puts the
weights in. Each layer is processed as at the start (CPUs pack linear weights into a layout of their own), then copied into the
storage that it had, which captured graphs know. What the reload leaves out on CPUs is done here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl_cli.weights.held import attached, views


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """`SharedWeights.describe`: all weights of one version, in one update."""

    path: str
    num_bytes: int
    tensors: list[tuple[str, str, list[int], int]]


class BucketEngine(WeightTransferEngine[WeightTransferInitInfo, BucketUpdateInfo]):
    """Made by vLLM in each of its workers; with tensor parallelism each maps the buffer and takes its shards."""

    init_info_cls = WeightTransferInitInfo  # there is nothing to agree on beforehand
    update_info_cls = BucketUpdateInfo
    supports_draft_weight_update = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Not the base class's, which waits for an accelerator, also where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        weights = views(attached(update_info.path, update_info.num_bytes), update_info.tensors)
        load(self.model, self.model_config, weights)

    def _nothing(self, *args: Any) -> None:
        """Before and after an update there is nothing to do."""

    init_transfer_engine = start_weight_update = finish_weight_update = shutdown = _nothing


def load(model: torch.nn.Module, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A whole version, layer by layer."""
    forget_kernels_of_experts(model)
    initialize_layerwise_reload(model)
    model.load_weights(iter(weights))
    finalize_layerwise_reload(model, model_config)
    pack_tied_layers(model)


def forget_kernels_of_experts(model: torch.nn.Module) -> None:
    """On CPUs experts are packed when their kernel is made, and vLLM makes it once: a reload would put plain weights in the place
    of packed ones, and generation would go on with neither the old experts nor the new, without an error. So it is made anew.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and layer.w13_weight.device.type == "cpu":
            method.moe_kernel = None


def pack_tied_layers(model: torch.nn.Module) -> None:
    """Process layers that share one weight anew where they keep a packed copy of it, as vLLM does on CPUs.

    A layer that shares its weight with another one (a tied lm_head) gets no tensor of its own, so the reload leaves its packed
    copy as it was: generation would go on with an old head, without an error.
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
