"""Losses of the policy, one per file, found by `algorithm.loss_mode`.

A loss is a function of this signature:

    def loss(batch: LossBatch, algorithm: AlgorithmSection) -> tuple[torch.Tensor, dict[str, Metric]]

It returns the sum of its token losses over one microbatch, and what it has measured (port.py). A new one is a file here and a line
in `LOSSES`, or an entry point `asyncrl.losses` of another package.
"""

from __future__ import annotations

from typing import Any

from asyncrl_cli.plugins import find

LOSSES = {"vanilla": "asyncrl_cli.train.losses.vanilla:vanilla"}


def find_loss(name: str) -> Any:
    """Raises ConfigError for a name that nobody has."""
    return find("algorithm.loss_mode", name, LOSSES, "asyncrl.losses")


def check_loss(name: str) -> None:
    """Raises ConfigError for a name that nobody has. Ours are not imported: they bring torch along."""
    if name not in LOSSES:
        find_loss(name)
