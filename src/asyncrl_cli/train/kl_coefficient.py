"""The weight of the KL in the reward: `algorithm.kl_coef`, which may follow a target.

    error = clip(KL / kl_target - 1, -0.2, 0.2)
    coefficient *= max(1 + error * trajectories / kl_horizon, 0.8)

KL is the mean over a train step's sampled tokens of the estimate `kl_penalty`. The new coefficient applies
from the next train step on.

Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2. What it is not: there, KL is summed over a
response; in verl, it is averaged over each response first. There, a horizon shorter than a fifth of the
trajectories could make the coefficient negative; the bound of 0.8 prevents that.
"""

from __future__ import annotations

import math

from asyncrl_cli.measure.values import Last, Value
from asyncrl_cli.profile.algorithm_section import AlgorithmSection

MOST_ERROR = 0.2


class KlCoefficient:
    """`value` is state: it is part of checkpoints."""

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self.value = algorithm.kl_coef
        self._target, self._horizon = algorithm.kl_target, algorithm.kl_horizon

    def update(self, metrics: dict[str, Value], num_trajectories: int) -> None:
        """Follow the target, if there is one, after a train step with `reward/kl` among its metrics. Adds the
        coefficient that the step had. A KL that is not finite changes nothing."""
        kl = metrics["reward/kl"].value
        if self._target is None or not isinstance(kl, float) or not math.isfinite(kl):
            return
        metrics["reward/kl_coef"] = Last(self.value)
        error = min(max(kl / self._target - 1, -MOST_ERROR), MOST_ERROR)
        self.value *= max(1 + error * num_trajectories / self._horizon, 1 - MOST_ERROR)
