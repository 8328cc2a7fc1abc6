"""Reduces token losses to the loss of an optimizer step, and microbatch metrics to those of a train step,
over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from asyncrl_cli.measure.values import Last, Max, Ratio, Sum, Value
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.train.balance import OptimizerStepPlan
from asyncrl_cli.train.batch import Microbatch
from asyncrl_cli.train.losses import Metric
from asyncrl_cli.train.ranks import Ranks


def aggregated(
    loss_N: torch.Tensor, microbatch: Microbatch, plan: OptimizerStepPlan, profile: Profile
) -> torch.Tensor:
    """The microbatch's part of the optimizer step's loss, aggregated by `algorithm.loss_agg_mode`."""
    match profile.algorithm.loss_agg_mode:
        case "token-mean":
            return loss_N.sum() / max(plan.num_loss_tokens, 1)
        case "seq-mean-token-mean":
            total = (loss_N / microbatch.trajectory_tokens_N).sum()
        case "seq-mean-token-sum":
            total = loss_N.sum()
        case "seq-mean-token-sum-norm":
            total = loss_N.sum() / profile.rollout.max_response_tokens
    return total / max(plan.num_trajectories, 1)


def reduced(ranks: Ranks, seen: Sequence[Mapping[str, Metric]]) -> dict[str, Value]:
    """A train step's metrics over all ranks, from those of each microbatch. A collective: all ranks must have
    the same names."""
    if not seen:
        return {}
    kinds = {name: metric.kind for name, metric in sorted(seen[0].items())}
    amounts = {name: torch.stack([metrics[name].amount.double() for metrics in seen]) for name in kinds}
    maxima, sums = ([name for name in kinds if (kinds[name] == "max") is is_max] for is_max in (True, False))
    weights = amounts[sums[0]].new_tensor([sum(metrics[name].weight for metrics in seen) for name in sums])
    totals = ranks.sum(torch.stack([*(amounts[name].sum() for name in sums), *weights])).view(2, -1).tolist()
    values: dict[str, Value] = {}
    for name, amount, weight in zip(sums, *totals, strict=True):
        values[name] = Ratio(amount, weight) if kinds[name] == "mean" else Sum(amount)
    if maxima:
        largest = ranks.max(torch.stack([amounts[name].max() for name in maxima])).tolist()
        values |= {name: Max(amount) for name, amount in zip(maxima, largest, strict=True)}
    return values


def finite(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """The metrics with finite values. (A skipped step makes others infinite or NaN.)"""
    return {
        name: value
        for name, value in metrics.items()
        if value.value is not None and math.isfinite(value.value)
    }


def optimizer_metrics(prefix: str, loss: Value, steps: Sequence[tuple[float, float]]) -> dict[str, Value]:
    """Metrics from the sum of the losses, and from `steps`: each step's gradient norm and learning rate.
    Steps whose norm is not finite were skipped."""
    made = [norm for norm, _ in steps if math.isfinite(norm)]
    return {
        f"{prefix}/loss": Ratio(loss.value, len(steps)),
        f"{prefix}/grad_norm": Ratio(sum(made), len(made)),
        f"{prefix}/lr": Last(steps[-1][1]),
        f"{prefix}/skipped_steps": Sum(float(len(steps) - len(made))),
    }
