"""Packs the rows of a microbatch end to end, without padding, and divides their tokens between ranks
(sequence parallelism).

    rows (B, T) -> P positions end to end -> P / S of them on each of S ranks
                -> decoder -> hidden states of the rank's own tokens
                   in its attention: all P positions, with 1 / S of the heads on each rank

Only attention mixes positions. Before it, all-to-alls exchange positions for heads, and after it back
(DeepSpeed-Ulysses, arXiv:2309.14509). Where torch has a kernel for rows of different lengths (CUDA,
bfloat16), attention uses it; elsewhere the rows are padded for attention alone. transformers has Ulysses for
DeepSpeed only, and torch's context parallelism has no CPU kernel.

What it is not: sliding windows, and layers that mix positions in other ways, are not supported. Such models
keep padded rows.

Legend: B = rows, T = padded positions, P = positions end to end, S = ranks that share them, t = P / S, N =
sampled tokens, n = those of this rank, H = query heads, J = key-value heads, D = head's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface

from asyncrl_cli.models.attention import trained_sdpa
from asyncrl_cli.train.batch import Microbatch
from asyncrl_cli.train.ranks import Ranks

UNPADDED = "asyncrl_unpadded"

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, float | None], torch.Tensor]
"""Causal attention of query (P, H, D), key and value (P, J, D), row by row, for a kind of `Layout`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What attention needs to know of the positions end to end."""

    kernel: Kernel
    sequence: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class Rows(Layout):
    """Where the rows are: row b takes positions `starts[b]` to `starts[b + 1]`. `slots_P`: their indices in
    padded (B, T)."""

    starts: torch.Tensor
    slots_P: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class RankShare:
    """This rank's share of a microbatch: the decoder's `inputs`; `select_n`, indices of its own sampled
    tokens in the decoder's flattened result; `tokens_n`, their indices among all N tokens (None: all)."""

    inputs: dict[str, Any]
    select_n: torch.Tensor
    tokens_n: torch.Tensor | None = None
    sequence: dist.ProcessGroup | None = None
    positions: tuple[torch.Tensor, torch.Tensor] | None = None
    """The row and the position there of each input, if they are not the rows end to end."""

    def at_inputs(self, values_BT: torch.Tensor) -> torch.Tensor:
        """What belongs to the decoder's inputs, end to end."""
        return values_BT.flatten(0, 1) if self.positions is None else values_BT[self.positions]

    def of(self, values_N: torch.Tensor) -> torch.Tensor:
        return values_N if self.tokens_n is None else values_N[self.tokens_n]

    def joined(self, values_n: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The values of all N tokens, collected from the ranks: a collective. Gradients flow to this rank's
        own tokens only."""
        if self.tokens_n is None or self.sequence is None:
            return values_n
        whole_N = values_n.new_zeros(num_tokens).index_copy_(0, self.tokens_n, values_n.detach())
        dist.all_reduce(whole_N, group=self.sequence)
        return whole_N.index_copy(0, self.tokens_n, values_n)


Divide = Callable[[Microbatch], RankShare]


def padded(microbatch: Microbatch) -> RankShare:
    """The whole microbatch, unchanged."""
    return RankShare({"input_ids": microbatch.inputs_BT}, microbatch.select_N)


@dataclass(frozen=True, slots=True)
class Unpadded:
    """Makes this rank's share of a microbatch with its rows packed end to end."""

    kernel: Kernel
    ranks: Ranks

    def __call__(self, microbatch: Microbatch) -> RankShare:
        """The last row is lengthened until all ranks have the same number of positions."""
        device, (num_rows, width), ranks = microbatch.inputs_BT.device, microbatch.inputs_BT.shape, self.ranks
        *others, last = microbatch.lengths
        lengths = [*others, last + -sum(microbatch.lengths) % ranks.sequence_size]
        lengths_B = torch.tensor(lengths, device=device)
        starts = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0))
        rows_P = torch.arange(num_rows, device=device).repeat_interleave(lengths_B, output_size=sum(lengths))
        positions_P = torch.arange(len(rows_P), device=device) - starts[rows_P]
        places_N = starts[microbatch.rows_N] + microbatch.select_N - microbatch.rows_N * width
        longest = max(lengths)
        slots_P = rows_P * longest + positions_P
        layout = Rows(self.kernel, ranks.sequence, starts.int(), slots_P, longest)
        return rank_share(microbatch, rows_P, positions_P, places_N, layout, ranks)


