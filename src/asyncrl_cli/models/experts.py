"""The choice of experts in a mixture-of-experts model, recorded or replayed (`trainer.router_replay`).

In transformers a router of any model calls `topk` once over all experts; everything else about it, such as
groups, biases and normalisation, differs from model to model. So the call is intercepted, and nothing is
written anew: a replayed choice takes the place of the router's own, with the values that the router has for
it now. Gradients flow into the router through these values, as they do without a replay.

Source: Ma et al. 2025 (arXiv:2510.11370), rollout routing replay (R3).

Legend: Q = positions of a forward pass, K = experts per token, L = layers with experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from asyncrl_cli.base.errors import ConfigError

RECORDABLE, ROUTER = "_can_record_outputs", "router_logits"
"""Of a model's class in transformers: what can be recorded, and under which name its routers are found."""
NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


class Routing:
    """Wraps a model's routers. `recorded`: unless None, each router's choice (Q, K) in the last forward
    pass, by layer. `replayed_QLK`: unless None, the choice for each position, or -1 where the router chooses
    itself. It has to stay until the backward pass has ended, which may compute layers again."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ConfigError for a dense model."""
        config = model.config.get_text_config()
        kinds = getattr(model, RECORDABLE, None) or {}
        kind = getattr(kinds.get(ROUTER), "target_class", None)
        routers = {
            name: module
            for name, module in model.named_modules()
            if kind is not None and isinstance(module, kind)
        }
        if not routers:
            why = f"a {config.model_type} model has no experts whose choice could be replayed"
            raise ConfigError(
                f"trainer.router_replay = true: {why}", hint="--set trainer.router_replay=false"
            )
        self.num_layers, self.top_k = len(routers), int(config.num_experts_per_tok)
        self.layers = [next(int(part) for part in name.split(".") if part.isdigit()) for name in routers]
        """The number of each layer with experts among all layers, from the names of modules."""
        self.num_experts = next(int(getattr(config, name)) for name in NUM_EXPERTS if hasattr(config, name))
        self.recorded: dict[int, torch.Tensor] | None = None
        self.replayed_QLK: torch.Tensor | None = None
        for layer, router in enumerate(routers.values()):
            router.forward = partial(self._route, layer, router.forward)

    def _route(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Choice(self, layer):
            return forward(*args, **kwargs)


class _Choice(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, routing: Routing, layer: int) -> None:
        super().__init__()
        self._routing, self._layer = routing, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, routing = func(*args, **(kwargs or {})), self._routing
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores = args[0] if args else kwargs["input"]
        if (scores.shape[-1], found.indices.shape[-1]) != (routing.num_experts, routing.top_k):
            return found  # of groups of experts
        if routing.recorded is not None:
            routing.recorded[self._layer] = found.indices
        if routing.replayed_QLK is None:
            return found
        replayed_QK = routing.replayed_QLK[:, self._layer].to(found.indices.dtype).view_as(found.indices)
        indices_QK = torch.where(replayed_QK < 0, found.indices, replayed_QK)
        return torch.return_types.topk((scores.gather(-1, indices_QK), indices_QK))
