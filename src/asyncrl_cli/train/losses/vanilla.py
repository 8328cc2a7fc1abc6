"""The decoupled PPO loss of a microbatch's sampled tokens.

Per token, with theta now, prox the weights at the window's start, mu the sampler:

    u = exp(logp_theta - logp_prox);  w = exp(logp_prox - logp_mu)
    loss = - w * min(u * A, clip(u, 1 - eps_low, 1 + eps_high) * A)

Sources: Hilton et al. 2021 (arXiv:2110.00641) and Fu et al. 2025, AReaL (arXiv:2505.24298), for decoupling; Yu et al.
2025, DAPO (arXiv:2503.14476), for two clip widths and the token mean.

What it is not: there is no KL term, no critic, no per-sequence mean, no dual clip, and w is never differentiated.
"""

from __future__ import annotations

import torch

from asyncrl_cli.profile.schema import AlgorithmSection
from asyncrl_cli.train.losses import LossBatch, Metric, max_of, mean_of


def vanilla(batch: LossBatch, algorithm: AlgorithmSection) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Tokens whose w exceeds `max_importance_weight` have a loss of 0 but still count in the mean.

    `correction/ratio_*` and `clipped_ratio` are of u; `weight_*` of w, present only where w is not 1 by definition;
    `masked_ratio` only where w has a limit.
    """
    ratio_N = torch.exp(batch.logp_theta_N - batch.logp_prox_N)
    weight_N = torch.exp(batch.logp_prox_N - batch.logp_mu_N)
    unclipped_N = ratio_N * batch.advantages_N
    clipped_N = ratio_N.clamp(1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high) * batch.advantages_N
    loss_N = -weight_N * torch.minimum(unclipped_N, clipped_N)
    metrics = {
        "correction/ratio_mean": mean_of(ratio_N),
        "correction/ratio_max": max_of(ratio_N),
        "correction/clipped_ratio": mean_of(clipped_N < unclipped_N),
    }
    if algorithm.old_logprobs == "recompute":
        metrics |= {"correction/weight_mean": mean_of(weight_N), "correction/weight_max": max_of(weight_N)}
    if algorithm.max_importance_weight is not None:
        masked_N = weight_N > algorithm.max_importance_weight
        loss_N = loss_N.masked_fill(masked_N, 0.0)
        metrics["correction/masked_ratio"] = mean_of(masked_N)
    return loss_N.sum(), metrics
