"""GRPO advantages: a trajectory's reward against the other trajectories of its prompt. Pure Python.

With normalization: (r - mean) / (std + 1e-6), std with n - 1 in the denominator, as verl computes it
(Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1). Without: r - mean (Liu et al. 2025, "Understanding
R1-Zero-Like Training", arXiv:2503.20783, section 3.2: dividing by std overweights very easy and very hard prompts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

STD_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], normalize: bool) -> list[float]:
    """One advantage per trajectory of a group, in order. Equal rewards (or a single one) teach nothing: all zeros."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + STD_EPSILON) for c in centred]
