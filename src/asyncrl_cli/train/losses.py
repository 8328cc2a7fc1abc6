"""The decoupled PPO loss of one microbatch's sampled tokens, and what it says of itself.

Per token, with theta now, prox the weights at the window's start, mu the sampler:

    u = exp(logp_theta - logp_prox);  w = exp(logp_prox - logp_mu)
    loss = - w * min(u * A, clip(u, 1 - eps_low, 1 + eps_high) * A)

Sources: Hilton et al. 2021 (arXiv:2110.00641) and Fu et al. 2025, AReaL (arXiv:2505.24298), for decoupling; Yu et al.
2025, DAPO (arXiv:2503.14476), for two clip widths and the token mean.

What it is not: there is no KL term, no critic, no per-sequence mean, no dual clip, and w is never differentiated.

Legend: N = sampled tokens of a microbatch, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Per token: the loss, u and w (without gradient), whether the clip won, whether w's limit masks the token."""

    loss_N: torch.Tensor
    ratio_N: torch.Tensor
    weight_N: torch.Tensor
    clipped_N: torch.Tensor
    masked_N: torch.Tensor | None


def decoupled_ppo(
    logp_theta_N: torch.Tensor,
    logp_prox_N: torch.Tensor,
    logp_mu_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    max_importance_weight: float | None = None,
) -> TokenLosses:
    """All inputs float32; only `logp_theta_N` carries a gradient. Masked tokens lose 0 but stay in the mean's count."""
    ratio_N = torch.exp(logp_theta_N - logp_prox_N)
    weight_N = torch.exp(logp_prox_N - logp_mu_N)
    unclipped_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high) * advantages_N
    loss_N = -weight_N * torch.minimum(unclipped_N, clipped_N)
    masked_N = None
    if max_importance_weight is not None:
        masked_N = weight_N > max_importance_weight
        loss_N = loss_N.masked_fill(masked_N, 0.0)
    return TokenLosses(
        loss_N=loss_N,
        ratio_N=ratio_N.detach(),
        weight_N=weight_N,
        clipped_N=(clipped_N < unclipped_N).detach(),
        masked_N=masked_N,
    )
