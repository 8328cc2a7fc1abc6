"""Attention of packed sequences over transformers' paged cache.

`packed_attention` is for CPUs: each sequence attends to its own keys only. `own_paged_attention` is for
models whose attention does more than sdpa.

transformers' continuous batching packs all running sequences into one row. With `sdpa` a mask hides the other
sequences, so one step of B sequences of length L costs B * B * L; `packed_attention` costs B * L. It is
registered with transformers' AttentionInterface. Its name contains "flash" because that is how continuous
batching recognises attention that takes `cu_seq_lens_*` and no mask.

New keys are written to the cache. The keys of a sequence are read only once, for its attention. (The cache's
own `update` would first copy all keys into one packed row.)

Legend: Q = packed query tokens, K = packed key tokens, H = query heads, J = key-value heads, G = H / J, D =
head dimension, C = places in the cache. In a block: B = sequences, P = queries of each, L = keys of the
longest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from asyncrl_cli.models.attention import AttentionOutput, own_attention

NAME = "asyncrl_flash_cpu"
PAGED_EAGER = "paged|eager"
"""The name under which continuous batching looks up a model's `eager` attention."""
MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3"})
"""Models with plain causal attention: no window, no soft-cap, no sinks. Other models run with transformers'
`sdpa`."""

MAX_PADDING = 1.3
"""Sequences are grouped into blocks of similar length, so that padding multiplies the keys read by at most
this factor."""
MIN_BLOCK = 8
"""Blocks with fewer sequences are not split: another call would cost more than the padding it saves."""


