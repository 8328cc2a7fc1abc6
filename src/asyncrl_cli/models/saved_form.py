"""A model's tensors as its own files have them. transformers joins or renames some in memory: a layer's experts, for one.

Files are what other programs know (vLLM's loaders), so published weights have their names, too. The conversions are transformers'
own, those of `save_pretrained` and `from_pretrained`. They never reach across layers, so a layer at a time can be converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from asyncrl_cli.errors import first_names

Tensors = dict[str, torch.Tensor]


def skeleton(model_dir: Path | str, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model that a configuration describes, without memory for its weights: names and shapes."""
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model


def persistent_buffers(model: torch.nn.Module) -> Tensors:
    """The buffers that files have."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


class SavedForm:
    """`converts`: whether files differ from memory at all. Where they do not, nothing is copied or looked at."""

    def __init__(self, empty: PreTrainedModel) -> None:
        """`empty`: the model's `skeleton`. A loaded model would convert to the form of the files that it was loaded from."""
        empty.tie_weights()
        self._empty = empty
        mapping = get_model_conversion_mapping(empty, add_legacy=False)
        self.converts = any(not isinstance(conversion, PrefixChange) for conversion in mapping)

    def to_files(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """All tensors of a model, or those of whole layers."""
        return dict(revert_weight_conversion(self._empty, dict(tensors))) if self.converts else dict(tensors)

    def to_memory(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """All of a model's tensors, as files have them, under all their names in memory. If it converts they are copies in float32:
        while transformers loads another dtype, that is the default dtype of the whole process."""
        if not self.converts:
            return dict(tensors)
        config = deepcopy(self._empty.config)
        model = type(self._empty).from_pretrained(None, config=config, state_dict=dict(tensors), dtype=torch.float32)
        return dict(model.state_dict())

    @property
    def memory(self) -> Tensors:
        """Names and shapes of parameters and persistent buffers, tied ones once: tensors without memory."""
        return {name: parameter.detach() for name, parameter in self._empty.named_parameters()} | persistent_buffers(self._empty)

    @property
    def required(self) -> Tensors:
        """The parameters of `memory` as files have them: what a version must bring."""
        return self.to_files({name: parameter.detach() for name, parameter in self._empty.named_parameters()})

    @property
    def known(self) -> Tensors:
        """What a version may bring: tied ones under all their names, and buffers."""
        return self.to_files(self._empty.state_dict())

    def check(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """ValueError unless `weights` has every parameter (tied ones once or more), nothing else, and the same shapes.

        Dtypes may differ (a copy casts), but what is floating point must be so on both sides.
        """
        known = self.known
        mine = [name for name in weights if name in known]
        found = {
            "missing": sorted(self.required.keys() - weights.keys()),
            "unknown": sorted(weights.keys() - known.keys()),
            "wrong shape": [name for name in mine if weights[name].shape != known[name].shape],
            "wrong dtype": [name for name in mine if weights[name].is_floating_point() != known[name].is_floating_point()],
        }
        if problems := [f"{what} {first_names(names)}" for what, names in found.items() if names]:
            raise ValueError(f"weights of version {version} do not fit the engine's model: {'; '.join(problems)}")
