"""Sums behind a train step's `correction/*` and `train/*` metrics: on the device until the step ends, then over ranks.

`correction/ratio_*` and `clipped_ratio` are of u; `correction/weight_*` of w, present only where w is not 1 by
definition; `masked_ratio` only where `max_importance_weight` is set. Means are per sampled token.
"""

from __future__ import annotations

import torch

from asyncrl_cli.train.losses import TokenLosses
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.settings import TrainerSettings


class CorrectionSums:
    """Adds up one train step on one rank."""

    def __init__(self, settings: TrainerSettings, ranks: Ranks) -> None:
        self._has_weight = settings.old_logprobs == "recompute"
        self._has_mask = settings.max_importance_weight is not None
        self._ranks = ranks
        self._sums = torch.zeros(7, dtype=torch.float64, device=ranks.device)
        self._maxima = torch.zeros(2, dtype=torch.float64, device=ranks.device)

    def add(self, losses: TokenLosses, loss: torch.Tensor, entropy: torch.Tensor) -> None:
        """`loss`: this microbatch's part of its optimizer step's token mean; `entropy`: summed over its tokens."""
        ratio_N, weight_N, num_tokens = losses.ratio_N, losses.weight_N, losses.ratio_N.numel()
        if num_tokens == 0:
            return
        masked = losses.masked_N.sum() if losses.masked_N is not None else ratio_N.new_zeros(())
        parts = (
            ratio_N.new_tensor(float(num_tokens)),
            loss.detach(),
            entropy,
            ratio_N.sum(),
            losses.clipped_N.sum(),
            weight_N.sum(),
            masked,
        )
        self._sums += torch.stack([part.double() for part in parts])
        self._maxima = torch.maximum(self._maxima, torch.stack([ratio_N.max(), weight_N.max()]).double())

    def metrics(self, num_optimizer_steps: int) -> dict[str, float]:
        """Means and maxima over all ranks. A collective."""
        tokens, loss, entropy, ratio, clipped, weight, masked = self._ranks.sum(self._sums).tolist()
        ratio_max, weight_max = self._ranks.max(self._maxima).tolist()
        metrics = {"train/loss": loss / num_optimizer_steps}
        if tokens == 0:
            return metrics
        metrics |= {
            "train/entropy": entropy / tokens,
            "correction/ratio_mean": ratio / tokens,
            "correction/ratio_max": ratio_max,
            "correction/clipped_ratio": clipped / tokens,
        }
        if self._has_weight:
            metrics |= {"correction/weight_mean": weight / tokens, "correction/weight_max": weight_max}
        if self._has_mask:
            metrics["correction/masked_ratio"] = masked / tokens
        return metrics
