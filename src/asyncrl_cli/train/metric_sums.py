"""The metrics of a train step: summed on the device, whatever their names, and reduced over ranks once at its end."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncrl_cli.loop.values import Max, Ratio, Sum, Value
from asyncrl_cli.train.losses.port import Metric
from asyncrl_cli.train.ranks import Ranks


class MetricSums:
    """Of one rank. Every rank must add the same names: the reduction is a collective over all of them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._kinds: dict[str, str] = {}
        self._amounts: dict[str, torch.Tensor] = {}
        self._weights: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        for name, metric in metrics.items():
            amount = metric.amount.double()
            before = self._amounts.get(name)
            if before is not None:
                amount = torch.maximum(before, amount) if metric.kind == "max" else before + amount
            self._kinds[name] = metric.kind
            self._amounts[name] = amount
            self._weights[name] = self._weights.get(name, 0) + metric.weight

    def reduced(self) -> dict[str, Value]:
        """Over all ranks. A collective."""
        maxima = sorted(name for name, kind in self._kinds.items() if kind == "max")
        sums = sorted(self._kinds.keys() - set(maxima))
        weights = torch.tensor([self._weights[name] for name in sums], dtype=torch.float64, device=self._ranks.device)
        totals = self._ranks.sum(torch.stack([*(self._amounts[name] for name in sums), *weights])).view(2, -1).tolist()
        values: dict[str, Value] = {}
        for name, amount, weight in zip(sums, *totals, strict=True):
            values[name] = Ratio(amount, weight) if self._kinds[name] == "mean" else Sum(amount)
        if maxima:
            largest = self._ranks.max(torch.stack([self._amounts[name] for name in maxima])).tolist()
            values |= {name: Max(amount) for name, amount in zip(maxima, largest, strict=True)}
        return values
