"""Attention of packed sequences over transformers' paged cache.

`packed_attention` is for CPUs: each sequence attends to its own keys only. `own_paged_attention` is for models whose attention
computes more than sdpa does.

transformers' continuous batching packs all running sequences into one row. With `sdpa` a mask hides the other sequences, so
one step of B sequences of length L costs B * B * L; `packed_attention` costs B * L. It is registered with transformers'
AttentionInterface. Its name contains "flash" because that is how continuous batching recognises attention that takes
`cu_seq_lens_*` and no mask.

New keys are written to the cache, and the keys of a sequence are read once, where they are attended to. (The cache's own
`update` would first copy all keys into one packed row.)

Legend: Q = packed query tokens, K = packed key tokens, B = sequences, H = query heads, J = key-value heads, G = H / J,
L = longest key length of a block, D = head dimension, C = places in the cache, S = prompts of one length P.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from asyncrl_cli.models.attention import own_attention

NAME = "asyncrl_flash_cpu"
PAGED_EAGER = "paged|eager"
"""The name under which continuous batching looks up a model's `eager` attention."""
MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3"})
"""Models with plain causal attention: no window, no soft-cap, no sinks. Other models run with transformers' `sdpa`."""

MAX_PADDING = 1.3
"""Decoding sequences are grouped into blocks of similar length, so that at most this many times their keys are read."""
MIN_BLOCK = 8
"""Blocks with fewer sequences are not cut: another call would cost more than the padding it saves."""


