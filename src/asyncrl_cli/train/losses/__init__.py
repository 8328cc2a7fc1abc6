"""Losses of the policy, one per file, chosen by `algorithm.loss_mode`; their input (LossBatch) and their
metrics (Metric).

A loss is a function of this signature:

    def loss(batch: LossBatch, algorithm: AlgorithmSection) -> tuple[torch.Tensor, dict[str, Metric]]

It returns the loss of each of the N tokens, and its metrics. The trainer multiplies each token's loss by its
importance weight (train/policy_loss.py) and aggregates the tokens (`algorithm.loss_agg_mode`), so both work
with every loss. To add a loss, add a file here and a line in `LOSSES`, or register an entry point of another
package in the group `asyncrl.losses`.

This module does not import torch, so that a profile can be checked without it. Legend: N = sampled tokens of
a microbatch, row by row; R = its rows (sequences).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from asyncrl_cli.base.named_code import find_plugin
from asyncrl_cli.profile.algorithm_section import AlgorithmSection

if TYPE_CHECKING:
    import torch

    Loss = Callable[["LossBatch", AlgorithmSection], tuple[torch.Tensor, dict[str, "Metric"]]]

LOSSES = {
    name: f"asyncrl_cli.train.losses.{name}:{name}"
    for name in ("vanilla", "gspo", "cispo", "dppo", "sapo", "reinforce")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBatch:
    """The sampled tokens of one microbatch, in float32. Only `logp_theta_N` carries a gradient.

    `rows_N` is the row (sequence) of each token, 0 to `num_rows` - 1, for losses over whole sequences. A
    microbatch may be empty. `entropy_N`: of each token's distribution, in nats. `columns`: the declared
    fields with `in_losses`, (N), float32 or int64 (data/sample_fields.py).
    """

    logp_theta_N: torch.Tensor
    logp_prox_N: torch.Tensor
    logp_mu_N: torch.Tensor
    advantages_N: torch.Tensor
    rows_N: torch.Tensor
    num_rows: int
    entropy_N: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    written: dict[str, torch.Tensor] = field(default_factory=dict)

    def write(self, name: str, values_N: torch.Tensor) -> None:
        """Write a declared field: samples have it, and its mean is the metric `fields/<name>`. Every
        microbatch, even an empty one, must write the same fields."""
        self.written[name] = values_N.detach()

    def row_sums(self, values_N: torch.Tensor) -> torch.Tensor:
        """Each row's sum of its tokens' values, (R)."""
        return values_N.new_zeros(self.num_rows).index_add(0, self.rows_N, values_N)

    def row_means(self, values_N: torch.Tensor) -> torch.Tensor:
        """Each row's mean over its tokens, (R); 0 for a row without tokens."""
        return self.row_sums(values_N) / self.row_sums(values_N.new_ones(len(values_N))).clamp(min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A value from one microbatch, without gradient. It is reduced once per train step, over microbatches,
    steps and ranks.

    A mean is summed `amount` divided by summed `weight`. Every microbatch, even an empty one, must return the
    same names.
    """

    kind: Literal["sum", "mean", "max"]
    amount: torch.Tensor
    weight: int = 0


def sum_of(values: torch.Tensor) -> Metric:
    return Metric(kind="sum", amount=values.detach().sum())


def mean_of(values: torch.Tensor) -> Metric:
    return Metric(kind="mean", amount=values.detach().sum(), weight=values.numel())


def max_of(values: torch.Tensor) -> Metric:
    """The maximum of `values`; -inf (nothing was measured) if there are none."""
    largest = values.detach().max() if values.numel() else values.new_tensor(-math.inf)
    return Metric(kind="max", amount=largest)


def find_loss(name: str) -> Loss:
    """The loss called `name`. Raises ConfigError if neither asyncrl nor another package has it."""
    loss: Loss = find_plugin("algorithm.loss_mode", name, LOSSES, "asyncrl.losses")
    return loss


def check_loss(name: str) -> None:
    """Raises ConfigError for an unknown name. Does not import asyncrl's own losses, because they import
    torch."""
    if name not in LOSSES:
        find_loss(name)
