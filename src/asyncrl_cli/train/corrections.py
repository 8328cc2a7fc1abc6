"""Corrections for data sampled by older weights: estimated prox logprobs, importance weights, rejection, and
their metrics.

With theta the weights in training, prox those at the window's start and mu the sampler: w = prox / mu, r =
theta / mu.

    loglinear    log prox ~ log mu + a * (log theta - log mu), with a = steps from mu to prox / steps from mu to theta
    weights      w per token, or the product or geometric mean of w over a sequence; clipped or zeroed outside a threshold
    rejection    k1 = -log w, k2 = (log w)^2 / 2, k3 = w - 1 - log w, per token or over a sequence; kept within a threshold

Sources: Fu et al. 2025, AReaL (arXiv:2505.24298) and its log-linear prox; Yao et al. 2025 (truncated
weights); Ling Team 2025 (arXiv:2510.18855), IcePop, for weights outside a band; Schulman 2020, "Approximating
KL Divergence", for k1 to k3; verl's rollout correction, for the keys.

Pure functions without gradient. Legend: N = sampled tokens of a microbatch; a sequence is one of its rows
(segments).
"""

from __future__ import annotations

import math
from typing import cast

import torch

from asyncrl_cli.profile.algorithm_section import AlgorithmSection, Kl, bounds
from asyncrl_cli.train.kl import MOST_LOG_RATIO, kl_of
from asyncrl_cli.train.losses import LossBatch, Metric, max_of, mean_of, sum_of

WEIGHTS, WEIGHT_SQUARES = "sum of weights", "sum of squared weights"
"""The trainer computes `correction/effective_ratio` from these sums; they are not metrics themselves."""
STALENESS_NAMES = ("stale_0", "stale_1", "stale_2_up")


def loglinear_prox(
    logp_theta_N: torch.Tensor,
    logp_mu_N: torch.Tensor,
    staleness_N: torch.Tensor,
    *,
    steps_done: int,
    window_steps: int,
) -> torch.Tensor:
    """Estimated prox logprobs. `staleness_N`: versions from mu to prox; `steps_done`: optimizer steps of this
    window so far; `window_steps`: those of a whole window. Exact if theta equals prox (`steps_done` = 0) or
    mu equals prox (staleness 0)."""
    to_prox_N = staleness_N * window_steps
    share_N = to_prox_N / (to_prox_N + steps_done).clamp(min=1)
    return torch.lerp(logp_mu_N, logp_theta_N.detach(), share_N.to(logp_mu_N.dtype))


def correct(batch: LossBatch, algorithm: AlgorithmSection) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The factor for each token's loss (its importance weight, or 0 if it is rejected), and the metrics of
    both."""
    weights_N, metrics = importance_weights(batch, algorithm)
    if algorithm.rollout_rs is None or algorithm.rollout_rs_threshold is None:
        return weights_N, metrics
    newer_N = batch.logp_theta_N.detach() if algorithm.old_logprobs == "rollout" else batch.logp_prox_N
    kept_N = accepted(batch, newer_N - batch.logp_mu_N, algorithm.rollout_rs, algorithm.rollout_rs_threshold)
    return weights_N * kept_N, metrics | {"correction/rejected_ratio": mean_of(~kept_N)}


def importance_weights(
    batch: LossBatch, algorithm: AlgorithmSection
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Weights by `rollout_is` and its threshold: from w, or from r for the loss `reinforce`, which has no
    ratio of its own. `weight_mean` and `weight_max` are taken before the threshold, the sums for the
    effective sample size after it."""
    log_N = (
        batch.logp_theta_N.detach() if algorithm.loss_mode == "reinforce" else batch.logp_prox_N
    ) - batch.logp_mu_N
    if algorithm.rollout_is == "none" or (
        algorithm.old_logprobs == "rollout" and algorithm.loss_mode != "reinforce"
    ):
        return torch.ones_like(log_N), {}
    if algorithm.rollout_is != "token":
        rows = batch.row_sums(log_N) if algorithm.rollout_is == "sequence" else batch.row_means(log_N)
        log_N = rows.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)[batch.rows_N]
    weights_N = torch.exp(log_N)
    metrics = {"correction/weight_mean": mean_of(weights_N), "correction/weight_max": max_of(weights_N)}
    if algorithm.rollout_is_threshold is not None:
        low, high = bounds(algorithm.rollout_is_threshold)
        outside_N = (weights_N < low) | (weights_N > high)
        is_band = isinstance(algorithm.rollout_is_threshold, str)
        weights_N = weights_N.masked_fill(outside_N, 0.0) if is_band else weights_N.clamp(max=high)
        metrics["correction/masked_ratio" if is_band else "correction/truncated_ratio"] = mean_of(outside_N)
    metrics |= {WEIGHTS: sum_of(weights_N), WEIGHT_SQUARES: sum_of(weights_N.square())}
    return weights_N, metrics


def accepted(batch: LossBatch, log_ratios_N: torch.Tensor, rule: str, threshold: float | str) -> torch.Tensor:
    """Which tokens `rollout_rs` keeps, as (N) of bool. `log_ratios_N`: logs of the ratio between two
    policies."""
    log_N = log_ratios_N.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    over, kind = rule.rsplit("_", 1)
    values_N = kl_of(cast(Kl, kind), log_N)
    if over != "token":
        values_N = _over_sequences(batch, values_N, over)[batch.rows_N]
    low, high = bounds(threshold)
    if kind != "k1":
        return values_N <= high
    ratio_N = torch.exp(-values_N)
    return (ratio_N <= high) & (ratio_N >= (low if isinstance(threshold, str) else 1 / high))


def signals(batch: LossBatch, staleness_N: torch.Tensor) -> dict[str, Metric]:
    """Metrics of how far the data is from the policy, over all tokens and by staleness: u's mean and maximum,
    and the k3 estimate of KL(mu || theta) in nats per token."""
    log_r_N = batch.logp_theta_N.detach() - batch.logp_mu_N
    ratio_N = torch.exp(batch.logp_theta_N.detach() - batch.logp_prox_N)
    kl_N = kl_of("k3", log_r_N)
    metrics = {
        "correction/ratio_mean": mean_of(ratio_N),
        "correction/ratio_max": max_of(ratio_N),
        "correction/kl": mean_of(kl_N),
    }
    ages_N = staleness_N.clamp(0, len(STALENESS_NAMES) - 1)
    for age, name in enumerate(STALENESS_NAMES):
        of_age_N = ages_N == age
        metrics[f"correction/ratio_mean/{name}"] = mean_of(ratio_N[of_age_N])
        metrics[f"correction/kl/{name}"] = mean_of(kl_N[of_age_N])
    return metrics


def _over_sequences(batch: LossBatch, values_N: torch.Tensor, over: str) -> torch.Tensor:
    if over == "seq_sum":
        return batch.row_sums(values_N)
    if over == "seq_mean":
        return batch.row_means(values_N)
    lowest_R = values_N.new_full((batch.num_rows,), -math.inf)
    return lowest_R.scatter_reduce(0, batch.rows_N, values_N, "amax")
