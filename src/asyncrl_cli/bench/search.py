"""The search behind `plan --tune`: one axis after the other in short runs, then long runs of the few that may be best. Pure.

    short   the current setting; all splits, then all windows, etas and slots of the fastest so far; splits beside the fastest
    long    the fastest of each of the best splits, some of the Pareto front, and the current setting
    split   the recommended setting on the current split: what the split does, and what the rest does

The effort is counted in simulated windows and not in seconds: a search gives the same answer on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl_cli.bench.space import Setting, Space
from asyncrl_cli.errors import AsyncrlError

SHORT_WINDOWS = 4
"""The first and the last one are not measured."""
FEWEST_LONG_WINDOWS, MOST_LONG_WINDOWS = 6, 24
BEST_SPLITS = 3
"""Splits that have long runs: the noise of short ones does not decide between them."""
LONG_RUNS = BEST_SPLITS + 4
"""At most: of the front, the second and the last; the current setting, and the recommended one on the current split."""
SAME_TIME = 0.01
"""Relative difference of simulated times below which staleness decides; a choice, not a measured spread."""
SAME_STALENESS = 0.05
"""Difference of mean staleness, in versions, that is no reason to recommend a slower setting, or to simulate it any further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A simulated run. `window_time_s` is per W groups of the workload's own window; staleness in versions, by token."""

    window_time_s: float
    staleness_mean: float
    staleness_max: float
    trainer_idle_ratio: float
    rollouter_idle_ratio: float


