"""CISPO: a REINFORCE loss that clips the weight, not the gradient. With u = theta / prox, per token

    loss = - stopped(clip(u, 1 - eps_low, 1 + eps_high)) * A * log theta

Every token keeps a gradient, even where PPO's clip would zero it.

Source: MiniMax 2025, MiniMax-M1 (arXiv:2506.13585), section 3.1. It has only the upper bound, as with
`clip_ratio_low = 1`.
"""

from __future__ import annotations

import torch

from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.losses import LossBatch, Metric, mean_of


def cispo(batch: LossBatch, algorithm: AlgorithmSection) -> tuple[torch.Tensor, dict[str, Metric]]:
    """`correction/clipped_ratio`: share of tokens whose ratio was clipped."""
    ratio_N = torch.exp(batch.logp_theta_N.detach() - batch.logp_prox_N)
    clipped_N = ratio_N.clamp(1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high)
    metrics = {"correction/clipped_ratio": mean_of(clipped_N != ratio_N)}
    return -clipped_N * batch.advantages_N * batch.logp_theta_N, metrics
