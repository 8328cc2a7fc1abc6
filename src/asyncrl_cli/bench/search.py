"""The search behind `plan --tune`: probes, the splits around the balanced one, steps from the best, long runs. Pure.

    probe    short runs of the current split: as it is, and with other windows and etas
    screen   short runs of the fastest probe's setting on the splits around the one that its idle times say is balanced
    climb    short runs of the neighbours of the best setting of each of the best splits, round by round
    refine   short runs of the best setting with half a node more on either side
    final    long runs of the best setting of each of the best splits, of the rest of the front, and of the current setting
    check    long runs of settings that a short run puts on the front of all
    split    a long run of the recommended setting on the current split: what the split does, and what the rest does

The effort is counted in simulated trajectories and not in seconds, so that a search gives the same answer on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl_cli.bench.pareto import Failed, Measured, Row, best_of_splits, front, ranked, recommended, survivors
from asyncrl_cli.bench.settings import Setting, Space, on_split_of

SHORT_WINDOWS = 4
"""The first and the last one are not measured."""
SHORTEST_FINAL_WINDOWS = 6
LONGEST_WINDOWS = 24
FINALISTS = 4
CHECKED = 3
LONG_RUNS = FINALISTS + CHECKED + 2
"""Also of the current setting, and of the recommended one on the current split."""
BEST_SPLITS = 3
"""Splits that are climbed from and that reach the final: noise of short runs does not decide between them."""
REFINED = 2
ROUND_SETTINGS = 4
"""Settings tried in a round of the climb."""
PROBES = 7
SCREEN_SHARE = 0.2
CLIMB_SHARE = 0.25
FEWEST_SCREENED = 6
FEWEST_CLIMBED = 6
MOST_SHORT_RUNS = 48

Evaluate = Callable[[Sequence[Setting], int], list[Measured | Failed]]
"""Measures settings over a number of windows of W groups each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much may be simulated: `windows` in total, each of W groups."""

    windows: int

    @property
    def screened(self) -> int:
        return min(max(int(self.windows * SCREEN_SHARE) // SHORT_WINDOWS, FEWEST_SCREENED), MOST_SHORT_RUNS)

    @property
    def climbed(self) -> int:
        return min(max(int(self.windows * CLIMB_SHARE) // SHORT_WINDOWS, FEWEST_CLIMBED), MOST_SHORT_RUNS)

    @property
    def short_runs(self) -> int:
        return PROBES + self.screened + self.climbed + REFINED

    @property
    def long_windows(self) -> int:
        left = self.windows - self.short_runs * SHORT_WINDOWS
        return min(max(left // LONG_RUNS, SHORTEST_FINAL_WINDOWS), LONGEST_WINDOWS)

    @property
    def planned_windows(self) -> int:
        return self.short_runs * SHORT_WINDOWS + LONG_RUNS * self.long_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`rows`: all settings that keep the bound, those of long runs first, each ranked. `current`: the setting one started from,
    even where it is beyond the bound. `failed`: settings whose run failed, and why."""

    rows: tuple[Row, ...]
    current: Row | None
    num_settings: int
    windows: int
    failed: tuple[tuple[Setting, str], ...]

    @property
    def long_rows(self) -> list[Row]:
        return [row for row in self.rows if row.is_long]


class Tried:
    """What has been measured so far, in short runs and in long ones."""

    def __init__(self, evaluate: Evaluate, long_windows: int) -> None:
        self._evaluate = evaluate
        self._long_windows = long_windows
        self.short: dict[Setting, Measured | Failed] = {}
        self.long: dict[Setting, Measured | Failed] = {}

    def shortly(self, settings: Sequence[Setting]) -> None:
        new = [setting for setting in dict.fromkeys(settings) if setting not in self.short]
        self.short.update(zip(new, self._evaluate(new, SHORT_WINDOWS), strict=True))

    def at_length(self, settings: Sequence[Setting]) -> None:
        new = [setting for setting in dict.fromkeys(settings) if setting not in self.long]
        self.long.update(zip(new, self._evaluate(new, self._long_windows), strict=True))

    @property
    def windows(self) -> int:
        return len(self.short) * SHORT_WINDOWS + len(self.long) * self._long_windows

    def short_rows(self) -> list[Row]:
        return _rows(self.short, is_long=False)

    def rows(self) -> list[Row]:
        """Every setting by the longest of its runs; not one whose long run failed."""
        long = _rows(self.long, is_long=True)
        return [*long, *(row for row in self.short_rows() if row.setting not in self.long)]

    def failed(self) -> dict[Setting, str]:
        everything = (*self.short.items(), *self.long.items())
        return {setting: outcome.reason for setting, outcome in everything if isinstance(outcome, Failed)}


