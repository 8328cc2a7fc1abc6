"""Probes: fixed token sequences that trainer and workers score with the same weights, to verify a sync by its effect.

Fingerprints say that the bytes arrived; only logprobs say that the engine computes with them (an engine may hold
prepacked or tied copies that a load does not reach).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl_cli.profile.schema import PROBE_TOKENS

ERRORS = 5.0
"""How many standard errors a verdict needs: the noise of neighbouring tokens is alike, and a run has many syncs."""
OUTLIER = 5.0
"""A token that has changed by more than so many medians is left out: the trainer chose another expert for it, say."""
SLACK = 0.05
"""How far from 1 the share of a loaded version may be, beside what noise explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """`share`: how far a worker's probes have gone from the version before to the new one: 0 for nothing loaded, 1 for all of it.
    None where it says nothing (`unclear`)."""

    verdict: Literal["loaded", "not loaded", "unclear"]
    share: float | None


def make_probes(num_sequences: int, vocab_size: int, seed: int, length_tokens: int = PROBE_TOKENS) -> tuple[tuple[int, ...], ...]:
    """The same sequences for the same arguments, in every process; tokens uniform over the vocabulary."""
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(vocab_size) for _ in range(length_tokens)) for _ in range(num_sequences))


def mean_abs_diff(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference over all tokens; infinite if any value is not finite, so that no alarm is missed."""
    diffs = [abs(difference) for difference in _differences(ours, theirs)]
    if not diffs:
        raise ValueError("there are no probe logprobs to compare")
    return math.fsum(diffs) / len(diffs) if all(math.isfinite(d) for d in diffs) else math.inf


def judge(worker: Sequence[Sequence[float]], new: Sequence[Sequence[float]], old: Sequence[Sequence[float]]) -> Judgement:
    """Whether a worker computes with the new version or still with (some of) the old one; docs/weights.md has the reasons.

    The share is the least-squares slope of worker - old on new - old. What each token is off by when the share is found without
    it is the engines' numerical noise: with it the share of a loaded version may be as much lower as the square of noise to change.
    Its standard error is the one that holds for noise of any distribution (HC3: MacKinnon and White 1985).
    """
    both = list(zip(_differences(worker, old), _differences(new, old), strict=True))
    usual = OUTLIER * statistics.median(abs(change) for _, change in both)
    moved, change = zip(*((m, c) for m, c in both if not abs(c) > usual), strict=True)
    size = math.fsum(c * c for c in change)
    if max(c * c for c in change) == size:  # none, or of one token
        return Judgement(verdict="unclear", share=None)
    share = math.fsum(m * c for m, c in zip(moved, change, strict=True)) / size
    if not math.isfinite(share):  # `mean_abs_diff` finds what the worker or the new version has that is not
        return Judgement(verdict="unclear", share=None)
    off = [(m - share * c) / (1 - c * c / size) for m, c in zip(moved, change, strict=True)]
    noise = math.sqrt(math.fsum(e * e for e in off) / size)
    error = ERRORS * math.sqrt(math.fsum((e * c) ** 2 for e, c in zip(off, change, strict=True))) / size
    if abs(share - 1) > SLACK + noise**2 + error or share < 0.5 - error:
        return Judgement(verdict="not loaded", share=share)
    return Judgement(verdict="loaded", share=share) if share > 0.5 + error else Judgement(verdict="unclear", share=None)


def _differences(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    if [len(row) for row in ours] != [len(row) for row in theirs]:
        raise ValueError(f"probe logprobs differ in shape: {[len(r) for r in ours]} and {[len(r) for r in theirs]}")
    return [a - b for ra, rb in zip(ours, theirs, strict=True) for a, b in zip(ra, rb, strict=True)]
