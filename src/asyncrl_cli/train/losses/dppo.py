"""DPPO with the binary total variation: the trust region bounds the change of a token's probability, not its
ratio.

    loss = - u * A * (0 if A > 0 and theta - prox > delta_high, or A < 0 and prox - theta > delta_low; else 1)

with u = theta / prox, and theta and prox the probabilities of the sampled token: |theta - prox| is the total
variation between the two policies, with all other tokens merged into one. So the ratio of a rare token may
change freely, unlike with PPO's clip.

Source: Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv:2602.04879),
DPPO-Binary-TV. delta_low and delta_high are `clip_ratio_low` and `clip_ratio_high`, as probabilities: 0.15 in
the paper.
"""

from __future__ import annotations

import torch

from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.losses import LossBatch, Metric, mean_of


def dppo(batch: LossBatch, algorithm: AlgorithmSection) -> tuple[torch.Tensor, dict[str, Metric]]:
    """`correction/clipped_ratio`: share of tokens outside the trust region."""
    advantages_N = batch.advantages_N
    ratio_N = torch.exp(batch.logp_theta_N - batch.logp_prox_N)
    moved_N = torch.exp(batch.logp_theta_N.detach()) - torch.exp(batch.logp_prox_N)
    is_high_N = (advantages_N > 0) & (moved_N > algorithm.clip_ratio_high)
    is_low_N = (advantages_N < 0) & (-moved_N > algorithm.clip_ratio_low)
    is_out_N = is_high_N | is_low_N
    metrics = {"correction/clipped_ratio": mean_of(is_out_N)}
    return (-ratio_N * advantages_N).masked_fill(is_out_N, 0.0), metrics