def search(space: Space, evaluate: Evaluate, effort: Effort) -> Found:
    """Deterministic for a deterministic `evaluate`."""
    tried = Tried(evaluate, effort.long_windows)
    tried.shortly(space.probes()[:PROBES])
    if probes := best_of_splits(tried.short_rows(), 1):
        tried.shortly(space.screen(probes[0].setting, balanced_share(probes[0]), effort.screened))
    left = effort.climbed
    while left > 0 and (steps := _next_steps(space, tried)[:left]):
        tried.shortly(steps)
        left -= len(steps)
    if best := best_of_splits(tried.short_rows(), 1):
        tried.shortly(space.finer(best[0].setting))
    tried.at_length([*_finalists(tried.short_rows()), space.current])
    allowed = [row for row in tried.rows() if space.allows(row.setting)]
    tried.at_length([row.setting for row in front(allowed) if not row.is_long][:CHECKED])
    if long_rows := _found(space, tried).long_rows:
        tried.at_length([on_split_of(space.current, recommended(long_rows).setting)])
    return _found(space, tried)


def balanced_share(row: Row) -> float:
    """The trainer's share of the devices with which both sides would be as busy, if work shrinks with the devices."""
    training = row.setting.trainer_workers * (1 - row.measured.trainer_idle_ratio)
    generation = row.setting.rollout_devices * (1 - row.measured.rollouter_idle_ratio)
    return training / (training + generation) if training + generation > 0 else 0.5


def _finalists(rows: Sequence[Row]) -> list[Setting]:
    chosen = [*best_of_splits(rows, BEST_SPLITS), *survivors(rows, FINALISTS)]
    return list(dict.fromkeys(row.setting for row in chosen))[:FINALISTS]


def _found(space: Space, tried: Tried) -> Found:
    rows = [row for row in tried.rows() if space.allows(row.setting)]
    long, short = ([row for row in rows if row.is_long is is_long] for is_long in (True, False))
    current = tried.long.get(space.current)
    return Found(
        rows=(*ranked(long), *ranked(short)),
        current=Row(setting=space.current, measured=current) if isinstance(current, Measured) else None,
        num_settings=len({*tried.short, *tried.long}),
        windows=tried.windows,
        failed=tuple(tried.failed().items()),
    )


def _rows(outcomes: dict[Setting, Measured | Failed], *, is_long: bool) -> list[Row]:
    return [
        Row(setting=setting, measured=outcome, is_long=is_long)
        for setting, outcome in outcomes.items()
        if isinstance(outcome, Measured)
    ]


def _next_steps(space: Space, tried: Tried) -> list[Setting]:
    """Untried neighbours of the best setting of each of the best splits, in turns: the first of each, the second of each, ..."""
    best = best_of_splits(tried.short_rows(), BEST_SPLITS)
    untried = [[step for step in _steps_from(space, row) if step not in tried.short] for row in best]
    turns = [steps[turn] for turn in range(max(map(len, untried), default=0)) for steps in untried if turn < len(steps)]
    return list(dict.fromkeys(turns))[:ROUND_SETTINGS]


def _steps_from(space: Space, row: Row) -> list[Setting]:
    """The side that idles less is the one that is waited for."""
    wants_ranks = row.measured.trainer_idle_ratio < row.measured.rollouter_idle_ratio
    return [step for step in space.neighbours(row.setting, wants_ranks=wants_ranks) if space.allows(step)]