class _Sequence(NamedTuple):
    """How many queries and keys a sequence has in this pass, and where they begin among the packed ones."""

    num_queries: int
    num_keys: int
    first_query: int
    first_key: int


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences handled in one call, each with P queries (its last tokens): the rows of the queries, and the
    cache places of the keys, padded to the longest sequence. `mask_B1PL` hides padding and later keys. None:
    all have P keys."""

    queries_BP: torch.Tensor
    places_BL: torch.Tensor
    mask_B1PL: torch.Tensor | None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cache: PagedAttentionCache | None = None,
    **kwargs: Any,
) -> AttentionOutput:
    """query (1, H, Q, D), key and value (1, J, Q, D) -> (1, Q, H, D). Without a cache this is transformers'
    causal sdpa."""
    if cache is None:
        how = {name: kwargs[name] for name in ("dropout", "is_causal") if name in kwargs} | {
            "scaling": scaling
        }
        output: AttentionOutput = sdpa_attention_forward(module, query, key, value, attention_mask, **how)
        return output
    allocator = cache.layer_to_allocator[module.layer_idx]
    tables = allocator.get_cache_for_block_table(module.layer_idx)
    keys_CJD, values_CJD = (pages.view(-1, *pages.shape[2:]) for pages in tables)
    written_Q = kwargs["write_index"][allocator.index]
    keys_CJD.index_copy_(0, written_Q, key[0].transpose(0, 1))
    values_CJD.index_copy_(0, written_Q, value[0].transpose(0, 1))
    places_K = kwargs["read_index"][allocator.index]
    if not len(places_K):  # all sequences are new: their keys are those that were just written
        places_K = written_Q
    query_QHD = query[0].transpose(0, 1)
    starts_q, starts_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"][allocator.layer_type]
    if not hasattr(starts_q, "asyncrl_blocks"):  # all layers of a forward pass share this tensor
        blocks = _make_blocks(starts_q.tolist(), starts_k.tolist(), places_K, query.dtype)
        starts_q.asyncrl_blocks = blocks
    out_QHD = torch.empty(query_QHD.shape, dtype=query.dtype)
    for block in starts_q.asyncrl_blocks:
        attended = attend(query_QHD, keys_CJD, values_CJD, block, scaling)
        out_QHD.index_copy_(0, block.queries_BP.view(-1), attended)
    return out_QHD[None], None


def own_paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: PagedAttentionCache | None = None,
    **kwargs: Any,
) -> AttentionOutput:
    """The model's own attention function, with keys and values from the paged cache if there is one.

    Replaces transformers' `paged|eager`, one function for all models, which implements sinks but no soft-cap.
    """
    own = own_attention(module)
    assert own is not None, "the engine refuses models without one"
    if cache is not None:
        states = {"key_states": key, "value_states": value}
        key, value = cache.update(**states, layer_idx=module.layer_idx, kwargs=kwargs)
    return own(module, query, key, value, attention_mask, **kwargs)


def attend(
    query_QHD: torch.Tensor,
    keys_CJD: torch.Tensor,
    values_CJD: torch.Tensor,
    block: _Block,
    scaling: float | None,
) -> torch.Tensor:
    """(B * P, H, D)."""
    query_BPHD = query_QHD.index_select(0, block.queries_BP.view(-1)).unflatten(0, block.queries_BP.shape)
    flat, shape = block.places_BL.view(-1), block.places_BL.shape
    keys_BJLD, values_BJLD = (
        kv.index_select(0, flat).unflatten(0, shape).transpose(1, 2) for kv in (keys_CJD, values_CJD)
    )
    # With one query, the G query heads of a key-value head are passed as G queries, so that no key is
    # repeated.
    is_single = query_BPHD.shape[1] == 1
    out = functional.scaled_dot_product_attention(
        query_BPHD[:, 0].unflatten(1, (keys_CJD.shape[1], -1)) if is_single else query_BPHD.transpose(1, 2),
        keys_BJLD,
        values_BJLD,
        attn_mask=block.mask_B1PL,
        is_causal=block.mask_B1PL is None,
        scale=scaling,
        enable_gqa=not is_single,
    )
    return out.flatten(1, 2) if is_single else out.transpose(1, 2).flatten(0, 1)


def _make_blocks(
    starts_q: list[int], starts_k: list[int], places_K: torch.Tensor, dtype: torch.dtype
) -> tuple[_Block, ...]:
    """Group sequences with the same number of queries into blocks. A new block begins where padding would
    read too many keys. `places_K`: where the packed keys are in the cache."""
    cut: list[list[_Sequence]] = []
    total = 0
    both = zip(pairwise(starts_q), pairwise(starts_k), strict=True)
    sequences = [_Sequence(next_q - q, next_k - k, q, k) for (q, next_q), (k, next_k) in both]
    for sequence in sorted(sequences, reverse=True):  # of a block, the longest comes first
        block = cut[-1] if cut else []
        most = MAX_PADDING * (total + sequence.num_keys)
        too_padded = len(block) >= MIN_BLOCK and block[0].num_keys * (len(block) + 1) > most
        if not block or block[0].num_queries != sequence.num_queries or too_padded:
            cut.append([])
            total = 0
        cut[-1].append(sequence)
        total += sequence.num_keys
    blocks = []
    for block in cut:
        num_queries, num_keys, _, _ = block[0]
        _, lengths_B, first_queries_B, first_keys_B = torch.tensor(block).unbind(1)
        steps_P, steps_L = torch.arange(num_queries), torch.arange(num_keys)
        packed_BL = (first_keys_B[:, None] + steps_L).masked_fill_(steps_L >= lengths_B[:, None], 0)
        mask_B1PL = None
        if num_keys > num_queries:
            last_seen_BP = lengths_B[:, None] - num_queries + steps_P
            hidden_B1PL = (steps_L > last_seen_BP[..., None])[:, None]
            mask_B1PL = torch.zeros(hidden_B1PL.shape, dtype=dtype).masked_fill_(hidden_B1PL, -math.inf)
        blocks.append(_Block(first_queries_B[:, None] + steps_P, places_K[packed_BL], mask_B1PL))
    return tuple(blocks)


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(PAGED_EAGER, own_paged_attention)
AttentionMaskInterface.register(PAGED_EAGER, eager_mask)
