"""PPO's loss with a clipped ratio. With u = theta / prox, per token

    loss = - min(u * A, clip(u, 1 - eps_low, 1 + eps_high) * A)

With `clip_ratio_c` = c (dual clip) it is at most - c * A where A < 0. Multiplied by the weight w = prox / mu
it is decoupled PPO.

Sources: Schulman et al. 2017 (arXiv:1707.06347); Yu et al. 2025, DAPO (arXiv:2503.14476), for two clip
widths; Ye et al. 2020 (arXiv:1912.09729), for the dual clip; Hilton et al. 2021 (arXiv:2110.00641) and Fu et
al. 2025, AReaL (arXiv:2505.24298), for decoupling.

What it is not: it has no KL term, and the clip applies to a token's ratio, not to a sequence's.
"""

from __future__ import annotations

import torch

from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.losses import LossBatch, Metric, mean_of


def vanilla(batch: LossBatch, algorithm: AlgorithmSection) -> tuple[torch.Tensor, dict[str, Metric]]:
    """`correction/clipped_ratio`: share of tokens whose loss was clipped; `_high` and `_low`: the share
    clipped by that bound."""
    advantages_N = batch.advantages_N
    ratio_N = torch.exp(batch.logp_theta_N - batch.logp_prox_N)
    unclipped_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high) * advantages_N
    is_clipped_N = clipped_N < unclipped_N
    loss_N = -torch.minimum(unclipped_N, clipped_N)
    metrics = {
        "correction/clipped_ratio": mean_of(is_clipped_N),
        "correction/clipped_ratio_high": mean_of(is_clipped_N & (advantages_N > 0)),
        "correction/clipped_ratio_low": mean_of(is_clipped_N & (advantages_N < 0)),
    }
    if algorithm.clip_ratio_c is not None:
        most_N = -algorithm.clip_ratio_c * advantages_N
        is_cut_N = (advantages_N < 0) & (loss_N > most_N)
        loss_N = torch.where(is_cut_N, most_N, loss_N)
        metrics["correction/dual_clipped_ratio"] = mean_of(is_cut_N)
    return loss_N, metrics
