"""SAPO: a soft gate replaces the clip. With u = theta / prox and tau = tau_pos where A > 0, else tau_neg, per
token

    loss = - 4 / tau * sigmoid(tau * (u - 1)) * A

Its derivative with respect to u is - A at u = 1, and shrinks smoothly on both sides.

Source: Gao et al. 2025, "Soft Adaptive Policy Optimization" (arXiv:2511.20347), with tau_pos = 1, tau_neg =
1.05 and `loss_agg_mode = "seq-mean-token-mean"`.

What it is not: the loss is not 0 at u = 1 (unless A is 0). Only its gradient is meaningful.
"""

from __future__ import annotations

import torch

from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.losses import LossBatch, Metric


def sapo(batch: LossBatch, algorithm: AlgorithmSection) -> tuple[torch.Tensor, dict[str, Metric]]:
    ratio_N = torch.exp(batch.logp_theta_N - batch.logp_prox_N)
    positive, negative = ratio_N.new_tensor([algorithm.sapo_tau_pos, algorithm.sapo_tau_neg])
    tau_N = torch.where(batch.advantages_N > 0, positive, negative)
    return -4.0 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1.0)) * batch.advantages_N, {}
