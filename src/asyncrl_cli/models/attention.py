"""Chooses the attention function for the trainer and the transformers engine: `sdpa` if it equals the model's
own (`eager`).

In transformers every model has its own attention function, `eager`, which implements everything the model
defines. torch's `sdpa` is faster, but silently ignores features that it lacks: a soft-cap (Gemma-2), sinks
(gpt-oss), and so on. No list says which models need which features, so the two are compared before anything
is sampled or trained. First, one forward pass compares each layer's own function with sdpa on the same
tensors (`_Comparison`). Then the whole model's logprobs of the same tokens are compared (or its hidden
states, if it has no head).

Legend: B = sequences, T = tokens, V = vocabulary.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

Attention = Literal["sdpa", "eager"]
AttentionOutput = tuple[torch.Tensor, object]
"""The second is the attention's weights, or None."""
AttentionFunction = Callable[..., AttentionOutput]

COMPARISON, TRAINED_SDPA = "asyncrl_comparison", "asyncrl_trained_sdpa"
SAMPLE_BT = (2, 32)
LARGEST_LOGIT = 300.0
"""Attention is also compared with logits scaled up to this size: small weights give logits too small for a
soft-cap to show."""
MAX_LAYER_DIFF = {torch.float32: 0.01, torch.bfloat16: 0.02}
"""Norm of the largest difference of a layer, relative to that of the values. With the largest logits,
rounding to TF32 causes 0.002 (a GPU may do that in float32), to bfloat16 0.002; a soft-cap of 50 causes 0.07,
sinks 0.2."""
MAX_OUTCOME_DIFF = {torch.float32: 0.02, torch.bfloat16: 0.25}
"""The same of the whole model's outcome, relative to its spread. In bfloat16, `eager` itself rounds logits to
a 256th."""

logger = logging.getLogger(__name__)


def own_attention(module: torch.nn.Module) -> AttentionFunction | None:
    """The eager attention function from the Python module that defines this layer; None if there is none to
    exchange."""
    modules = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    found = (getattr(module, "eager_attention_forward", None) for module in modules)
    return next((function for function in found if function is not None), None)


def takes_attention(model: PreTrainedModel) -> bool:
    """Whether the model gets its attention from transformers' AttentionInterface (older models such as Bloom
    do not)."""
    layers = (module for module in model.modules() if hasattr(module, "layer_idx"))
    return any(own_attention(layer) is not None for layer in layers)


def choose_attention(model: PreTrainedModel) -> Attention:
    """Set the model's attention to `sdpa` if that computes the same as the model's own attention, else to
    `eager`.

    The model's parameters must not be sharded, and it must be in eval mode.
    """
    why = _why_eager(model)
    chosen: Attention = "eager" if why else "sdpa"
    model.set_attn_implementation(chosen)
    if why:
        message = "%s uses its own attention (eager), with all scores in memory, and its rows are padded: %s"
        logger.warning(message, model.config.model_type, why)
    return chosen


def trained_sdpa(
    module: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa for a trainer. In bfloat16 on a CPU it is computed in float32 if there is a backward
    pass, which in torch 2.13 takes five to eight times as long in bfloat16: for 8 rows of 112 tokens with 9
    heads 97 ms of one core, in float32 14."""
    slow = query.device.type == "cpu" and query.dtype == torch.bfloat16 and torch.is_grad_enabled()
    given = (query, key, value, attention_mask)
    exact = map(_float32, given) if slow else given
    return sdpa_attention_forward(module, *exact, **kwargs)[0].to(query.dtype), None


AttentionInterface.register(TRAINED_SDPA, trained_sdpa)
AttentionMaskInterface.register(TRAINED_SDPA, sdpa_mask)


def _why_eager(model: PreTrainedModel) -> str:
    """Why sdpa cannot replace the model's own attention, for the log; "" if it can."""
    if not takes_attention(model):
        return "it does not take its attention from transformers' AttentionInterface"
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        return "transformers says that it does not support sdpa"
    vocab_size = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    sample_BT = torch.randint(vocab_size, SAMPLE_BT, generator=generator).to(model.device)
    comparison = _Comparison()
    AttentionInterface.register(COMPARISON, comparison.attend)
    AttentionMaskInterface.register(COMPARISON, eager_mask)
    own = _outcome(model, sample_BT, COMPARISON)
    if not comparison.num_calls:
        return "its layers call no attention that could be compared with sdpa"
    layer = comparison.largest_diff
    if not layer < (limit := MAX_LAYER_DIFF[comparison.dtype]):
        return f"sdpa differs from it by {layer:.2g} in a layer, relatively (at most {limit:g})"
    whole = _relative(_outcome(model, sample_BT, "sdpa"), own, own - own.mean())
    if not whole < (limit := MAX_OUTCOME_DIFF[comparison.dtype]):
        return f"with sdpa the model's outcome differs by {whole:.2g}, relatively (at most {limit:g})"
    message = "%s: sdpa differs from its own attention by %.2g, its outcome by %.2g"
    logger.info(message, model.config.model_type, layer, whole)
    return ""


def _relative(found: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> float:
    """The norm of the difference relative to that of `scale`; infinite if it is not a number."""
    return float(((found - expected).norm() / scale.norm().clamp(min=1e-30)).nan_to_num(nan=torch.inf))


def _outcome(model: PreTrainedModel, sample_BT: torch.Tensor, implementation: str) -> torch.Tensor:
    """Logprobs of the sample's tokens; for a decoder without head its hidden states, scaled to a mean size of
    1."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        result = model(input_ids=sample_BT, use_cache=False)
    if "logits" in result:
        return torch.log_softmax(result.logits.float(), dim=-1).gather(-1, sample_BT[..., None])
    hidden_BTH: torch.Tensor = result.last_hidden_state.float()
    return hidden_BTH / hidden_BTH.abs().mean().clamp(min=1e-30)


class _Comparison:
    """An attention function for transformers that returns the layer's own result and records how far sdpa's
    differs from it: sdpa in the model's dtype, by the kernel that will be used, and the layer's own function
    in float32, on the same values."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.largest_diff = 0.0
        self.dtype = torch.float32

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> AttentionOutput:
        own = own_attention(module)
        assert own is not None, f"{type(module).__name__} calls the interface without a function of its own"
        self.num_calls += 1
        self.dtype = query.dtype
        exact = {name: _float32(value) for name, value in kwargs.items()}
        # as it is, and scaled so that the bound on its attention logits is LARGEST_LOGIT
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        bound = query.float().norm(dim=-1).max() * key.float().norm(dim=-1).max() * abs(scaling)
        sharpened = (query.float() * (LARGEST_LOGIT / bound.clamp(min=1e-30))).to(query.dtype)
        for asked in (query, sharpened):
            inputs = (asked.float(), key.float(), value.float(), _float32(attention_mask))
            theirs = own(module, *inputs, **exact)[0]
            sdpas = sdpa_attention_forward(module, asked, key, value, attention_mask, **kwargs)[0].float()
            self.largest_diff = max(self.largest_diff, _relative(sdpas, theirs, theirs))
        return own(module, query, key, value, attention_mask, **kwargs)


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
