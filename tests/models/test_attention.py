"""sdpa is chosen if it differs from the model's own attention by no more than rounding on any device."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from asyncrl_cli.models import attention

SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
sdpa = attention.sdpa_attention_forward


def model_of(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32)
    model: PreTrainedModel = (
        AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    )
    return model


def in_tf32(values: torch.Tensor) -> torch.Tensor:
    """Rounded to 10 bits of mantissa, as GPUs may do in products of float32."""
    return ((values.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_a_kernel_that_rounds_to_tf32_is_taken_for_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounding(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return sdpa(module, in_tf32(query), in_tf32(key), in_tf32(value), mask, **kwargs)

    monkeypatch.setattr(attention, "sdpa_attention_forward", rounding)
    assert attention.choose_attention(model_of()) == "sdpa"


def test_the_kernel_of_the_models_dtype_is_the_one_that_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = set()

    def recorded(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        dtypes.add(query.dtype)
        return sdpa(module, query, *args, **kwargs)

    monkeypatch.setattr(attention, "sdpa_attention_forward", recorded)
    assert attention.choose_attention(model_of(torch.bfloat16)) == "sdpa"
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_with_a_soft_cap_of_its_own_is_not_taken_and_the_log_says_why(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capped(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        heads = (each.repeat_interleave(2, dim=1) for each in (key, value))
        keys, values = heads
        scores = 50 * torch.tanh(query @ keys.transpose(2, 3) * scaling / 50) + mask
        return (scores.softmax(-1) @ values).transpose(1, 2), None

    monkeypatch.setattr(attention, "sdpa_attention_forward", capped)
    assert attention.choose_attention(model_of(dtype)) == "eager"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "qwen3 uses its own attention (eager)" in warning
    assert "sdpa differs from it by" in warning


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "masked"])
def test_attention_that_is_trained_in_bfloat16_on_a_cpu_has_the_gradients_of_float32(is_causal):
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(2, 4, 12, 8, generator=generator).bfloat16() for _ in range(3)]
    seen = torch.ones(12, 12, dtype=torch.bool).tril()[None, None].expand(2, 1, 12, 12)
    how = {"scaling": 0.5, "is_causal": is_causal}
    module = SimpleNamespace(num_key_value_groups=1)
    found, expected = [], []
    for dtype, results in ((torch.bfloat16, found), (torch.float64, expected)):
        inputs = [one.detach().clone().to(dtype).requires_grad_() for one in heads]
        if dtype == torch.bfloat16:
            output, _ = attention.trained_sdpa(module, *inputs, None if is_causal else seen, **how)
            assert output.dtype == dtype
        else:  # written out
            query, key, value = inputs
            scores = (0.5 * query @ key.mT).masked_fill(~seen, -torch.inf)
            output = (scores.softmax(-1) @ value).transpose(1, 2)
        output.square().sum().backward()
        results += [output.detach(), *(one.grad for one in inputs)]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()
