"""Estimates of KL(p || q) from single tokens sampled by p. With L = log q - log p, per token

    k1            -L                   unbiased, but noisy; as a loss its gradient is 0 on average
    abs           |L|
    k2            L * L / 2            biased, but as a loss its gradient is unbiased
    k3            e^L - 1 - L          unbiased, never negative
    low_var_kl    k3 with L clamped to +- 20 and the estimate to 10

Sources: Schulman 2020, "Approximating KL Divergence", for k1 to k3; Shao et al. 2024, DeepSeekMath
(arXiv:2402.03300), equation 4, for k3 in the loss; Ouyang et al. 2022 (arXiv:2203.02155), section 3.5, for k1
in the reward; verl's `kl_penalty`, for the names.

What it is not: in the loss p is theta, although older policies sampled the tokens. The term is not reweighted
for that: importance weights and rejection (corrections.py) do not apply to it.
"""

from __future__ import annotations

import torch

from asyncrl_cli.profile.algorithm_section import Kl

MOST_LOG_RATIO = 20.0
"""Log ratios are clamped to +- this before exponentiation: e^20 is far outside any threshold."""
MOST_LOW_VAR_KL = 10.0


def kl_of(kind: Kl, log_ratios_N: torch.Tensor) -> torch.Tensor:
    """Each token's estimate from its L, (N), with L's gradient."""
    match kind:
        case "k1":
            return -log_ratios_N
        case "abs":
            return log_ratios_N.abs()
        case "k2":
            return log_ratios_N.square() / 2
        case "k3":
            return torch.expm1(log_ratios_N) - log_ratios_N
        case "low_var_kl":
            return kl_of("k3", log_ratios_N.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)).clamp(max=MOST_LOW_VAR_KL)
