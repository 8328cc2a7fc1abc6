"""The policy's loss of a microbatch: the algorithm's loss per token (losses/), corrected for data sampled by
older weights, plus a KL to the reference, minus an entropy bonus, aggregated over the optimizer step.

With theta the weights in training, prox those at the window's start and mu the sampler: w = prox / mu, r =
theta / mu.

    loglinear  log prox ~ log mu + a * (log theta - log mu), with a = steps from mu to prox / steps from mu to
               theta
    weights    w per token, or the product or geometric mean of w over a sequence; clipped or zeroed outside a
               threshold
    rejection  k1 = -log w, k2 = (log w)^2 / 2, k3 = w - 1 - log w, per token or over a sequence; kept within
               a threshold

Estimates of KL(p || q) from single tokens sampled by p, with L = log q - log p:

    k1            -L                   unbiased, but noisy; as a loss its gradient is 0 on average
    abs           |L|
    k2            L * L / 2            biased, but as a loss its gradient is unbiased
    k3            e^L - 1 - L          unbiased, never negative
    low_var_kl    k3 with L clamped to +- 20 and the estimate to 10

Sources: Fu et al. 2025, AReaL (arXiv:2505.24298) and its log-linear prox; Yao et al. 2025 (truncated
weights); Ling Team 2025 (arXiv:2510.18855), IcePop, for weights outside a band; Schulman 2020, "Approximating
KL Divergence", for k1 to k3; Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), equation 4, for k3 in the
loss; Ouyang et al. 2022 (arXiv:2203.02155), section 3.5, for k1 in the reward; verl's rollout correction and
`kl_penalty`, for the names.

What it is not: in the KL to the reference p is theta, although older policies sampled the tokens. That term
and the entropy are not reweighted: importance weights and rejection do not apply to them.

Legend: N = sampled tokens of a microbatch; a sequence is one of its rows (segments).
"""

from __future__ import annotations

import math
from typing import cast

import torch

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.data.sample_fields import BUILT_IN, Schema
from asyncrl_cli.measure.values import Ratio, Value
from asyncrl_cli.profile.algorithm_section import AlgorithmSection, Kl, bounds
from asyncrl_cli.profile.arithmetic import step_optimizer_steps
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.train.batch import (
    ADVANTAGES,
    PROX,
    REF,
    TEACHER,
    TEACHER_NUMBER,
    Microbatch,
    StepBatch,
)
from asyncrl_cli.train.logprobs import Scored
from asyncrl_cli.train.losses import LossBatch, Metric, find_loss, max_of, mean_of, sum_of
from asyncrl_cli.train.optimizer import aggregated, take_sum
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.step_plan import OptimizerStepPlan

WEIGHTS, WEIGHT_SQUARES = "sum of weights", "sum of squared weights"
"""`correction/effective_ratio` is computed from these sums; they are not metrics themselves."""
STALENESS_NAMES = ("stale_0", "stale_1", "stale_2_up")
MOST_LOG_RATIO = 20.0
"""Log ratios are clamped to +- this before exponentiation: e^20 is far outside any threshold."""
MOST_LOW_VAR_KL = 10.0


