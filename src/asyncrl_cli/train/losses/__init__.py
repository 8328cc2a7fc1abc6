"""Losses of the policy, one per file, found by `algorithm.loss_mode`; their input (LossBatch) and their metrics (Metric).

A loss is a function of this signature:

    def loss(batch: LossBatch, algorithm: AlgorithmSection) -> tuple[torch.Tensor, dict[str, Metric]]

It returns the sum of its token losses over one microbatch, and its metrics. To add a loss, add a file here and a line in
`LOSSES`, or in another package an entry point in the group `asyncrl.losses`.

This module does not import torch, so that a profile can be checked without it. Legend: N = sampled tokens of a microbatch,
row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from asyncrl_cli.plugins import find
from asyncrl_cli.profile.schema import AlgorithmSection

if TYPE_CHECKING:
    import torch

    Loss = Callable[["LossBatch", AlgorithmSection], tuple[torch.Tensor, dict[str, "Metric"]]]

LOSSES = {"vanilla": "asyncrl_cli.train.losses.vanilla:vanilla"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBatch:
    """The sampled tokens of one microbatch, in float32. Only `logp_theta_N` carries a gradient.

    `rows_N` is the row (segment) of each token, 0 to `num_rows` - 1, for losses over whole sequences. A microbatch may be empty.

    The trainer divides the sum of all token losses by `step_tokens`, the sampled tokens of the whole optimizer step on all ranks. A
    loss that is a mean over trajectories multiplies by `step_tokens / step_trajectories`.
    """

    logp_theta_N: torch.Tensor
    logp_prox_N: torch.Tensor
    logp_mu_N: torch.Tensor
    advantages_N: torch.Tensor
    rows_N: torch.Tensor
    num_rows: int
    step_tokens: int
    step_trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A figure of one microbatch, without gradient. It is reduced once per train step, over microbatches, steps and ranks.

    A mean is the quotient of summed `amount` and summed `weight`. Every microbatch must return the same names, an empty one too.
    """

    kind: Literal["sum", "mean", "max"]
    amount: torch.Tensor
    weight: int = 0


def sum_of(values: torch.Tensor) -> Metric:
    return Metric(kind="sum", amount=values.detach().sum())


def mean_of(values: torch.Tensor) -> Metric:
    return Metric(kind="mean", amount=values.detach().sum(), weight=values.numel())


def max_of(values: torch.Tensor) -> Metric:
    """The maximum of `values`; -inf, which means that nothing was measured, if there are none."""
    return Metric(kind="max", amount=values.detach().max() if values.numel() else values.new_tensor(-math.inf))


def find_loss(name: str) -> Loss:
    """The loss of that name. ConfigError if neither asyncrl nor another package has it."""
    return find("algorithm.loss_mode", name, LOSSES, "asyncrl.losses")


def check_loss(name: str) -> None:
    """ConfigError for an unknown name. asyncrl's own losses are not imported, because they import torch."""
    if name not in LOSSES:
        find_loss(name)
