"""95% confidence intervals of eval rewards, over prompts: the samples of a prompt resemble each other, so
only their mean counts.

The textbook interval, mean +- z * s / sqrt(n), fails for few prompts: four rewards of 0 would prove a mean of
exactly 0. The formulas here add a few pseudo-observations at the ends of the range, which keeps the coverage
near 95% from about eight prompts on. The range is 0 to 1, and wider if a reward lies outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, hypot, sqrt
from statistics import NormalDist
from typing import NamedTuple

Z, Z_POWER = NormalDist().inv_cdf(0.975), NormalDist().inv_cdf(0.8)
"""Standard deviations on each side of a 95% interval, and those that give a test a power of 80%."""


class Interval(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanChange:
    """A difference of two mean rewards over `num_prompts`. `paired`: computed from both rewards of each
    prompt."""

    mean: float
    interval: Interval
    num_prompts: int
    paired: bool

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.interval.low > 0 or self.interval.high < 0

    @property
    def enough_prompts(self) -> int | None:
        """With this many prompts a true difference of this size would be clear in 80% of all evals. None if
        this one is clear, or without a difference."""
        if self.is_clear or abs(self.mean) < 1e-9:
            return None
        half_width = (self.interval.high - self.interval.low) / 2
        return ceil(self.num_prompts * (half_width / self.mean * (Z + Z_POWER) / Z) ** 2)


def reward_range(rewards: Iterable[float]) -> Interval:
    known = [0.0, 1.0, *rewards]
    return Interval(min(known), max(known))


def mean_interval(rewards: Sequence[float]) -> Interval:
    """For the mean over prompts like those in `rewards`, one reward per prompt.

    z^2 / 2 (1.9) prompts are added at each end of the range. For rewards of 0 and 1 this is the interval of
    Agresti and Coull (1998, Approximate is better than "exact" for interval estimation of binomial
    proportions, The American Statistician 52).
    """
    ends, added = reward_range(rewards), Z * Z / 2
    num = len(rewards) + 2 * added
    mean = (sum(rewards) + added * sum(ends)) / num
    squares = sum(reward * reward for reward in rewards) + added * sum(end * end for end in ends)
    half_width = Z * sqrt(max(squares / num - mean * mean, 0.0) / num)
    return Interval(max(mean - half_width, ends.low), min(mean + half_width, ends.high))


def paired_change(before: Sequence[float], after: Sequence[float]) -> MeanChange:
    """For the mean difference `after - before` of the same prompts, in the same order.

    Two prompts are added: one without a difference, and one that counts half as the largest rise and half as
    the largest fall. For rewards of 0 and 1 this is the interval of Agresti and Min (2005, Simple improved
    confidence intervals for comparing matched proportions, Statistics in Medicine 24), who add 0.5 to each
    cell of the table of both outcomes.
    """
    ends = reward_range([*before, *after])
    span = ends.high - ends.low
    differences = [new - old for old, new in zip(before, after, strict=True)]
    num = len(differences) + 2
    mean = sum(differences) / num
    squares = sum(difference * difference for difference in differences) + span * span
    half_width = Z * sqrt(max(squares / num - mean * mean, 0.0) / num)
    interval = Interval(max(mean - half_width, -span), min(mean + half_width, span))
    return MeanChange(
        mean=sum(differences) / len(differences), interval=interval, num_prompts=len(differences), paired=True
    )


def unpaired_change(
    before: tuple[float, Interval], after: tuple[float, Interval], num_prompts: int
) -> MeanChange:
    """For the difference of two means of which only (mean, interval) are known. `num_prompts`: the smaller of
    both numbers.

    The distances of each mean from the ends of its interval are added as squares (Newcombe 1998, Interval
    estimation for the difference between independent proportions, Statistics in Medicine 17, method 10). For
    the same prompts it is too wide.
    """
    (old, old_interval), (new, new_interval) = before, after
    low = new - old - hypot(new - new_interval.low, old_interval.high - old)
    high = new - old + hypot(new_interval.high - new, old - old_interval.low)
    return MeanChange(mean=new - old, interval=Interval(low, high), num_prompts=num_prompts, paired=False)
