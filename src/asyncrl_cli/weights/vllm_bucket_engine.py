"""vLLM's side of a load: shared weights into the running model, in place, on CPUs and GPUs.

    start_weight_update   nothing
    update_weights        map the shared buffer, look at it, then hand its tensors to the model's own loaders
    finish_weight_update  process what is left, pack tied layers again, let the buffer go

vLLM's layerwise reload does the work: a layer whose tensors have all arrived is processed as at the start (CPUs pack linear
weights into a layout of their own) and copied into the storage that it had, so that captured graphs stay valid. Extra memory is
one layer's. It copies from the buffer to the layer, with no copy between.

A layer that shares its weight with another one (a tied lm_head) gets no tensor of its own, so the reload leaves its packed copy
as it was: generation would go on with an old head, without an error. `pack_tied_layers` packs them again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl_cli.weights.shared import attached, views


def is_worth_a_warning(record: logging.LogRecord) -> bool:
    """vLLM's reload says of every layer that got no tensor that it failed to load. A rotary embedding has none to get: its table of
    angles follows from the configuration, and is put back as it was."""
    named = record.args[0] if isinstance(record.args, tuple) and record.args else ""
    return not (str(record.msg).endswith("Failed to load weights") and str(named).endswith("RotaryEmbedding"))


logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(is_worth_a_warning)


@dataclass
class BucketInitInfo(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """`SharedWeights.describe`: all weights of one version, in one update."""

    path: str
    num_bytes: int
    tensors: list[tuple[str, str, list[int], int]]


class BucketEngine(WeightTransferEngine[BucketInitInfo, BucketUpdateInfo]):
    """Made by vLLM in each of its workers; with tensor parallelism each maps the buffer and takes its shards."""

    init_info_cls = BucketInitInfo
    update_info_cls = BucketUpdateInfo
    supports_draft_weight_update = False

    _weights: list[tuple[str, torch.Tensor]] | None = None

    def init_transfer_engine(self, init_info: BucketInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._weights = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Not the base class's, which synchronizes an accelerator also where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """Nothing has changed if it raises before the first layer is prepared; the views live until the end of the update,
        because a layer with elements that are not loaded (padding) is processed only then."""
        self._weights = views(attached(update_info.path, update_info.num_bytes), update_info.tensors)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(self._weights))

    def finish_weight_update(self) -> None:
        if self._weights is None:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_layers(self.model)
        self._weights = None

    def shutdown(self) -> None:
        self._weights = None


def pack_tied_layers(model: torch.nn.Module) -> None:
    """Process layers that share one weight anew where they keep a packed copy of it, as vLLM does on CPUs."""
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
