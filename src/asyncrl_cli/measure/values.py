"""Measured values, each with its own way to merge, so that no code guesses a reduction from a metric's name.

A value is measured in one train step. `merge` combines it with the next step's, over a window or over the
run. A metrics line shows `value`; None means that nothing was measured, and the line leaves the key out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from itertools import zip_longest
from typing import Any, Protocol, Self

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

Scalar = float | int | list[int]


class Value(Protocol):
    @property
    def value(self) -> Scalar | None: ...

    def merge(self, later: Any) -> Self: ...


@dataclass(frozen=True, slots=True)
class Last:
    """The newest figure replaces older ones. For versions, and for totals that are added up elsewhere."""

    value: float | int | None

    def merge(self, later: Last) -> Last:
        return later if later.value is not None else self


@dataclass(frozen=True, slots=True)
class Max:
    value: float | int | None

    def merge(self, later: Max) -> Max:
        return Max(max((value for value in (self.value, later.value) if value is not None), default=None))


class _Added:
    """Values whose parts are added one by one."""

    __slots__: tuple[str, ...] = ()

    def merge(self, later: Self) -> Self:
        return type(self)(*(getattr(self, name) + getattr(later, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Sum(_Added):
    """Counts and seconds."""

    value: float | int


@dataclass(frozen=True, slots=True)
class Ratio(_Added):
    """`part / whole`: means (sum over weight), rates (amount over seconds), shares. Absent while `whole` is
    0."""

    part: float
    whole: float

    @property
    def value(self) -> float | None:
        return self.part / self.whole if self.whole else None


@dataclass(frozen=True, slots=True)
class Spread(_Added):
    """Standard deviation of a population, from its moments."""

    count: int
    total: float
    squares: float

    @property
    def value(self) -> float | None:
        if not self.count:
            return None
        mean = self.total / self.count
        return float(max(0.0, self.squares / self.count - mean * mean) ** 0.5)


@dataclass(frozen=True, slots=True)
class Overlap(_Added):
    """The time in which both sides are busy, as a share of the shorter busy time. Absent while one side was
    never busy."""

    both_s: float
    trainer_s: float
    rollout_s: float

    @property
    def value(self) -> float | None:
        smaller_s = min(self.trainer_s, self.rollout_s)
        return self.both_s / smaller_s if smaller_s > 0 else None


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]`: how many had the value i."""

    counts: tuple[int, ...]

    @property
    def value(self) -> list[int] | None:
        return list(self.counts) or None

    def merge(self, later: Histogram) -> Histogram:
        return Histogram(tuple(a + b for a, b in zip_longest(self.counts, later.counts, fillvalue=0)))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The distribution within one step. With m entries, a share i / (m - 1) of the step's values is at or
    below entry i."""

    points: tuple[int, ...]

    @classmethod
    def of(cls, ascending: Sequence[int], shares: int = 40) -> Quantiles:
        last = len(ascending) - 1
        return cls(tuple(ascending[round(last * i / shares)] for i in range(shares + 1)) if ascending else ())

    @property
    def value(self) -> list[int] | None:
        return list(self.points) or None

    def merge(self, later: Quantiles) -> Quantiles:
        return later if later.points else self


Cluster = tuple[float, float, float, float, float]
"""Of members that came together: how many were selected, the sum of their x; how many there are, the sums of
their x and of x squared."""


@dataclass(frozen=True, slots=True)
class Selection:
    """How far the mean of x of the selected members is from that of all members, in standard deviations of
    all. Members come in clusters, whose sums over clusters and products of two sums are kept."""

    sums: tuple[float, ...]
    """Empty if there were no clusters."""
    products: tuple[float, ...]

    def __post_init__(self) -> None:
        fits = not self.sums or (len(self.sums) == 5 and self.sums[0] <= self.sums[2])
        if len(self.products) != 25 or not fits:
            raise ValueError("these are not the sums over clusters")

    @classmethod
    def of(cls, clusters: Sequence[Cluster]) -> Self:
        return cls(
            tuple(map(sum, zip(*clusters, strict=True))),
            tuple(sum(one[i] * one[j] for one in clusters) for i in range(5) for j in range(5)),
        )

    @property
    def value(self) -> float | None:
        weights = self._weights()
        return weights[0] if weights else None

    def merge(self, later: Self) -> Self:
        if not self.sums or not later.sums:
            return self if self.sums else later
        return type(self)(_summed(self.sums, later.sums), _summed(self.products, later.products))

    def _weights(self) -> tuple[float, tuple[float, ...]] | None:
        """The difference, and its derivatives by the five sums. None if nothing was selected, or if all x are
        equal."""
        if not self.sums or not self.sums[0]:
            return None
        chosen, chosen_x, members, x, squares = self.sums
        mean, chosen_mean = x / members, chosen_x / chosen
        variance = squares / members - mean * mean
        if variance <= 1e-12 * squares / members:
            return None
        deviation = variance**0.5
        difference = (chosen_mean - mean) / deviation
        turn = difference / (2 * variance)  # by the variance
        return difference, (
            -chosen_mean / (chosen * deviation),
            1 / (chosen * deviation),
            (mean / deviation + turn * (variance - mean * mean)) / members,
            (2 * turn * mean - 1 / deviation) / members,
            -turn / members,
        )


@dataclass(frozen=True, slots=True)
class SelectionError(Selection):
    """The standard error of a `Selection`, by the delta method: clusters are independent, their members need
    not be (the sandwich estimator: Liang and Zeger, Biometrika 73, 1986)."""

    @property
    def value(self) -> float | None:
        weights = self._weights()
        if weights is None:
            return None
        by = weights[1]
        variance = sum(by[i] * by[j] * self.products[5 * i + j] for i in range(5) for j in range(5))
        return float(max(variance, 0.0) ** 0.5)


def _summed(some: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(some, others, strict=True))


KINDS: Mapping[str, type[Value]] = {
    kind.__name__: kind
    for kind in (Last, Sum, Max, Ratio, Spread, Overlap, Histogram, Quantiles, Selection, SelectionError)
}


def merge_into(totals: dict[str, Value], values: Mapping[str, Value]) -> None:
    """Merge `values` into `totals`, key by key. Replaces a total of another kind (from a checkpoint that does
    not fit)."""
    for key, value in values.items():
        totals[key] = totals[key].merge(value) if type(totals.get(key)) is type(value) else value


def shown(values: Mapping[str, Value]) -> dict[str, Scalar]:
    """The figure of every measured value by key, as a metrics line shows it."""
    return {key: shown for key, value in values.items() if (shown := value.value) is not None}


def to_json(values: Mapping[str, Value]) -> dict[str, list[object]]:
    return {
        key: [type(value).__name__, *astuple(value)]  # type: ignore[call-overload]
        for key, value in values.items()
    }


def from_json(content: Mapping[str, Sequence[object]]) -> dict[str, Value]:
    """Raises ValueError for what `to_json` does not write."""
    return {key: _value(key, *entry) for key, entry in content.items()}


def _value(key: str, kind: object = None, *parts: object) -> Value:
    if kind not in KINDS:
        raise ValueError(f"{key:.80}: {kind!r:.40} is not a known kind of value")
    try:
        value: Value = _reader(kind).validate_python(ArgsKwargs(parts))
    except ValidationError as error:
        raise ValueError(f"{key:.80}: {error.errors()[0]['msg']}") from None
    return value


@cache
def _reader(kind: str) -> TypeAdapter[Value]:
    return TypeAdapter(KINDS[kind])