def applies_to(config: PretrainedConfig, device: torch.device) -> bool:
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return device.type == "cpu" and config.model_type in MODEL_TYPES and layer_types == {"full_attention"}


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences with one query each: the rows of the queries, and the cache places of the keys, padded to the longest sequence."""

    queries_B: torch.Tensor
    places_BL: torch.Tensor
    mask_B11L: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Either `count` adjacent new sequences of one length, which see no cached keys (`places_K` is None); or one sequence
    with cached keys at `places_K`, whose queries are its last tokens."""

    queries: slice
    count: int
    places_K: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which queries attend to which keys in one forward pass; the same for all layers."""

    blocks: tuple[_Block, ...]
    prefills: tuple[_Prefill, ...]


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
    """query (1, H, Q, D), key and value (1, J, Q, D) -> (1, Q, H, D). Without a cache it is transformers' causal sdpa."""
    if cache is None:
        kwargs = {name: kwargs[name] for name in ("dropout", "is_causal") if name in kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    allocator = cache.layer_to_allocator[module.layer_idx]
    keys_CJD, values_CJD = (pages.view(-1, *pages.shape[2:]) for pages in allocator.get_cache_for_block_table(module.layer_idx))
    written_Q = kwargs["write_index"][allocator.index]
    keys_CJD.index_copy_(0, written_Q, key[0].transpose(0, 1))
    values_CJD.index_copy_(0, written_Q, value[0].transpose(0, 1))
    starts_k = kwargs["cu_seq_lens_k"][allocator.layer_type]
    plan = _plan_of(kwargs["cu_seq_lens_q"], starts_k, kwargs["read_index"][allocator.index], query.dtype)
    query_QHD = query[0].transpose(0, 1)
    out_QHD = torch.empty(query_QHD.shape, dtype=query.dtype)
    for prefill in plan.prefills:
        q, places_K = prefill.queries, prefill.places_K
        if places_K is None:
            out_QHD[q] = _prefill(*(_apart(tensor[:, :, q], prefill.count) for tensor in (query, key, value)), scaling)
        else:
            seen = (cached.index_select(0, places_K).transpose(0, 1)[None] for cached in (keys_CJD, values_CJD))
            out_QHD[q] = _prefill(query[:, :, q], *seen, scaling)
    for block in plan.blocks:
        out_QHD[block.queries_B] = _decode(query_QHD, keys_CJD, values_CJD, block, scaling)
    return out_QHD[None], None


def own_paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: PagedAttentionCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """The model's own attention function, with keys and values from the paged cache if there is one.

    Replaces transformers' `paged|eager`, one function for all models, which implements sinks but no soft-cap.
    """
    own = own_attention(module)
    assert own is not None, "the engine refuses models without one"
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    return own(module, query, key, value, attention_mask, **kwargs)


def _apart(packed: torch.Tensor, count: int) -> torch.Tensor:
    """(1, H, S * P, D) -> (S, H, P, D)."""
    return packed[0].unflatten(1, (count, -1)).transpose(0, 1)


def _prefill(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Queries (S, H, P, D) are the last tokens of keys and values (S, J, at least P, D). Packed: (S * P, H, D)."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = None
    if num_queries != num_keys:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)


def _decode(
    query_QHD: torch.Tensor, keys_CJD: torch.Tensor, values_CJD: torch.Tensor, block: _Block, scaling: float | None
) -> torch.Tensor:
    """(B, H, D). The G query heads of a key-value head stand in for G query positions, so that no key is repeated."""
    num_sequences, length = block.places_BL.shape
    flat = block.places_BL.view(-1)
    shape = (num_sequences, length, *keys_CJD.shape[1:])
    out_BJGD = functional.scaled_dot_product_attention(
        query_QHD[block.queries_B].unflatten(1, (keys_CJD.shape[1], -1)),
        keys_CJD.index_select(0, flat).view(shape).transpose(1, 2),
        values_CJD.index_select(0, flat).view(shape).transpose(1, 2),
        attn_mask=block.mask_B11L,
        scale=scaling,
    )
    return out_BJGD.flatten(1, 2)


def _plan_of(starts_q: torch.Tensor, starts_k: torch.Tensor, places_K: torch.Tensor, dtype: torch.dtype) -> _Plan:
    """The plan of this forward pass, made once: all layers get the same `starts_q` tensor, which carries the plan.

    `places_K`: where the packed keys are in the cache; empty if all sequences are new.
    """
    plan: _Plan | None = getattr(starts_q, "asyncrl_plan", None)
    if plan is None:
        plan = _make_plan(starts_q.tolist(), starts_k.tolist(), places_K, dtype)
        starts_q.asyncrl_plan = plan  # type: ignore[attr-defined]
    return plan


def _make_plan(starts_q: list[int], starts_k: list[int], places_K: torch.Tensor, dtype: torch.dtype) -> _Plan:
    decoding: list[tuple[int, int, int]] = []
    prefills: list[_Prefill] = []
    for (q, next_q), (k, next_k) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
        if next_q - q == next_k - k:
            _add_new(prefills, q, next_q)
        elif next_q - q == 1:
            decoding.append((next_k - k, k, q))
        else:
            prefills.append(_Prefill(queries=slice(q, next_q), count=1, places_K=places_K[k:next_k]))
    decoding.sort(reverse=True)
    return _Plan(blocks=tuple(_make_block(cut, places_K, dtype) for cut in _cut(decoding)), prefills=tuple(prefills))


def _add_new(prefills: list[_Prefill], start: int, stop: int) -> None:
    """Add a sequence without earlier keys. If the sequence before it has the same length (as in a group), one call does both."""
    before = prefills[-1] if prefills and prefills[-1].places_K is None else None
    if before is not None and before.queries.stop == start and (start - before.queries.start) == before.count * (stop - start):
        prefills[-1] = _Prefill(queries=slice(before.queries.start, stop), count=before.count + 1, places_K=None)
    else:
        prefills.append(_Prefill(queries=slice(start, stop), count=1, places_K=None))


def _cut(decoding: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Cut sequences, sorted longest first, into blocks: a new block begins where padding would read too many keys."""
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


def _make_block(entries: list[tuple[int, int, int]], places_K: torch.Tensor, dtype: torch.dtype) -> _Block:
    lengths_B, starts_B, queries_B = torch.tensor(entries).unbind(1)
    steps_L = torch.arange(entries[0][0])
    outside_BL = steps_L >= lengths_B[:, None]
    mask_BL = torch.zeros(outside_BL.shape, dtype=dtype).masked_fill_(outside_BL, float("-inf"))
    packed_BL = (starts_B[:, None] + steps_L).masked_fill_(outside_BL, 0)
    return _Block(queries_B.contiguous(), places_K[packed_BL], mask_BL[:, None, None])


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(PAGED_EAGER, own_paged_attention)
AttentionMaskInterface.register(PAGED_EAGER, eager_mask)
