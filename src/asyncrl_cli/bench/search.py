"""The search of `tune`: grids of short runs, one after the other, then long runs of the most promising
settings. No I/O.

    short   the current setting and the starts, then each grid of `Space.stages` around the fastest so far
    long    the fastest of each of the best splits, some of the Pareto front, the fastest with other windows,
            the current setting
    split   the recommended setting on the current split: tells what is won by the split, and what by the rest
    strict  the recommended setting without a strict bound: tells what strictness costs

The effort is counted in simulated windows and not in seconds, so that a search gives the same answer on any
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.bench.space import Setting, Space

SHORT_WINDOWS = 4
"""The first and the last one are not measured."""
BEST = 3
"""How many splits, and how many windows (K, batches), get long runs: short runs are too noisy to decide
between the best ones."""
LONG_RUNS = 2 * BEST + 4
"""At most: besides the best splits and windows, which share the fastest row, the second and the last row of
the front, the current setting, and the recommended one on the current split and without a bound."""
SAME_TIME = 0.01
"""Relative difference below which two simulated times count as equal, and staleness decides. Chosen, not
measured."""
SAME_STALENESS = 0.05
"""Difference of mean staleness, in versions, that is too small to recommend, or simulate further, a slower
setting."""
FIGURES = ("window_time_s", "staleness_mean", "staleness_max", "trainer_idle_ratio", "rollouter_idle_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of a setting's simulated run of `windows` windows. `window_time_s` is per W groups of the
    workload's own window; staleness is in versions, by token."""

    setting: Setting
    windows: int
    window_time_s: float
    staleness_mean: float
    staleness_max: float
    trainer_idle_ratio: float
    rollouter_idle_ratio: float

    @property
    def is_long(self) -> bool:
        """The figures of a short run are rough."""
        return self.windows > SHORT_WINDOWS

    @property
    def rank(self) -> tuple[float, float]:
        return self.window_time_s, self.staleness_mean

    def __str__(self) -> str:
        return f"{self.setting.split}, {self.window_time_s:.2f} s"

    def to_json(self) -> dict[str, object]:
        figures = {name: getattr(self, name) for name in FIGURES}
        return self.setting.to_json() | figures | {"is_long": self.is_long}


Outcome = Row | str
"""A row, or why the run failed."""
Evaluate = Callable[[Sequence[Setting], int], Iterable[Outcome]]
"""Simulates a run of each setting, of the given number of windows of W groups; the outcomes come in the order
of the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search has simulated so far: the outcomes by setting and number of windows, the long runs of a
    setting last."""

    space: Space
    runs: dict[tuple[Setting, int], Outcome] = field(default_factory=dict)

    @property
    def windows(self) -> int:
        return sum(windows for _, windows in self.runs)

    @property
    def outcomes(self) -> dict[Setting, Outcome]:
        """Of each setting's last run."""
        return {setting: outcome for (setting, _), outcome in self.runs.items()}

    @property
    def rows(self) -> list[Row]:
        """Settings within the staleness bound; those with long runs first, each part from the fastest on."""
        rows = (row for row in self.outcomes.values() if isinstance(row, Row))
        allowed = (row for row in rows if self.space.allows(row.setting))
        return sorted(allowed, key=lambda row: (not row.is_long, row.rank))

    @property
    def failed(self) -> dict[Setting, str]:
        """Settings whose run failed, and why."""
        return {setting: outcome for setting, outcome in self.outcomes.items() if isinstance(outcome, str)}

    @property
    def best(self) -> Row:
        """Of the long runs that are as fast as the fastest (within `SAME_TIME`), the least stale; of those
        that are as fresh (within `SAME_STALENESS`), the one with the smallest bound and eta."""
        long = [row for row in self.rows if row.is_long]
        as_fast = [row for row in long if row.window_time_s <= long[0].window_time_s * (1 + SAME_TIME)]
        least_stale = min(row.staleness_mean for row in as_fast)
        as_fresh = [row for row in as_fast if row.staleness_mean <= least_stale + SAME_STALENESS]
        return min(as_fresh, key=lambda row: (row.setting.max_staleness, row.setting.eta, row.window_time_s))

    def row_of(self, setting: Setting) -> Row | None:
        """None if the setting has no run, or one that failed."""
        return row if isinstance(row := self.outcomes.get(setting), Row) else None

    @property
    def current(self) -> Row | None:
        """The setting that the search started from, even where it is beyond the bound. None if its run
        failed."""
        return self.row_of(self.space.current)

    @property
    def on_current_split(self) -> Row | None:
        """The recommended setting moved to the current split. None if it is there already, or if that run
        failed."""
        row = self.row_of(replace(self.best.setting, devices=self.space.current.devices))
        return None if row == self.best else row

    @property
    def without_bound(self) -> Row | None:
        """The recommended setting without a strict bound. None if it makes nothing ahead, or if that run
        failed."""
        return self.row_of(replace(self.best.setting, on_stale="accept"))

    @property
    def speedup(self) -> float | None:
        """Of the recommended setting over the current one."""
        return None if self.current is None else self.current.window_time_s / self.best.window_time_s


