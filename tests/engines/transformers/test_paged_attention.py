"""Who attends to what in one packed forward pass. (test_transformers_engine.py holds what comes out against plain forwards.)"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from asyncrl_cli.engines.transformers.paged_attention import _make_plan

NEW, LATER = "new", "later"


@pytest.mark.parametrize(
    ("sequences", "prefills"),
    [
        ([(5, 5), (5, 5), (5, 5)], [(0, 15, 3, NEW)]),
        ([(5, 5), (4, 4), (4, 4), (5, 5)], [(0, 5, 1, NEW), (5, 13, 2, NEW), (13, 18, 1, NEW)]),
        ([(1, 1), (1, 1)], [(0, 2, 2, NEW)]),
        ([(4, 4), (1, 9), (4, 4)], [(0, 4, 1, NEW), (5, 9, 1, NEW)]),
        ([(4, 12), (4, 4), (4, 4), (4, 12)], [(0, 4, 1, LATER), (4, 12, 2, NEW), (12, 16, 1, LATER)]),
        ([(1, 7), (1, 3)], []),
    ],
    ids=["a group", "two groups", "one-token prompts", "one decodes between", "pieces of longer prompts", "all decode"],
)
def test_neighbours_without_earlier_keys_share_a_call(
    sequences: list[tuple[int, int]], prefills: list[tuple[int, int, int, str]]
) -> None:
    """Each sequence is (queries, keys)."""
    starts_q = list(accumulate((queries for queries, _ in sequences), initial=0))
    starts_k = list(accumulate((keys for _, keys in sequences), initial=0))
    places_K = 1000 + torch.arange(starts_k[-1]).flip(0)  # anywhere in the cache
    plan = _make_plan(starts_q, starts_k, places_K, torch.float32)
    made = [(p.queries.start, p.queries.stop, p.count, NEW if p.places_K is None else LATER) for p in plan.prefills]
    assert made == prefills
    for prefill in plan.prefills:
        if prefill.places_K is not None:
            row = starts_q.index(prefill.queries.start)
            assert prefill.places_K.tolist() == places_K[starts_k[row] : starts_k[row + 1]].tolist()
    decoding = {starts_q[row]: row for row, (queries, keys) in enumerate(sequences) if queries == 1 < keys}
    seen = {}
    for block in plan.blocks:
        for query, places_L, mask_L in zip(block.queries_B.tolist(), block.places_BL, block.mask_B11L[:, 0, 0], strict=True):
            seen[query] = places_L[mask_L == 0].tolist()
    assert seen == {query: places_K[starts_k[row] : starts_k[row + 1]].tolist() for query, row in decoding.items()}