Outcome = Measured | str
"""Of a simulated run: its figures, or why it failed."""
Evaluate = Callable[[Sequence[Setting], int], list[Outcome]]
"""Measures settings over a number of windows of W groups each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`is_long`: of a long run; a short one is a rough figure."""

    setting: Setting
    measured: Measured
    is_long: bool = True

    def __str__(self) -> str:
        return f"{self.setting.split}, {self.measured.window_time_s:.2f} s"

    @property
    def rank(self) -> tuple[float, float]:
        return self.measured.window_time_s, self.measured.staleness_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`rows`: all settings that keep the bound, those of long runs first, the fastest first. `current`: the setting the search
    started from, even where it is beyond the bound. `best` is recommended; `on_current_split` is the same but for the split, where
    that is another one. `failed`: settings whose run failed, and why."""

    rows: tuple[Row, ...]
    current: Row | None
    best: Row
    on_current_split: Row | None
    num_settings: int
    windows: int
    failed: tuple[tuple[Setting, str], ...]


def long_windows(space: Space, windows: int) -> int:
    """Of each long run, if the whole search may simulate so many."""
    left = windows - _short_runs(space) * SHORT_WINDOWS
    return min(max(left // LONG_RUNS, FEWEST_LONG_WINDOWS), MOST_LONG_WINDOWS)


def planned_windows(space: Space, windows: int) -> int:
    """At most so many are simulated."""
    return _short_runs(space) * SHORT_WINDOWS + LONG_RUNS * long_windows(space, windows)


def search(space: Space, evaluate: Evaluate, windows: int) -> Found:
    """Deterministic for a deterministic `evaluate`. Raises AsyncrlError if no setting could be simulated."""
    short: dict[Setting, Outcome] = {}
    long: dict[Setting, Outcome] = {}
    length = long_windows(space, windows)

    def run(outcomes: dict[Setting, Outcome], settings: Iterable[Setting], windows: int) -> list[Row]:
        new = [setting for setting in dict.fromkeys(settings) if setting not in outcomes]
        outcomes.update(zip(new, evaluate(new, windows), strict=True))
        return _rows(space, short, long)

    start = space.start
    rows = run(short, filter(space.allows, (start, space.current)), SHORT_WINDOWS)
    for axis in _axes(space):
        rows = run(short, axis(rows[0].setting if rows else start), SHORT_WINDOWS)
    fastest, least_stale = front(rows, SAME_STALENESS)[:2], front(rows, SAME_STALENESS)[-1:]
    finalists = (*best_of_splits(rows, BEST_SPLITS), *fastest, *least_stale)
    rows = run(long, [*(row.setting for row in finalists), space.current], length)
    if not any(row.is_long for row in rows):
        reasons = {outcome for outcome in (*short.values(), *long.values()) if isinstance(outcome, str)}
        raise AsyncrlError(
            f"no setting with at most {space.bound} versions of staleness could be simulated: {'; '.join(sorted(reasons))}",
            hint="asyncrl bench --simulate WORKLOAD --compare PROFILE runs the current setting",
        )
    run(long, [space.on_current_split(recommended(rows).setting)], length)
    return _found(space, short, long, windows=len(short) * SHORT_WINDOWS + len(long) * length)


def _axes(space: Space) -> tuple[Callable[[Setting], Iterable[Setting]], ...]:
    return space.along_splits, space.along_windows, space.along_etas, space.along_slots, space.beside_split


def _short_runs(space: Space) -> int:
    """At most."""
    return 2 + sum(len(list(axis(space.start))) for axis in _axes(space)) + len(list(space.beside_split(space.start)))


def _rows(space: Space, short: Mapping[Setting, Outcome], long: Mapping[Setting, Outcome]) -> list[Row]:
    """Every setting that keeps the bound, by the longest of its runs; not one whose long run failed."""
    rows = [
        Row(setting=setting, measured=outcome, is_long=setting in long)
        for setting, outcome in {**short, **long}.items()
        if isinstance(outcome, Measured) and space.allows(setting)
    ]
    return sorted(rows, key=lambda row: (not row.is_long, row.rank))


def _found(space: Space, short: Mapping[Setting, Outcome], long: Mapping[Setting, Outcome], windows: int) -> Found:
    def long_row(setting: Setting) -> Row | None:
        outcome = long.get(setting)
        return Row(setting=setting, measured=outcome) if isinstance(outcome, Measured) else None

    rows = _rows(space, short, long)
    best = recommended(rows)
    on_current_split = long_row(space.on_current_split(best.setting))
    failed = {setting: outcome for setting, outcome in (*short.items(), *long.items()) if isinstance(outcome, str)}
    return Found(
        rows=tuple(rows),
        current=long_row(space.current),
        best=best,
        on_current_split=None if on_current_split == best else on_current_split,
        num_settings=len({*short, *long}),
        windows=windows,
        failed=tuple(failed.items()),
    )


def front(rows: Sequence[Row], tolerance: float = 0.0) -> list[Row]:
    """The fastest first; of all others those that are less stale, by more than `tolerance`, than every faster one."""
    undominated: list[Row] = []
    for row in sorted(rows, key=lambda row: row.rank):
        if not undominated or row.measured.staleness_mean < undominated[-1].measured.staleness_mean - tolerance:
            undominated.append(row)
    return undominated


def best_of_splits(rows: Sequence[Row], keep: int) -> list[Row]:
    """The fastest setting of each of the `keep` fastest splits, the fastest first."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.rank):
        best.setdefault(row.setting.split, row)
    return list(best.values())[:keep]


def recommended(rows: Sequence[Row]) -> Row:
    """Of those that had long runs the least stale of all that are as fast as the fastest, as far as a simulation can tell them
    apart; of several such the one with the least bound and eta."""
    long = [row for row in rows if row.is_long]
    fastest_s = min(row.measured.window_time_s for row in long)
    as_fast = [row for row in long if row.measured.window_time_s <= fastest_s * (1 + SAME_TIME)]
    least_stale = min(row.measured.staleness_mean for row in as_fast)
    as_fresh = [row for row in as_fast if row.measured.staleness_mean <= least_stale + SAME_STALENESS]
    return min(as_fresh, key=lambda row: (row.setting.max_staleness, row.setting.eta, row.measured.window_time_s))
