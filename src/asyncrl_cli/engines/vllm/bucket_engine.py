"""In the vLLM processes that hold the model: loads weights, or LoRA's adapters alone, from memory that the
rollout worker shares with them (weights/receivers.py), on CPUs and GPUs.

vLLM's layerwise reload loads whole weights, while generation is paused. Each layer is processed as at startup
(on CPUs, linear weights are packed into a special layout), then copied into its old storage, which captured
graphs refer to. On CPUs the reload misses experts and tied layers, so they are handled here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl_cli.base.errors import first_names
from asyncrl_cli.engines.vllm.plugin import ADAPTER_ID
from asyncrl_cli.weights.buckets import mapped_tensors


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What `SharedWeights.describe` returns: all weights of one version, in one update."""

    path: str
    num_bytes: int
    tensors: list[tuple[str, str, list[int], int]]


class BucketEngine(WeightTransferEngine[WeightTransferInitInfo, BucketUpdateInfo]):  # type: ignore[misc]
    """vLLM makes one in each of its workers. With tensor parallelism each worker maps the buffer and takes
    its shards."""

    init_info_cls = WeightTransferInitInfo  # there is nothing to set up
    update_info_cls = BucketUpdateInfo
    supports_draft_weight_update = False

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load a whole version into the model, layer by layer. Overridden because the base class synchronizes
        an accelerator even where there is none."""
        info = self.parse_update_info(update_info)
        for layer in self.model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod) and layer.w13_weight.device.type == "cpu":
                # On CPUs, vLLM packs experts once, when it creates their kernel. A reload would replace
                # packed weights with plain ones, and generation would continue with wrong experts, without an
                # error. So the reload has to create the kernel again.
                method.moe_kernel = None
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(mapped_tensors(info.path, info.num_bytes, info.tensors)))
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_layers(self.model)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _nothing(self, *args: object) -> None:
        """Used for the hooks around an update, which need nothing here."""

    receive_weights = init_transfer_engine = start_weight_update = _nothing
    finish_weight_update = shutdown = _nothing


class AdapterWorker:
    """vLLM mixes it into its worker class (`worker_extension_cls`), with `lora.sync = "adapter"`."""

    def load_adapters(self: Any, update_info: dict[str, Any], rank: int, alpha: float) -> None:
        """Put these adapters in the last ones' place, for running requests, too. Not a weight update of
        vLLM's, at whose end it would drop all adapters.

        ValueError, with nothing changed, if vLLM would leave one of them out without a word.
        """
        info, manager = BucketUpdateInfo(**update_info), self.get_model().lora_manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        adapters = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            dict(mapped_tensors(info.path, info.num_bytes, info.tensors)),
            PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )
        reached = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
        if foreign := sorted(adapters.loras.keys() - reached):
            raise ValueError(f"vLLM's LoRA does not reach {first_names(foreign)}")
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapters)
        manager.activate_adapter(ADAPTER_ID)


def pack_tied_layers(model: torch.nn.Module) -> None:
    """Repack layers that share a weight and keep a packed copy of it, as vLLM does on CPUs.

    A layer that shares its weight with another one (a tied lm_head) gets no tensor of its own, so the reload
    leaves its packed copy unchanged: generation would continue with an old head, without an error.
    """
    owners: dict[int, list[torch.nn.Module]] = {}
    for layer in model.modules():
        weight = dict(layer.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.numel():
            owners.setdefault(weight.data_ptr(), []).append(layer)
    for layers in owners.values():
        for layer in layers if len(layers) > 1 else ():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase) and hasattr(layer, "cpu_linear"):
                method.process_weights_after_loading(layer)
