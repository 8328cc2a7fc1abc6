"""REINFORCE: loss = - A * log theta, per token.

It has no ratio of its own. Its importance weight is r = theta / mu, without gradient
(`algorithm.rollout_is`). With `none` it is the plain policy gradient, which is correct only for data sampled
by theta.

Source: Williams 1992; with truncated weights, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
You Off-Policy RL Training".
"""

from __future__ import annotations

import torch

from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.losses import LossBatch, Metric


def reinforce(batch: LossBatch, algorithm: AlgorithmSection) -> tuple[torch.Tensor, dict[str, Metric]]:
    return -batch.advantages_N * batch.logp_theta_N, {}