def rank_share(
    microbatch: Microbatch,
    rows_P: torch.Tensor,
    positions_P: torch.Tensor,
    places_N: torch.Tensor,
    layout: Layout,
    ranks: Ranks,
) -> RankShare:
    """This rank's share of positions end to end: the row of each, and its position there. `places_N`: those
    that predict the sampled tokens. A position beyond the microbatch's width has its row's last token."""
    size = len(rows_P) // ranks.sequence_size
    begin = ranks.rank % ranks.sequence_size * size
    tokens_n = ((places_N >= begin) & (places_N < begin + size)).nonzero().squeeze(1)
    mine, last = slice(begin, begin + size), microbatch.inputs_BT.shape[1] - 1
    positions = rows_P[mine], positions_P[mine].clamp(max=last)
    inputs = microbatch.inputs_BT[positions]
    arguments = {"input_ids": inputs[None], "position_ids": positions_P[None, mine], "layout": layout}
    return RankShare(arguments, places_N[tokens_n] - begin, tokens_n, ranks.sequence, positions)


def in_padded_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Rows, scaling: float | None
) -> torch.Tensor:
    """A `Kernel` that runs everywhere."""
    rows = []  # each (B, H, T, D), with zeros where there is no token
    for values_PHD in (query, key, value):
        padded = values_PHD.new_zeros((len(layout.starts) - 1) * layout.longest, *values_PHD.shape[1:])
        padded.index_copy_(0, layout.slots_P, values_PHD)
        rows.append(padded.unflatten(0, (-1, layout.longest)).transpose(1, 2))
    heads = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
    asked, keys, values = rows
    attended_BTHD, _ = trained_sdpa(heads, asked, keys, values, None, scaling=scaling, is_causal=True)
    return attended_BTHD.flatten(0, 1).index_select(0, layout.slots_P)


def by_lengths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Rows, scaling: float | None
) -> torch.Tensor:
    """A `Kernel`: torch's flash attention for rows of different lengths, if all heads are of one size."""
    from torch.nn.attention.varlen import varlen_attn

    if key.shape != value.shape:
        return in_padded_rows(query, key, value, layout, scaling)
    starts, longest = layout.starts, layout.longest
    how: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if (group := query.shape[1] // key.shape[1]) > 1:
        if "enable_gqa" in signature(varlen_attn).parameters:
            how["enable_gqa"] = True
        else:  # torch 2.11
            key, value = (heads.repeat_interleave(group, dim=1) for heads in (key, value))
    attended: torch.Tensor = varlen_attn(query, key, value, starts, starts, longest, longest, **how)
    return attended


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers on packed rows: query (1, H, t, D), key and value (1, J, t, D); returns (1,
    t, H, D)."""
    if layout is None:  # the model does not pass it on; `is_same` detects this
        return trained_sdpa(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    size = 1 if layout.sequence is None else layout.sequence.size()
    repeats = size // math.gcd(size, key.shape[1])  # every rank needs a whole key-value head
    query_PHD = _all_positions(query[0], layout.sequence)
    key_PJD, value_PJD = (
        _all_positions(heads.repeat_interleave(repeats, dim=0) if repeats > 1 else heads, layout.sequence)
        for heads in (key[0], value[0])
    )
    attended_PHD = layout.kernel(query_PHD, key_PJD, value_PJD, layout, scaling)
    if layout.sequence is None:
        return attended_PHD[None], None
    blocks = _Exchange.apply(attended_PHD.unflatten(0, (size, -1)), layout.sequence)
    return blocks.transpose(0, 1).flatten(1, 2)[None], None


AttentionInterface.register(UNPADDED, attend)


def _all_positions(values_HtD: torch.Tensor, sequence: dist.ProcessGroup | None) -> torch.Tensor:
    """(P, H / S, D) from (H, t, D)."""
    if sequence is None:
        return values_HtD.transpose(0, 1)
    blocks = _Exchange.apply(values_HtD.unflatten(0, (sequence.size(), -1)), sequence)
    return blocks.permute(0, 2, 1, 3).flatten(0, 1)


class _Exchange(torch.autograd.Function):
    """Sends block i to rank i and receives that rank's block. The gradient is exchanged the same way."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, sequence: dist.ProcessGroup) -> torch.Tensor:
        ctx.sequence = sequence
        received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, blocks.contiguous(), group=sequence)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Exchange.apply(gradient, ctx.sequence), None