def planned_windows(space: Space, long_windows: int) -> int:
    """The most windows that a search simulates."""
    # around uneven splits there are fewer others
    around = (*space.starts, *space.first_splits(space.current))
    num_short = 3 + sum(max(len(list(stage(one))) for one in around) for stage in space.stages)
    return num_short * SHORT_WINDOWS + LONG_RUNS * long_windows


def search(
    space: Space,
    evaluate: Evaluate,
    long_windows: int,
    progress: Callable[[int], None] = lambda windows: None,
) -> SearchResult:
    """Search the space. Deterministic if `evaluate` is. `progress(windows simulated so far)`.

    Raises AsyncrlError if no setting could be simulated.
    """
    found = SearchResult(space=space)

    def run(settings: Iterable[Setting], windows: int = SHORT_WINDOWS) -> list[Row]:
        new = [setting for setting in dict.fromkeys(settings) if (setting, windows) not in found.runs]
        for setting, outcome in zip(new, evaluate(new, windows), strict=True):
            found.runs[setting, windows] = outcome
            progress(found.windows)
        return found.rows

    rows = run(filter(space.allows, (*space.starts, space.current)))
    for stage in space.stages:
        rows = run(stage(rows[0].setting if rows else space.starts[0]))
    apart = front(rows, SAME_STALENESS)
    settings = [row.setting for row in (*_fastest(rows, "split"), *apart[:2], *apart[-1:])]
    for one in (row.setting for row in _fastest(rows, "window_steps", "require_batches")):
        steps, batches = one.window_steps, one.require_batches
        settings.append(replace(settings[0], window_steps=steps, require_batches=batches))
    rows = run([*settings, space.current], long_windows)
    if not any(row.is_long for row in rows):
        what = f"no setting with at most {space.bound} versions of staleness could be simulated"
        hint = "asyncrl bench --simulate WORKLOAD --compare PROFILE runs the current setting"
        raise AsyncrlError(f"{what}: {'; '.join(sorted(set(found.failed.values())))}", hint=hint)
    run([replace(found.best.setting, devices=space.current.devices)], long_windows)
    if found.best.setting.eta:
        run([replace(found.best.setting, on_stale="accept")], long_windows)
    return found


def _fastest(rows: Sequence[Row], *names: str) -> list[Row]:
    """The fastest row for each value of these attributes of a setting, for the `BEST` values with the fastest
    ones."""
    slowest_first = sorted(rows, key=lambda row: row.rank, reverse=True)
    fastest = {attrgetter(*names)(row.setting): row for row in slowest_first}
    return sorted(fastest.values(), key=lambda row: row.rank)[:BEST]


def front(rows: Sequence[Row], tolerance: float = 0.0) -> list[Row]:
    """The Pareto front, the fastest first: rows that are less stale than every faster one by more than
    `tolerance`."""
    undominated: list[Row] = []
    for row in sorted(rows, key=lambda row: row.rank):
        if not undominated or row.staleness_mean < undominated[-1].staleness_mean - tolerance:
            undominated.append(row)
    return undominated
