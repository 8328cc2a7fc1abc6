"""Attention of packed sequences over transformers' paged cache, for a CPU: a sequence attends to its own keys only.

transformers' continuous batching packs all running sequences into one row. With `sdpa` it masks the others out, so one
step of B sequences of length L costs B * B * L; here it costs B * L. The function is registered with transformers'
AttentionInterface. Its name contains "flash" because that is how continuous batching recognises attention that goes by
`cu_seq_lens_*` and wants no mask.

Legend: Q = packed query tokens, K = packed key tokens, B = sequences, H = query heads, J = key-value heads, G = H / J,
L = longest key length of a block, D = head dimension.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "asyncrl_flash_cpu"
MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3"})
"""Models with plain causal attention: no window, no soft cap, no sinks. The others run with transformers' `sdpa`."""

MAX_PADDING = 1.3
"""Decoding sequences are attended in blocks of similar length, so that no more than this factor of keys is read."""
MIN_BLOCK = 8
"""Sequences below which a block is not cut: a call costs more than the padding it saves."""


def applies_to(config: PretrainedConfig, device: torch.device) -> bool:
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return device.type == "cpu" and config.model_type in MODEL_TYPES and layer_types == {"full_attention"}


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences with one query each: where their queries are, and which keys they see (padded with key 0)."""

    queries_B: torch.Tensor
    keys_BL: torch.Tensor
    mask_BL: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """Who attends to what in one forward pass; the same for all layers."""

    blocks: tuple[_Block, ...]
    prefills: tuple[tuple[slice, slice], ...]


class _Planner:
    """Makes one plan per forward pass: all its layers get the same `cu_seq_lens_q` object."""

    def __init__(self) -> None:
        self._key: weakref.ref[torch.Tensor] | None = None
        self._plan = _Plan(blocks=(), prefills=())

    def plan(self, starts_q: torch.Tensor, starts_k: torch.Tensor, dtype: torch.dtype) -> _Plan:
        if self._key is None or self._key() is not starts_q:
            self._plan = _make_plan(starts_q.tolist(), starts_k.tolist(), dtype)
            self._key = weakref.ref(starts_q)
        return self._plan


_planner = _Planner()


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cache: PagedAttentionCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, H, Q, D), key and value (1, J, Q, D) -> (1, Q, H, D). Without a cache: transformers' causal sdpa."""
    if cache is None:
        kwargs = {name: kwargs[name] for name in ("dropout", "is_causal") if name in kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    plan = _planner.plan(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"], query.dtype)
    query_QHD = query[0].transpose(0, 1)
    out_QHD = torch.empty(query_QHD.shape, dtype=query.dtype)
    for q, k in plan.prefills:
        out_QHD[q] = _prefill(query[:, :, q], key[:, :, k], value[:, :, k], scaling)
    keys_KJD, values_KJD = key[0].transpose(0, 1), value[0].transpose(0, 1)
    for block in plan.blocks:
        out_QHD[block.queries_B] = _decode(query_QHD, keys_KJD, values_KJD, block, scaling)
    return out_QHD[None], None


def _prefill(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """One sequence whose queries are its last tokens: (its part of Q, H, D)."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = None
    if num_queries != num_keys:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _decode(
    query_QHD: torch.Tensor, keys_KJD: torch.Tensor, values_KJD: torch.Tensor, block: _Block, scaling: float | None
) -> torch.Tensor:
    """(B, H, D). The G query heads of a key-value head stand in for G query positions, so that no key is repeated."""
    num_sequences, length = block.keys_BL.shape
    flat = block.keys_BL.view(-1)
    shape = (num_sequences, length, *keys_KJD.shape[1:])
    out_BJGD = functional.scaled_dot_product_attention(
        query_QHD[block.queries_B].unflatten(1, (keys_KJD.shape[1], -1)),
        keys_KJD.index_select(0, flat).view(shape).transpose(1, 2),
        values_KJD.index_select(0, flat).view(shape).transpose(1, 2),
        attn_mask=block.mask_BL[:, None, None, :],
        scale=scaling,
    )
    return out_BJGD.flatten(1, 2)


def _make_plan(starts_q: list[int], starts_k: list[int], dtype: torch.dtype) -> _Plan:
    prefills, decoding = [], []
    for row in range(len(starts_q) - 1):
        q, k = slice(starts_q[row], starts_q[row + 1]), slice(starts_k[row], starts_k[row + 1])
        if q.stop - q.start == 1:
            decoding.append((k.stop - k.start, k.start, q.start))
        else:
            prefills.append((q, k))
    decoding.sort(reverse=True)
    return _Plan(blocks=tuple(_make_block(cut, dtype) for cut in _cut(decoding)), prefills=tuple(prefills))


def _cut(decoding: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Longest first, cut where padding to a block's longest would read too many keys."""
    blocks: list[list[tuple[int, int, int]]] = []
    total = 0
    for entry in decoding:
        block = blocks[-1] if blocks else []
        too_padded = len(block) >= MIN_BLOCK and block[0][0] * (len(block) + 1) > MAX_PADDING * (total + entry[0])
        if not block or too_padded:
            blocks.append([])
            total = 0
        blocks[-1].append(entry)
        total += entry[0]
    return blocks


def _make_block(entries: list[tuple[int, int, int]], dtype: torch.dtype) -> _Block:
    lengths_B, starts_B, queries_B = (torch.tensor(column) for column in zip(*entries, strict=True))
    steps_L = torch.arange(entries[0][0])
    outside_BL = steps_L >= lengths_B[:, None]
    mask_BL = torch.zeros(outside_BL.shape, dtype=dtype).masked_fill_(outside_BL, float("-inf"))
    return _Block(queries_B, (starts_B[:, None] + steps_L).masked_fill_(outside_BL, 0), mask_BL)


AttentionInterface.register(NAME, packed_attention)
