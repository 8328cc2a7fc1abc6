"""Measured values that know how they add up, so that nothing guesses a reduction from a metric's name.

A value is made from one train step. `merge` joins it with the next one's: over a window, or over the run. `value` is
what a line shows; None means that nothing was measured, and the key stays absent.
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
    """The newest figure stands: versions, totals kept by somebody else."""

    amount: float | int | None

    @property
    def value(self) -> Scalar | None:
        return self.amount

    def merge(self, later: Last) -> Last:
        return later if later.amount is not None else self


@dataclass(frozen=True, slots=True)
class Sum:
    """Counts and seconds."""

    amount: float | int

    @property
    def value(self) -> Scalar | None:
        return self.amount

    def merge(self, later: Sum) -> Sum:
        return Sum(self.amount + later.amount)


@dataclass(frozen=True, slots=True)
class Max:
    amount: float | int | None

    @property
    def value(self) -> Scalar | None:
        return self.amount

    def merge(self, later: Max) -> Max:
        amounts = [amount for amount in (self.amount, later.amount) if amount is not None]
        return Max(max(amounts, default=None))


@dataclass(frozen=True, slots=True)
class Ratio:
    """`part / whole`: means (sum over weight), rates (amount over seconds), shares. Absent while `whole` is 0."""

    part: float
    whole: float

    @property
    def value(self) -> Scalar | None:
        return self.part / self.whole if self.whole else None

    def merge(self, later: Ratio) -> Ratio:
        return Ratio(self.part + later.part, self.whole + later.whole)


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviation of a population, from its moments."""

    count: int
    total: float
    squares: float

    @property
    def value(self) -> Scalar | None:
        if not self.count:
            return None
        mean = self.total / self.count
        return float(max(0.0, self.squares / self.count - mean * mean) ** 0.5)

    def merge(self, later: Spread) -> Spread:
        return Spread(self.count + later.count, self.total + later.total, self.squares + later.squares)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Time both sides are busy / the smaller busy time. Absent while one side was never busy."""

    both_s: float
    trainer_s: float
    rollout_s: float

    @property
    def value(self) -> Scalar | None:
        smaller_s = min(self.trainer_s, self.rollout_s)
        return self.both_s / smaller_s if smaller_s > 0 else None

    def merge(self, later: Overlap) -> Overlap:
        return Overlap(self.both_s + later.both_s, self.trainer_s + later.trainer_s, self.rollout_s + later.rollout_s)


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]`: how many had the value i."""

    counts: tuple[int, ...]

    @property
    def value(self) -> Scalar | None:
        return list(self.counts) if self.counts else None

    def merge(self, later: Histogram) -> Histogram:
        return Histogram(tuple(a + b for a, b in zip_longest(self.counts, later.counts, fillvalue=0)))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A step's own distribution: entry i of m has the share i / (m - 1) of the step's values at or below it."""

    points: tuple[int, ...]

    @classmethod
    def of(cls, ascending: Sequence[int], shares: int = 40) -> Quantiles:
        last = len(ascending) - 1
        return cls(tuple(ascending[round(last * i / shares)] for i in range(shares + 1)) if ascending else ())

    @property
    def value(self) -> Scalar | None:
        return list(self.points) if self.points else None

    def merge(self, later: Quantiles) -> Quantiles:
        return later if later.points else self


KINDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (Last, Sum, Max, Ratio, Spread, Overlap, Histogram, Quantiles)}


def merge_into(totals: dict[str, Value], values: Mapping[str, Value]) -> None:
    """Join `values` to `totals`, key by key. A total of another kind is one that a checkpoint got wrong: it begins anew."""
    for key, value in values.items():
        totals[key] = totals[key].merge(value) if type(totals.get(key)) is type(value) else value


def shown(values: Mapping[str, Value]) -> dict[str, Scalar]:
    """What a line shows: every measured value."""
    return {key: shown for key, value in values.items() if (shown := value.value) is not None}


def to_json(values: Mapping[str, Value]) -> dict[str, Any]:
    return {key: [type(value).__name__, *astuple(value)] for key, value in values.items()}  # type: ignore[call-overload]


def from_json(content: Mapping[str, Sequence[Any]]) -> dict[str, Value]:
    """Raises ValueError for what `to_json` does not write."""
    return {key: _value(key, *entry) for key, entry in content.items()}


def _value(key: str, kind: Any = None, *parts: Any) -> Value:
    if kind not in KINDS:
        raise ValueError(f"{key:.80}: {kind!r:.40} is no kind of value")
    try:
        value: Value = _reader(kind).validate_python(ArgsKwargs(parts))
    except ValidationError as error:
        raise ValueError(f"{key:.80}: {error.errors()[0]['msg']}") from None
    return value


@cache
def _reader(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(KINDS[kind])
