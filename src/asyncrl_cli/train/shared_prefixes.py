"""The decoder's view of prefix trees (prefix_trees.py): unique positions end to end, each with the rotary
position that it has in its rows, and attention that sees a position's own prefix.

Two kernels compute it. `in_branches` runs everywhere: the part that a row has of its own attends to the row's
whole prefix, whose keys and values are gathered from where they were computed; parts of similar lengths are
padded to one batch. `in_blocks` is torch's FlexAttention, for GPUs: of positions in tree order, one sees
another if that is not later, and the other's branch has not ended.

What it is not: a cache. Keys and values are those of this pass, so gradients flow into the prefix from every
row. Sharing changes no result but its rounding, in experts' layers too: they route each position by itself.

Legend: P = unique positions, b = rows in a block, q = the longest own part of these, k = the longest row of
these, H = query heads, J = key-value heads, D = head's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad, scaled_dot_product_attention

from asyncrl_cli.train.batch import Microbatch, cut_padded
from asyncrl_cli.train.packed_rows import Divide, Kernel, Layout, RankShare, rank_share
from asyncrl_cli.train.prefix_trees import PrefixTree
from asyncrl_cli.train.ranks import Ranks

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
BLOCK_COST_TOKENS = 32
"""Cost of one more block of attention, in padded tokens."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Makes this rank's share of a microbatch with its tree. `rows` takes the microbatches without one."""

    rows: Divide
    kernel: Kernel
    ranks: Ranks

    def __call__(self, microbatch: Microbatch) -> RankShare:
        """Positions that nobody sees are added until all ranks have the same number."""
        if (tree := microbatch.tree) is None:
            return self.rows(microbatch)
        added = -len(tree.rows_P) % self.ranks.sequence_size
        rows_P, positions_P = pad(tree.rows_P, (0, added)), pad(tree.positions_P, (0, added))
        places_N = tree.places_BT.flatten()[microbatch.select_N]
        layout = LAYOUTS[self.kernel](tree, added, self.ranks.sequence)
        return rank_share(microbatch, rows_P, positions_P, places_N, layout, self.ranks)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows whose own parts attend together. `queries_bq`: places of the own parts, with 0 where `is_own_bq`
    is not set; `keys_bk`: of the whole rows; `mask_b1qk`: what is added to scores; None if the rows share
    nothing, so that attention is causal."""

    queries_bq: torch.Tensor
    is_own_bq: torch.Tensor
    keys_bk: torch.Tensor
    mask_b1qk: torch.Tensor | None

    def own_parts(self, *queries_PHD: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each (b, H, q, D)."""
        return (_gathered(values_PHD, self.queries_bq) for values_PHD in queries_PHD)

    def whole_rows(self, *keys_PJD: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each (b, J, k, D)."""
        return (_gathered(values_PJD, self.keys_bk) for values_PJD in keys_PJD)

    def sdpa_arguments(self, dtype: torch.dtype, scaling: float | None) -> dict[str, Any]:
        mask = self.mask_b1qk if self.mask_b1qk is None else self.mask_b1qk.to(dtype)
        return {"is_causal": mask is None, "attn_mask": mask, "scale": scaling}


@dataclass(frozen=True, slots=True)
class Branches(Layout):
    """`slots_P`: where each position's result is among those of all blocks end to end."""

    blocks: tuple[Block, ...]
    slots_P: torch.Tensor


def branches(tree: PrefixTree, added: int, sequence: dist.ProcessGroup | None) -> Branches:
    """The layout for `in_branches`: rows that begin with nothing shared are in blocks apart from the others.
    The `added` last positions have any result."""
    shared, lengths, places_BT = tree.shared, tree.lengths, tree.places_BT
    device, own = places_BT.device, [n - first for n, first in zip(lengths, shared, strict=True)]
    slots_P = torch.zeros(len(tree.rows_P) + added, dtype=torch.int64, device=device)
    blocks, begin = list[Block](), 0
    roots = [b for b, first in enumerate(shared) if not first]
    others = [b for b, first in enumerate(shared) if first and own[b]]
    for rows in (part for side in (roots, others) if side for part in _alike(side, own, lengths)):
        rows_b1 = torch.tensor(rows, device=device)[:, None]
        firsts_b1, own_b1 = (torch.tensor(values, device=device)[rows_b1] for values in (shared, own))
        longest = max(own[b] for b in rows)
        steps_q = torch.arange(longest, device=device)
        positions_bq, is_own_bq = firsts_b1 + steps_q, steps_q < own_b1
        last = places_BT.shape[1] - 1
        queries_bq = places_BT[rows_b1, positions_bq.clamp(max=last)].where(is_own_bq, 0)
        keys_bk = places_BT[rows, : max(lengths[b] for b in rows)]
        is_later = torch.arange(keys_bk.shape[1], device=device) > positions_bq[..., None]
        mask = torch.zeros(is_later.shape, device=device).masked_fill_(is_later, -torch.inf)[:, None]
        blocks.append(Block(queries_bq, is_own_bq, keys_bk, None if rows[0] in roots else mask))
        slots_bq = begin + torch.arange(queries_bq.numel(), device=device).view_as(queries_bq)
        slots_P[queries_bq[is_own_bq]] = slots_bq[is_own_bq]
        begin += queries_bq.numel()
    return Branches(in_branches, sequence, tuple(blocks), slots_P)


def _alike(rows: list[int], own: list[int], lengths: tuple[int, ...]) -> list[list[int]]:
    """The rows in parts of similar lengths, first by what they have of their own."""
    found = []
    for part in cut_padded([own[b] for b in rows], 2**62, BLOCK_COST_TOKENS):
        chosen = [rows[i] for i in part]
        cut = cut_padded([lengths[b] for b in chosen], 2**62, BLOCK_COST_TOKENS * 4)
        found += [[chosen[i] for i in block] for block in cut]
    return found


def in_branches(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Branches, scaling: float | None
) -> torch.Tensor:
    """A `Kernel` that runs everywhere."""
    if query.is_cpu and query.shape[-1] == value.shape[-1]:
        # in bfloat16 its backward pass takes five times as long (models/attention.py)
        exact = (query.float(), key.float(), value.float())
        attended_PHD: torch.Tensor = _FlashBranches.apply(*exact, layout, scaling)
        return attended_PHD.to(query.dtype)
    found, is_grouped = [], query.shape[1] != key.shape[1]
    for block in layout.blocks:
        (asked,), (keys, values) = block.own_parts(query), block.whole_rows(key, value)
        arguments = block.sdpa_arguments(query.dtype, scaling)
        attended = scaled_dot_product_attention(asked, keys, values, enable_gqa=is_grouped, **arguments)
        found.append(_end_to_end(attended))
    return torch.cat(found).index_select(0, layout.slots_P)


class _FlashBranches(torch.autograd.Function):
    """The same with torch's flash attention for CPUs, of which sdpa would keep all gathered keys and values
    until the backward pass: here they are gathered again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: Branches,
        scaling: float | None,
    ) -> torch.Tensor:
        found, sums = list[torch.Tensor](), list[torch.Tensor]()
        for block in layout.blocks:
            chosen = (*block.own_parts(query), *block.whole_rows(key, value))
            attended_bHqD, log_sums = FLASH(*chosen, **block.sdpa_arguments(query.dtype, scaling))
            found.append(_end_to_end(attended_bHqD))
            sums.append(log_sums)
        attended_PHD = torch.cat(found).index_select(0, layout.slots_P)
        ctx.layout, ctx.scaling = layout, scaling
        ctx.save_for_backward(query, key, value, attended_PHD, *sums)
        return attended_PHD

    @staticmethod
    def backward(ctx: Any, gradient_PHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, attended_PHD, *sums = ctx.saved_tensors
        layout: Branches = ctx.layout
        found, key_sum_PJD, value_sum_PJD = [], torch.zeros_like(key), torch.zeros_like(value)
        for block, log_sums in zip(layout.blocks, sums, strict=True):
            asked, attended, gradient = block.own_parts(query, attended_PHD, gradient_PHD)
            gradient = gradient * block.is_own_bq[:, None, :, None]
            chosen = (gradient, asked, *block.whole_rows(key, value), attended, log_sums, 0.0)
            arguments = block.sdpa_arguments(query.dtype, ctx.scaling)
            is_causal = arguments.pop("is_causal")
            query_gradient, key_gradient, value_gradient = FLASH_BACKWARD(*chosen, is_causal, **arguments)
            found.append(_end_to_end(query_gradient))
            places = block.keys_bk.flatten()
            key_sum_PJD.index_add_(0, places, _end_to_end(key_gradient))
            value_sum_PJD.index_add_(0, places, _end_to_end(value_gradient))
        query_sum_PHD = torch.cat(found).index_select(0, layout.slots_P)
        return query_sum_PHD, key_sum_PJD, value_sum_PJD, None, None


def _gathered(values_PHD: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return values_PHD.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


def _end_to_end(values_bHqD: torch.Tensor) -> torch.Tensor:
    return values_bHqD.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class TreeMask(Layout):
    mask: Any
    """FlexAttention's block mask."""


def tree_mask(tree: PrefixTree, added: int, sequence: dist.ProcessGroup | None) -> TreeMask:
    """The layout for `in_blocks`. The `added` last positions see nothing and are not seen."""
    from torch.nn.attention.flex_attention import create_block_mask

    ends_P, number = pad(tree.ends_P, (0, added)), len(tree.ends_P) + added

    def sees(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < ends_P[k])

    device, compiles = ends_P.device, ends_P.is_cuda
    mask = create_block_mask(sees, None, None, number, number, device=device, _compile=compiles)
    return TreeMask(in_blocks, sequence, mask)


def in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TreeMask, scaling: float | None
) -> torch.Tensor:
    """A `Kernel`: torch's FlexAttention, compiled on GPUs. (On CPUs torch has no compiled backward pass.)"""
    chosen = (values_PHD.transpose(0, 1)[None] for values_PHD in (query, key, value))
    is_grouped = query.shape[1] != key.shape[1]
    attended = _flex(query.is_cuda)(*chosen, block_mask=layout.mask, scale=scaling, enable_gqa=is_grouped)
    attended_PHD: torch.Tensor = attended[0].transpose(0, 1)
    return attended_PHD


@cache
def _flex(compiles: bool) -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiles else flex_attention


LAYOUTS: dict[Kernel, Callable[[PrefixTree, int, dist.ProcessGroup | None], Layout]] = {
    in_branches: branches,
    in_blocks: tree_mask,
}