class PolicyLoss:
    """The loss of microbatches under the profile's algorithm."""

    def __init__(self, profile: Profile, schema: Schema = BUILT_IN) -> None:
        self._profile, self._algorithm, self._schema = profile, profile.algorithm, schema
        self._loss = find_loss(profile.algorithm.loss_mode)

    def __call__(
        self,
        microbatch: Microbatch,
        scored: Scored,
        plan: OptimizerStepPlan,
        steps_done: int,
        normalizer: float = 1.0,
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The microbatch's part of the optimizer step's loss, with gradient, and its metrics. `steps_done`:
        optimizer steps of the window before this one. `normalizer`: a factor of all importance weights."""
        algorithm, batch = self._algorithm, self._batch(microbatch, scored, steps_done)
        microbatch.columns[PROX] = batch.logp_prox_N  # later epochs have the same
        loss_N, metrics = self._loss(batch, algorithm)
        for name, values_N in batch.written.items():
            why = f'algorithm.loss_mode = "{algorithm.loss_mode}" writes the field "{name}"'
            if name not in self._schema or self._schema[name].by != "trainer":
                why = f"{why}, which is not declared as the trainer's"
                raise ConfigError(why, hint="declare it in task.fields")
            if values_N.shape != loss_N.shape:
                why = f"{why} of shape {tuple(values_N.shape)} for {len(loss_N)} tokens"
                raise ConfigError(why, hint="one number per token")
            microbatch.columns[name] = values_N
            metrics[f"fields/{name}"] = mean_of(values_N)
        factors_N, corrections = correct(batch, algorithm)
        loss = aggregated(loss_N * (factors_N * normalizer), microbatch, plan, self._profile)
        if REF in microbatch.columns:
            log_ratios_N = microbatch.columns[REF] - batch.logp_theta_N
            corrections["ref/kl"] = mean_of(kl_of("k3", log_ratios_N))
            if algorithm.use_kl_loss:  # otherwise the KL is in the reward (critic.py)
                kl_N = kl_of(algorithm.kl_loss_type, log_ratios_N)
                loss = loss + algorithm.kl_loss_coef * aggregated(kl_N, microbatch, plan, self._profile)
        if algorithm.entropy_coeff:
            bonus = aggregated(scored.entropy_N, microbatch, plan, self._profile)
            loss = loss - algorithm.entropy_coeff * bonus
        if TEACHER in microbatch.columns:
            kl_N = batch.logp_theta_N - microbatch.columns[TEACHER]
            if scored.divergence_N is not None:
                kl_N = scored.divergence_N
                loss = loss + algorithm.distill_coef * aggregated(kl_N, microbatch, plan, self._profile)
            corrections["distill/kl"] = mean_of(kl_N)
            if (numbers_N := microbatch.columns.get(TEACHER_NUMBER)) is not None:
                for number, name in enumerate(self._profile.teacher.paths):
                    corrections[f"distill/kl/{name}"] = mean_of(kl_N[numbers_N == number])
        metrics |= corrections | signals(batch, microbatch.staleness_N)
        return loss, {"train/loss": sum_of(loss), "train/entropy": mean_of(scored.entropy_N), **metrics}

    def weight_normalizer(self, batch: StepBatch, ranks: Ranks) -> float:
        """With `rollout_is_batch_normalize`: 1 / the mean of all ranks' importance weights in this optimizer
        step, all of whose microbatches have the column of prox. Else 1. A collective."""
        if not self._algorithm.rollout_is_batch_normalize:
            return 1.0
        total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        for microbatch in batch.microbatches:
            prox_N = microbatch.columns[PROX]
            loss_batch = self._batch(microbatch, Scored(prox_N, torch.zeros_like(prox_N)), 0)
            weights_N, _ = importance_weights(loss_batch, self._algorithm)
            total += torch.stack([weights_N.double().sum(), total.new_tensor(len(weights_N))])
        weights, tokens = ranks.sum(total).tolist()
        return tokens / weights if weights else 1.0

    def _batch(self, microbatch: Microbatch, scored: Scored, steps_done: int) -> LossBatch:
        logp_theta_N = scored.logprobs_N
        prox_N, training = microbatch.columns.get(PROX), self._profile.async_training
        if prox_N is None and self._algorithm.old_logprobs == "loglinear":
            prox_N = loglinear_prox(
                logp_theta_N,
                microbatch.logp_mu_N,
                microbatch.staleness_N,
                steps_done=steps_done,
                window_steps=training.trigger_parameter_sync_step * step_optimizer_steps(self._profile),
            )
        advantages_N = microbatch.columns.get(ADVANTAGES, microbatch.advantages_N)
        if TEACHER in microbatch.columns and self._algorithm.distill_loss == "sampled":
            log_ratios_N = microbatch.columns[TEACHER] - logp_theta_N.detach()
            advantages_N = advantages_N + self._algorithm.distill_coef * log_ratios_N
        return LossBatch(
            logp_theta_N=logp_theta_N,
            # Without a column theta is prox: the window's first optimizer step starts from these weights.
            logp_prox_N=logp_theta_N.detach() if prox_N is None else prox_N,
            logp_mu_N=microbatch.logp_mu_N,
            advantages_N=advantages_N,
            rows_N=microbatch.rows_N,
            num_rows=len(microbatch.inputs_BT),
            entropy_N=scored.entropy_N.detach(),
            columns={field.name: microbatch.columns[field.name] for field in self._schema.in_losses},
        )


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
    """The factor for each token's loss (its importance weight, or 0 if `rollout_rs` rejects it), and the
    metrics of both."""
    weights_N, metrics = importance_weights(batch, algorithm)
    if algorithm.rollout_rs is None or algorithm.rollout_rs_threshold is None:
        return weights_N, metrics
    newer_N = batch.logp_theta_N.detach() if algorithm.old_logprobs == "rollout" else batch.logp_prox_N
    log_N = (newer_N - batch.logp_mu_N).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    over, kind = algorithm.rollout_rs.rsplit("_", 1)
    values_N = kl_of(cast(Kl, kind), log_N)
    if over != "token":
        if over == "seq_max":
            lowest_R = values_N.new_full((batch.num_rows,), -math.inf)
            values_R = lowest_R.scatter_reduce(0, batch.rows_N, values_N, "amax")
        else:
            values_R = batch.row_sums(values_N) if over == "seq_sum" else batch.row_means(values_N)
        values_N = values_R[batch.rows_N]
    low, high = bounds(algorithm.rollout_rs_threshold)
    kept_N = values_N <= high
    if kind == "k1":  # the ratio itself has bounds; a single threshold t is the band from 1 / t to t
        ratio_N = torch.exp(-values_N)
        is_band = isinstance(algorithm.rollout_rs_threshold, str)
        kept_N = (ratio_N <= high) & (ratio_N >= (low if is_band else 1 / high))
    return weights_N * kept_N, metrics | {"correction/rejected_ratio": mean_of(~kept_N)}


def importance_weights(
    batch: LossBatch, algorithm: AlgorithmSection
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Weights by `rollout_is` and its threshold: from w, or from r for the loss `reinforce`, which has no
    ratio of its own. `weight_mean` and `weight_max` are taken before the threshold, the sums for the
    effective sample size after it."""
    is_reinforce = algorithm.loss_mode == "reinforce"
    log_N = (batch.logp_theta_N.detach() if is_reinforce else batch.logp_prox_N) - batch.logp_mu_N
    # With prox taken from the sampler, w is 1.
    if algorithm.rollout_is == "none" or (algorithm.old_logprobs == "rollout" and not is_reinforce):
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


def effective_ratio(metrics: dict[str, Value], num_tokens: int) -> dict[str, Value]:
    """The weights' effective sample size as a share of the tokens, (sum w)^2 / sum w^2 / tokens, in place of
    the two sums in a train step's metrics; nothing without weights."""
    if WEIGHTS not in metrics:
        return {}
    weights, squares = take_sum(metrics, WEIGHTS), take_sum(metrics, WEIGHT_SQUARES)
    return {"correction/effective_ratio": Ratio(weights * weights / max(num_tokens, 1), squares)}


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
        is_age_N = ages_N == age
        metrics[f"correction/ratio_mean/{name}"] = mean_of(ratio_N[is_age_N])
        metrics[f"correction/kl/{name}"] = mean_of(kl_N[is_age_N])
    return metrics


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
