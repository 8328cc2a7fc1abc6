"""Converts a model's tensors between memory and its files: transformers joins or renames some in memory, such
as experts.

Published weights have the names and shapes of the files, because other programs (vLLM's loaders) expect them.
The conversions are those of transformers' `save_pretrained` and `from_pretrained`. None spans several layers,
so layers can be converted one by one. LoRA adapters, which exist in memory only, have their names and their
arithmetic here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from asyncrl_cli.base.errors import ConfigError, first_names
from asyncrl_cli.profile.schema import LoraSection

Tensors = dict[str, torch.Tensor]
ADAPTER = ".lora_"
"""Part of the name of every LoRA adapter's parameter, and of no other parameter."""


def adapter_names(weight: str) -> tuple[str, str]:
    """The names of the LoRA parameters A and B of a weight."""
    stem = weight.removesuffix(".weight") + ADAPTER
    return f"{stem}A.weight", f"{stem}B.weight"


def scale_of(lora: LoraSection) -> float:
    return lora.alpha / lora.rank


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale * B A, in float32."""
    return torch.addmm(weight.float(), b, a, alpha=scale)


def adapted_layers(model: PreTrainedModel, lora: LoraSection) -> dict[str, torch.nn.Linear]:
    """The layers that get an adapter, by name. Raises ConfigError if a name in `lora.target_modules` matches
    no linear layer."""
    head = model.get_output_embeddings()
    linears = {name: m for name, m in model.named_modules() if type(m) is torch.nn.Linear and m is not head}
    ends = {name.rpartition(".")[2] for name in linears}
    if unknown := [end for end in lora.target_modules if end not in ends]:
        why = f"lora.target_modules: the model has no linear layer {', '.join(unknown)}"
        hint = f"it has {', '.join(sorted(ends))}; without this key all of them get an adapter"
        raise ConfigError(why, hint=hint)
    chosen = lora.target_modules or ends
    return {name: layer for name, layer in linears.items() if name.rpartition(".")[2] in chosen}


def skeleton(model_dir: Path | str, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model that a configuration describes, on the meta device: tensors with names and shapes, but
    without memory."""
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model


def persistent_buffers(model: torch.nn.Module) -> Tensors:
    """The buffers that are saved to files."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


class SavedForm:
    """Conversions for one model. `converts`: whether its files differ from memory; if not, tensors pass
    through unchanged. `adapted`: names of the layers whose adapters make up a version; none if versions are
    whole."""

    adapted: tuple[str, ...] = ()

    def __init__(self, empty: PreTrainedModel) -> None:
        """`empty`: the model's `skeleton`. (A loaded model would convert to the form of the files that it was
        loaded from.)"""
        empty.tie_weights()
        self._empty = empty
        mapping = get_model_conversion_mapping(empty, add_legacy=False)
        self.converts = any(not isinstance(conversion, PrefixChange) for conversion in mapping)

    def to_files(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Convert tensors to the form of the files. `tensors`: all of a model, or those of whole layers."""
        return dict(revert_weight_conversion(self._empty, dict(tensors))) if self.converts else dict(tensors)

    def to_memory(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Convert all of a model's tensors from the form of the files, to all their names in memory.
        Converted tensors are float32 copies, because transformers changes the default dtype of the whole
        process while it loads another dtype."""
        if not self.converts:
            return tensors
        config = deepcopy(self._empty.config)
        model = type(self._empty).from_pretrained(
            None, config=config, state_dict=dict(tensors), dtype=torch.float32
        )
        return dict(model.state_dict())

    @property
    def memory(self) -> Tensors:
        """Parameters and persistent buffers by their names in memory, tied ones once, as meta tensors."""
        parameters = {name: parameter.detach() for name, parameter in self._empty.named_parameters()}
        return parameters | persistent_buffers(self._empty)

    @property
    def required(self) -> Tensors:
        """The parameters that a version must contain, under their names in files."""
        return self.to_files({name: parameter.detach() for name, parameter in self._empty.named_parameters()})

    @property
    def known(self) -> Tensors:
        """The tensors that a version may contain, under their names in files: tied ones under all names, and
        buffers."""
        return self.to_files(self._empty.state_dict())

    def check(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Raises ValueError unless `weights` has every parameter (tied ones once or more), nothing unknown,
        and the same shapes.

        Dtypes may differ (copying casts them), but a tensor must be floating point on both sides or on
        neither.
        """
        known = self.known
        mine = [name for name in weights if name in known]
        found = {
            "missing": sorted(self.required.keys() - weights.keys()),
            "unknown": sorted(weights.keys() - known.keys()),
            "wrong shape": [name for name in mine if weights[name].shape != known[name].shape],
            "wrong dtype": [
                name for name in mine if weights[name].is_floating_point() != known[name].is_floating_point()
            ],
        }
        if problems := [f"{what} {first_names(names)}" for what, names in found.items() if names]:
            why = f"do not fit the engine's model: {'; '.join(problems)}"
            raise ValueError(f"weights of version {version} {why}")


class AdapterForm(SavedForm):
    """For versions that have LoRA's adapters alone, by the same names everywhere."""

    def __init__(self, empty: PreTrainedModel, lora: LoraSection) -> None:
        super().__init__(empty)
        layers = adapted_layers(empty, lora)
        self.adapted, self._adapters = tuple(layers), Tensors()
        for name, layer in layers.items():
            a, b = adapter_names(name)
            self._adapters[a] = torch.empty(lora.rank, layer.in_features, device="meta")
            self._adapters[b] = torch.empty(layer.out_features, lora.rank, device="meta")

    @property
    def required(self) -> Tensors:
        return self._adapters

    @property
    def known(self) -> Tensors:
        return self._adapters
