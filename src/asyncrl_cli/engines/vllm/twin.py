"""A second set of layers beside those of a running vLLM model: loaded and packed while the model generates, then exchanged.

    check_room(weights)  an error if the machine has no memory for them, before any of it is taken
    loaded_twin(model)   the same modules, with tensors of their own (tied ones tied), loaded by vLLM's own layerwise reload.
                         Returned are the changes that an exchange makes: tensors' storages, and the packed matrices (`cpu_linear`)
    exchange(changes)    pointers only, so that it takes no time and cannot fail. The twin then holds the old version

Only for CPUs: on a GPU captured graphs know the storages, and there is seldom memory for all layers twice. And only for models of
layers that are known to keep nothing of their weights but that (`is_exchangeable`): unquantized ones with plain attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psutil
import torch
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info

from asyncrl_cli.errors import AsyncrlError

Change = tuple[Any, Any, str]
"""Two owners and the name of the attribute whose values they exchange."""


def is_exchangeable(model: torch.nn.Module, device: torch.device) -> bool:
    return device.type == "cpu" and all(_is_known(layer) for layer in model.modules())


def _is_known(layer: torch.nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    if is_deferred_attention_layer(layer):
        return type(layer) is Attention and method is None
    return method is None or (type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod) and "cpu_linear" in vars(layer))


def check_room(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """As for the buffer they come in (shared.py): asking the kernel for more than there is does not fail, it ends processes."""
    missing, available = sum(tensor.nbytes for _, tensor in weights), available_bytes()
    if missing > available:
        raise AsyncrlError(
            f"a second set of layers takes {missing / 2**20:.1f} MiB of memory, {available / 2**20:.1f} MiB are free"
        )


def available_bytes() -> int:
    return int(psutil.virtual_memory().available)


@torch.no_grad()
def loaded_twin(model: torch.nn.Module, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> list[Change]:
    """In any thread, while the model runs: nothing of it changes."""
    twin = _twin_of(model)
    try:
        load(twin, model_config, weights)
        return _changes(model, twin)
    finally:
        for layer in twin.modules():  # what vLLM notes of a layer refers to it: it would stay for ever
            if (info := LAYERWISE_INFO.pop(layer, None)) is not None:
                info.restore_metadata = ({}, {})  # by now with loaders that refer to both, and would keep all until a collection


def exchange(pairs: Iterable[Change]) -> None:
    for one, other, name in pairs:
        mine, its = getattr(one, name), getattr(other, name)
        setattr(one, name, its)
        setattr(other, name, mine)


def load(model: torch.nn.Module, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A whole version into a model or its twin, layer by layer: processed as at the start (CPUs pack linear weights into a layout
    of their own), then copied into the storage that the layer had."""
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


def _twin_of(model: torch.nn.Module) -> torch.nn.Module:
    """Modules are copied without being made anew (vLLM's register themselves when they are); what is no tensor is shared."""
    copies: dict[int, torch.Tensor] = {}
    twins = {module: object.__new__(type(module)) for module in model.modules()}
    for module, twin in twins.items():
        own = vars(module)
        vars(twin).update(own)
        kept = own["_non_persistent_buffers_set"]  # not of a version: tables of rotations
        vars(twin).update(
            _modules={name: None if child is None else twins[child] for name, child in own["_modules"].items()},
            _parameters={name: _copy(tensor, copies) for name, tensor in own["_parameters"].items()},
            _buffers={name: tensor if name in kept else _copy(tensor, copies) for name, tensor in own["_buffers"].items()},
            _non_persistent_buffers_set=set(kept),
        )
        known, info = get_layerwise_info(module), get_layerwise_info(twin)
        parameters, buffers = ({name: _copy(tensor, {}) for name, tensor in kind.items()} for kind in known.restore_metadata)
        info.restore_metadata, info.restore_device = (parameters, buffers), known.restore_device
    return twins[model]


def _copy(tensor: torch.Tensor | None, copies: dict[int, torch.Tensor]) -> torch.Tensor | None:
    """With its attributes, among them its loader. Values too: what a version does not bring stays as it is."""
    if tensor is None:
        return None
    if id(tensor) not in copies:
        copy = tensor.data.clone()
        copy.__class__ = tensor.__class__
        copy.__dict__ = tensor.__dict__.copy()
        copies[id(tensor)] = copy
    return copies[id(tensor)]


def _changes(model: torch.nn.Module, twin: torch.nn.Module) -> list[Change]:
    """Each tensor once, however many layers share it."""
    found: dict[int, Change] = {}
    for layer, other in zip(model.modules(), twin.modules(), strict=True):
        for own, new in ((layer._parameters, other._parameters), (layer._buffers, other._buffers)):
            assert own.keys() == new.keys(), f"{type(layer).__name__} has {sorted(own)}, its twin {sorted(new)}"
            found |= {id(tensor): (tensor, new[name], "data") for name, tensor in own.items() if tensor is not new[name]}
        if "cpu_linear" in vars(layer):
            found[id(layer)] = (layer, other, "cpu_linear")
    return list(found.values())
