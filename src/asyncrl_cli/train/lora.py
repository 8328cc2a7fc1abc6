"""LoRA (arXiv:2106.09685): the model's weights are frozen, and every chosen linear layer gets a trained
low-rank product.

    y = W x + alpha / rank * B A x        A: rank x in, uniform at random.  B: out x rank, 0 at the start

Names follow peft: beside `...q_proj.weight` there are `...q_proj.lora_A.weight` and
`...q_proj.lora_B.weight`. Engines get W + alpha / rank * B A under W's name, merged here or by the workers
(models/saved_form.py). peft's own layers are not used: they rename W to `base_layer.weight`, and only these
few lines of them are needed (tests compare the two).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.models.saved_form import merged, scale_of
from asyncrl_cli.profile.schema import LoraSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LoraLinear(torch.nn.Linear):
    """A linear layer with frozen weights and an adapter."""

    def __init__(self, base: torch.nn.Linear, lora: LoraSection, generator: torch.Generator) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale = scale_of(lora)
        self.lora_A = torch.nn.Linear(self.in_features, lora.rank, bias=False)
        self.lora_B = torch.nn.Linear(lora.rank, self.out_features, bias=False)
        torch.nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5), generator=generator)
        torch.nn.init.zeros_(self.lora_B.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias) + self.lora_B(self.lora_A(input)) * self.scale

    def merged_weight(self) -> torch.Tensor:
        """The whole float32 weight with the adapter merged in, without gradient. A collective: the parameters
        are sharded."""
        weight, a, b = (
            cast(DTensor, p.detach()).full_tensor()
            for p in (self.weight, self.lora_A.weight, self.lora_B.weight)
        )
        return merged(weight, a, b, self.scale)


def add_adapters(model: PreTrainedModel, lora: LoraSection, seed: int) -> None:
    """Freeze the model, and replace each chosen layer by a `LoraLinear`. The same seed gives the same
    adapters.

    Raises ConfigError as `chosen` does.
    """
    generator, layers = torch.Generator().manual_seed(seed), chosen(model, lora)
    model.requires_grad_(False)
    for name, base in layers.items():
        parent, _, end = name.rpartition(".")
        setattr(model.get_submodule(parent), end, LoraLinear(base, lora, generator))


def chosen(model: PreTrainedModel, lora: LoraSection) -> dict[str, torch.nn.Linear]:
    """The layers that get an adapter, by name. Raises ConfigError if a name in `lora.target_modules` matches
    no linear layer."""
    head = model.get_output_embeddings()
    linears = {name: m for name, m in model.named_modules() if type(m) is torch.nn.Linear and m is not head}
    ends = {name.rpartition(".")[2] for name in linears}
    if unknown := [end for end in lora.target_modules if end not in ends]:
        raise ConfigError(
            f"lora.target_modules: the model has no linear layer {', '.join(unknown)}",
            hint=f"it has {', '.join(sorted(ends))}; without this key all of them get an adapter",
        )
    return {
        name: layer
        for name, layer in linears.items()
        if name.rpartition(".")[2] in (lora.target_modules or ends)
    }
