"""GSPO: the clipped ratio of whole sequences. For a sequence of T sampled tokens, s = (theta / prox of the
sequence) ^ (1 / T), and

    loss = - min(s * A, clip(s, 1 - eps_low, 1 + eps_high) * A)        for each of its tokens

All tokens get the gradient of s equally, as if each had its own ratio s * theta / stopped(theta) (GSPO-token,
section 4.3).

Source: Zheng et al. 2025 (arXiv:2507.18071), with clip widths of 3e-4 and 4e-4 and `loss_agg_mode =
"seq-mean-token-mean"`.

What it is not: a sequence here is a segment, not a trajectory. Each segment of a trajectory has its own
ratio.
"""

from __future__ import annotations

import torch

from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.losses import LossBatch, Metric, mean_of


def gspo(batch: LossBatch, algorithm: AlgorithmSection) -> tuple[torch.Tensor, dict[str, Metric]]:
    """`correction/clipped_ratio`: share of tokens in sequences whose loss was clipped."""
    theta_N = batch.logp_theta_N
    log_ratio_R = batch.row_means((theta_N - batch.logp_prox_N).detach())
    ratio_N = torch.exp(log_ratio_R[batch.rows_N] + theta_N - theta_N.detach())
    unclipped_N = ratio_N * batch.advantages_N
    near_one_N = ratio_N.clamp(1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high)
    clipped_N = near_one_N * batch.advantages_N
    metrics = {"correction/clipped_ratio": mean_of(clipped_N < unclipped_N)}
    return -torch.minimum(unclipped_N, clipped_N), metrics
