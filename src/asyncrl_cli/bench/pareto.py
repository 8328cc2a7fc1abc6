"""Which settings are worth a choice: no other is both faster and less stale. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl_cli.bench.settings import Setting

SAME_TIME = 0.01
"""Relative difference of simulated times below which staleness decides; a choice, not a measured spread."""
SAME_STALENESS = 0.05
"""Difference of mean staleness, in versions, that is no reason to simulate a slower setting any further, or to recommend it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A simulated run. `window_time_s` is per W groups of the workload's own window; staleness in versions, by token."""

    window_time_s: float
    staleness_mean: float
    staleness_max: float
    trainer_idle_ratio: float
    rollouter_idle_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A simulated run that did not end well, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`is_long`: of a long run; a short one is a rough figure."""

    setting: Setting
    measured: Measured
    is_long: bool = True


def dominates(one: Measured, other: Measured, tolerance: float = 0.0) -> bool:
    """Not worse in time and (by more than `tolerance`) in mean staleness, and better in one of them."""
    no_worse = one.window_time_s <= other.window_time_s and one.staleness_mean <= other.staleness_mean + tolerance
    return no_worse and (one.window_time_s < other.window_time_s or one.staleness_mean < other.staleness_mean)


def front(rows: Sequence[Row], tolerance: float = 0.0) -> list[Row]:
    """Rows that no other dominates, the fastest first."""
    undominated = [row for row in rows if not any(dominates(other.measured, row.measured, tolerance) for other in rows)]
    return sorted(undominated, key=lambda row: (row.measured.window_time_s, row.measured.staleness_mean))


def ranked(rows: Sequence[Row], tolerance: float = 0.0) -> list[Row]:
    """Front by front, each the fastest first."""
    left, order = list(rows), []
    while left:
        best = front(left, tolerance)
        order.extend(best)
        left = [row for row in left if row not in best]
    return order


def survivors(rows: Sequence[Row], keep: int) -> list[Row]:
    """The best `keep`: the fastest, the least stale of the front, then every other one by rank and by time.

    By rank alone, slow splits that are a hundredth of a version less stale would crowd out the second fastest.
    """
    if not rows:
        return []
    best = front(rows, SAME_STALENESS)
    least_stale = min(best, key=lambda row: (row.measured.staleness_mean, row.measured.window_time_s))
    by_time = sorted(rows, key=lambda row: (row.measured.window_time_s, row.measured.staleness_mean))
    turns = [row for pair in zip(by_time, ranked(rows, SAME_STALENESS), strict=True) for row in pair]
    by_setting = {row.setting: row for row in (best[0], least_stale, *turns)}
    return list(by_setting.values())[:keep]


def best_of_splits(rows: Sequence[Row], keep: int) -> list[Row]:
    """The fastest setting of each of the `keep` fastest splits, the fastest first."""
    by_time = sorted(rows, key=lambda row: (row.measured.window_time_s, row.measured.staleness_mean))
    best: dict[str, Row] = {}
    for row in by_time:
        best.setdefault(row.setting.split, row)
    return list(best.values())[:keep]


def recommended(rows: Sequence[Row]) -> Row:
    """The least stale of those that are as fast as the fastest; the fastest of those that are as little stale. A simulation can
    tell them apart only so far."""
    fastest_s = min(row.measured.window_time_s for row in rows)
    as_fast = [row for row in rows if row.measured.window_time_s <= fastest_s * (1 + SAME_TIME)]
    least_stale = min(row.measured.staleness_mean for row in as_fast)
    as_fresh = [row for row in as_fast if row.measured.staleness_mean <= least_stale + SAME_STALENESS]
    return min(as_fresh, key=lambda row: (row.setting.max_staleness, row.setting.eta, row.measured.window_time_s))
