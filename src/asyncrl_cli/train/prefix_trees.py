"""Prefix trees: where the rows of a microbatch agree from their beginning on, they share positions.

**Invariant.** A position stands for a prefix of a row, and a microbatch has each prefix once. A position sees
its own prefix only: it never depends on the rows that share it.

    rows, in lexicographic order     shared     their positions
    S U 3 + 4 = 7 .                  0          0 1 2 3 4 5 6 7
    S U 3 + 4 = 8                    6          0 1 2 3 4 5 8
    S U 9 - 5 = 4 .                  2          0 1 9 10 11 12 13 14

In this order, a row shares most with the row before it: at any depth of the tree, what it does not share is
new, and the new parts end to end are all P positions. So no nodes are needed: groups with one prompt, turns
that branch, system prompts that are the same in all groups, and segments of one trajectory are all the same.

Legend: B = rows, T = positions of the longest, P = unique positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl_cli.train import LARGEST_SHARE

Tokens = NDArray[np.integer[Any]]
MAX_ROW_TOKENS_PER_POSITION = 8
"""All rows of a microbatch have at most so many tokens per position that it may have. Identical rows add no
position, but scored tokens, and keys and values that attention gathers."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Row b has its first `shared[b]` positions in common with row b - 1, then its own. `lengths`: of the
    rows. `places_BT`: the index of each row's positions among the P unique ones. `rows_P`, `positions_P`: the
    first row that has a position, and where. `ends_P`: before which index the positions end that see it."""

    shared: tuple[int, ...]
    lengths: tuple[int, ...]
    places_BT: torch.Tensor
    rows_P: torch.Tensor
    positions_P: torch.Tensor
    ends_P: torch.Tensor


def prefix_tree(rows: Sequence[Tokens], device: torch.device) -> PrefixTree:
    """Of rows in any order; the more they share, the better it is."""
    shared, lengths = shared_lengths(rows), [len(row) for row in rows]
    own = np.subtract(lengths, shared)
    places_BT, ends_P = np.zeros((len(rows), max(lengths)), dtype=np.int64), np.zeros(own.sum(), np.int64)
    begin = 0
    for b, (first, length) in enumerate(zip(shared, lengths, strict=True)):
        places_BT[b, :first] = places_BT[b - 1, :first]
        places_BT[b, first:length] = np.arange(begin, begin + length - first)
        begin += length - first
        ends_P[places_BT[b, :length]] = begin  # later rows that share it put it off
    rows_P = np.repeat(np.arange(len(rows)), own)
    positions_P = np.concatenate([np.arange(*ends) for ends in zip(shared, lengths, strict=True)])
    tensors = (torch.from_numpy(array).to(device) for array in (places_BT, rows_P, positions_P, ends_P))
    return PrefixTree(tuple(shared), tuple(lengths), *tensors)


def shared_lengths(rows: Sequence[Tokens]) -> list[int]:
    """How many first tokens each row has in common with the row before it."""
    shared = [0] * len(rows)
    for b, (before, row) in enumerate(pairwise(rows), 1):
        length = min(len(before), len(row))
        is_other = before[:length] != row[:length]
        shared[b] = int(is_other.argmax()) if is_other.any() else length
    return shared


def cut_trees(rows: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
    """Row indices per microbatch, in lexicographic order: each is filled up to `max_tokens` unique positions
    (and MAX_ROW_TOKENS_PER_POSITION). None at all if the rows share too little to be trees."""
    order = sorted(range(len(rows)), key=lambda b: rows[b].astype(">u4").tobytes())
    cut, used, total, all_tokens = list[list[int]](), max_tokens, 0, 0
    for b, shared in zip(order, shared_lengths([rows[b] for b in order]), strict=True):
        is_full = used + len(rows[b]) - shared > max_tokens
        if is_full or all_tokens + len(rows[b]) > MAX_ROW_TOKENS_PER_POSITION * max_tokens:
            cut.append([])
            used = shared = all_tokens = 0
        cut[-1].append(b)
        used += len(rows[b]) - shared
        all_tokens += len(rows[b])
        total += len(rows[b]) - shared
    return cut if total <= LARGEST_SHARE * sum(map(len, rows)) else []
