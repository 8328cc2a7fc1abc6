"""The search behind `plan --tune`: a coarse net, steps from the best, long runs of the few that are left. Pure.

    screen   short runs over split and eta                    at most SCREEN_SHARE of the effort
    climb    short runs of the neighbours of the best rows,   until CLIMB_SHARE more is used, or nothing new is left
             round by round
    final    long runs of the survivors (and of the current setting, for comparison)

The effort is counted in simulated trajectories and not in seconds, so that a search gives the same answer on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl_cli.bench.pareto import Measured, Row, ranked, survivors
from asyncrl_cli.bench.settings import Setting, Space

SHORT_WINDOWS = 4
"""The first and the last one are not measured."""
SHORTEST_FINAL_WINDOWS = 6
LONGEST_WINDOWS = 24
SCREEN_SHARE = 0.4
CLIMB_SHARE = 0.3
FINALISTS = 4
BEAM = 3
"""Rows whose neighbours are tried in a round of the climb."""
ROUND_SETTINGS = 4
"""Settings tried in a round."""
MOST_SHORT_RUNS = 64
FEWEST_SCREENED = 10
"""Seven splits, the current setting, and its split at the ends of eta."""
FEWEST_CLIMBED = 2 * ROUND_SETTINGS

Evaluate = Callable[[Sequence[Setting], int], list[Measured | None]]
"""Measures settings over a number of windows of W groups each; None for one whose run failed."""


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
    def long_windows(self) -> int:
        left = self.windows - (self.screened + self.climbed) * SHORT_WINDOWS
        return min(max(left // (FINALISTS + 1), SHORTEST_FINAL_WINDOWS), LONGEST_WINDOWS)

    @property
    def planned_windows(self) -> int:
        return (self.screened + self.climbed) * SHORT_WINDOWS + (FINALISTS + 1) * self.long_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`rows`: the finalists, of long runs. `current`: the setting one started from, even where it is beyond the bound."""

    rows: tuple[Row, ...]
    current: Row | None
    num_settings: int
    windows: int
    failed: tuple[Setting, ...]


def search(space: Space, evaluate: Evaluate, effort: Effort) -> Found:
    """Deterministic for a deterministic `evaluate`."""
    tried: dict[Setting, Measured | None] = {}

    def measure(settings: Sequence[Setting]) -> None:
        tried.update(zip(settings, evaluate(settings, SHORT_WINDOWS), strict=True))

    measure(space.screen(effort.screened))
    left = effort.climbed
    while left > 0 and (steps := _next_steps(space, tried)[:left]):
        measure(steps)
        left -= len(steps)
    finalists = [row.setting for row in survivors(_rows(tried), FINALISTS)]
    asked = list(dict.fromkeys((*finalists, space.current)))
    final = dict(zip(asked, evaluate(asked, effort.long_windows), strict=True))
    current = final[space.current]
    return Found(
        rows=tuple(row for row in ranked(_rows(final)) if space.allows(row.setting)),
        current=None if current is None else Row(setting=space.current, measured=current),
        num_settings=len({*tried, *final}),
        windows=len(tried) * SHORT_WINDOWS + len(final) * effort.long_windows,
        failed=tuple(setting for setting, measured in {**tried, **final}.items() if measured is None),
    )


def _rows(measured: dict[Setting, Measured | None]) -> list[Row]:
    return [Row(setting=setting, measured=found) for setting, found in measured.items() if found is not None]


def _next_steps(space: Space, tried: dict[Setting, Measured | None]) -> list[Setting]:
    """Untried neighbours of the best rows, in turns: the first of each, the second of each, ..."""
    best = survivors(_rows(tried), BEAM)
    untried = [[step for step in _steps_from(space, row) if step not in tried] for row in best]
    turns = [steps[turn] for turn in range(max(map(len, untried), default=0)) for steps in untried if turn < len(steps)]
    return list(dict.fromkeys(turns))[:ROUND_SETTINGS]


def _steps_from(space: Space, row: Row) -> list[Setting]:
    """The side that idles less is the one that is waited for."""
    wants_ranks = row.measured.trainer_idle_ratio < row.measured.rollouter_idle_ratio
    return [step for step in space.neighbours(row.setting, wants_ranks=wants_ranks) if space.allows(step)]
