"""What a change does to a setting, with 90% intervals, and how a profile's speed grows with GPUs.

effect     exp(mean +- 1.645 standard deviations) of the ratio to the unchanged setting, over draws of
           what the workload does not know
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

NINETY = 1.645
"""Standard deviations of a normal variate that 90% lie within."""
LEAST_SAVING = 0.02
"""Of the time: what saves less limits nothing."""
PAYS = 1.25
"""Twice the GPUs pay if they make at least this many times as many groups per second. Chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`sets` override keys of the profile, `factors` multiply figures of the workload."""

    label: str
    sets: tuple[str, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)
    is_resource: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure and the 90% interval around it."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of positive values, as if their logarithms were normal; 0 if all are 0."""
        if not any(values):
            return cls(value=0.0, low=0.0, high=0.0)
        logs = [math.log(max(value, 1e-9)) for value in values]
        middle, reach = statistics.fmean(logs), NINETY * statistics.stdev(logs) if len(logs) > 1 else 0.0
        return cls(value=math.exp(middle), low=math.exp(middle - reach), high=math.exp(middle + reach))

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}..{self.high:.3g}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A change's figures: groups per second and their ratio to the unchanged setting's, mean staleness in
    versions, device seconds per group. `error`: why it could not be simulated."""

    change: Change
    groups_per_s: Interval | None = None
    ratio: Interval | None = None
    staleness: Interval | None = None
    cost_s: Interval | None = None
    error: str = ""

    @property
    def saving(self) -> float:
        """Share of the time that the change saves."""
        return 1 - 1 / self.ratio.value if self.ratio else 0.0


def limit(found: Sequence[Effect]) -> str:
    """Which resource limits, in words."""
    tried = [effect for effect in found if effect.change.is_resource and effect.ratio is not None]
    most = max(tried, key=lambda effect: effect.saving, default=None)
    if most is None or most.saving < LEAST_SAVING:
        return "no single resource"
    what = "without it" if most.change.label.startswith("tail") else "with twice as much"
    return f"{most.change.label} ({most.saving:.0%} less time {what})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A profile's effects on ascending numbers of GPUs, relative to the first number. The batch is the same
    for all."""

    profile: str
    gpus: Sequence[int]
    effects: Sequence[Effect]

    def to_json(self) -> dict[str, object]:
        """Has more than is needed to read it back."""
        return asdict(self) | {"linearity": self.linearity, "enough_gpus": self.enough_gpus}

    def __str__(self) -> str:
        if self.enough_gpus == self.gpus[-1]:
            return f"more pay up to {self.enough_gpus} GPUs"
        return f"at {self.enough_gpus} GPUs more no longer pay"

    @property
    def rates(self) -> list[tuple[int, Interval]]:
        """GPUs and groups per second, where they could be simulated."""
        pairs = zip(self.gpus, self.effects, strict=True)
        return [(gpus, one.groups_per_s) for gpus, one in pairs if one.groups_per_s is not None]

    @property
    def linearity(self) -> list[float | None]:
        """Groups per second, over those of the fewest GPUs and as many times more."""
        return [
            None if effect.ratio is None else effect.ratio.value * self.gpus[0] / gpus
            for gpus, effect in zip(self.gpus, self.effects, strict=True)
        ]

    @property
    def enough_gpus(self) -> int:
        """The number from which the next one no longer pays."""
        steps = list(zip(self.gpus, self.effects, strict=True))
        for (fewer, before), (more, after) in pairwise(steps):
            if before.ratio is None or after.ratio is None:
                return fewer
            doublings = math.log2(more / fewer)
            if after.ratio.value / before.ratio.value < PAYS**doublings:
                return fewer
        return self.gpus[-1]
