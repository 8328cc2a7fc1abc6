"""Probes: fixed token sequences that trainer and workers score with the same weights, to verify a sync by its effect.

Fingerprints say that the bytes arrived; only logprobs say that the engine computes with them (an engine may hold
prepacked or tied copies that a load does not reach).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

PROBE_TOKENS = 32
"""Length of a probe: long enough to reach every layer and position encoding, short enough to cost nothing."""


def make_probes(num_sequences: int, vocab_size: int, seed: int, length_tokens: int = PROBE_TOKENS) -> tuple[tuple[int, ...], ...]:
    """The same sequences for the same arguments, in every process; tokens uniform over the vocabulary."""
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(vocab_size) for _ in range(length_tokens)) for _ in range(num_sequences))


def mean_abs_diff(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference over all tokens; infinite if any value is not finite, so that no alarm is missed."""
    if [len(row) for row in ours] != [len(row) for row in theirs]:
        raise ValueError(f"probe logprobs differ in shape: {[len(r) for r in ours]} and {[len(r) for r in theirs]}")
    diffs = [abs(a - b) for ra, rb in zip(ours, theirs, strict=True) for a, b in zip(ra, rb, strict=True)]
    if not diffs:
        raise ValueError("there are no probe logprobs to compare")
    return math.fsum(diffs) / len(diffs) if all(math.isfinite(d) for d in diffs) else math.inf
