"""Who attends to what in one packed forward pass. (test_transformers_engine.py holds what comes out against
plain forwards.)"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from asyncrl_cli.engines.transformers.batched_model import _make_blocks


@pytest.mark.parametrize(
    ("sequences", "together"),
    [
        ([(5, 5), (5, 5), (5, 5)], [{0, 1, 2}]),
        ([(5, 5), (4, 4), (4, 4), (5, 5)], [{0, 3}, {1, 2}]),
        ([(1, 1), (1, 1)], [{0, 1}]),
        ([(4, 4), (1, 9), (4, 4)], [{0, 2}, {1}]),
        ([(4, 12), (4, 4), (4, 4), (4, 12)], [{0, 1, 2, 3}]),
        ([(1, 7), (1, 3)], [{0, 1}]),
        ([(1, 30)] * 8 + [(1, 2)] * 3, [{*range(8), 9, 10}, {8}]),
    ],
    ids=[
        *("a group", "two groups", "one-token prompts", "one decodes between"),
        *("pieces of longer prompts", "all decode", "padding"),
    ],
)
def test_sequences_with_equally_many_queries_share_a_call_and_see_their_own_keys(
    sequences: list[tuple[int, int]], together: list[set[int]]
) -> None:
    """Each sequence is (queries, keys). A query sees the keys of its sequence up to its own."""
    starts_q = list(accumulate((queries for queries, _ in sequences), initial=0))
    starts_k = list(accumulate((keys for _, keys in sequences), initial=0))
    places_K = 1000 + torch.arange(starts_k[-1]).flip(0)  # anywhere in the cache
    blocks = _make_blocks(starts_q, starts_k, places_K, torch.float32)
    rows = [[starts_q.index(first) for first in block.queries_BP[:, 0].tolist()] for block in blocks]
    assert sorted(map(sorted, rows)) == sorted(map(sorted, together))
    for block, block_rows in zip(blocks, rows, strict=True):
        assert (block.mask_B1PL is None) == all(sequences[row][0] == sequences[row][1] for row in block_rows)
        causal_PL = torch.ones(block.queries_BP.shape[1], block.places_BL.shape[1]).triu(1)
        for index, row in enumerate(block_rows):
            queries, keys = sequences[row]
            assert block.queries_BP[index].tolist() == list(range(starts_q[row], starts_q[row + 1]))
            own = places_K[starts_k[row] : starts_k[row + 1]].tolist()
            mask_PL = causal_PL if block.mask_B1PL is None else block.mask_B1PL[index, 0]
            for query, mask_L in enumerate(mask_PL):
                assert block.places_BL[index][mask_L == 0].tolist() == own[: keys - queries + query + 1]
