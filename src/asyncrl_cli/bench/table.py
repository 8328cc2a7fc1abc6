"""A comparison as a table. Metrics are rows and profiles are columns, so that six profiles fit on a
terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl_cli.bench import figures
from asyncrl_cli.bench.results import Comparison, Range, differences
from asyncrl_cli.observe.format import NOTHING, clock, count, share

Shown = Callable[[float], str]
NAME_WIDTH = 10
"""Characters of a column's heading. A table of six profiles, with labels of 22 and spreads of 10 characters,
is 100 wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One metric of all profiles. A row without cells is a heading."""

    label: str
    cells: tuple[str, ...] = ()
    strong: bool = False


@dataclass(frozen=True, slots=True)
class TableFigure:
    """A figure and how it is formatted. `key`: also show its spread over the repeats. `always`: show its row
    even if no run measured it. In a label, `{window}` stands for W of the baseline."""

    label: str
    name: str
    shown: Shown
    key: bool = False
    always: bool = False
    strong: bool = False


def seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}" if value >= 0.01 or not value else "<0.01"


def digits(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else count(value)


percent, times, fixed = "{:.1%}".format, "{:.2f}x".format, "{:.3f}".format
PARTS = {keys[-1]: part for part, keys in figures.PARTS.items()}
"""Parts of a step by their labels, which are the last of their `timing/*_s` names in the metrics."""
SPEED = (
    TableFigure("wall time, whole run", "wall_s", clock),
    TableFigure("measured of it, s", "measured_s", seconds),
    TableFigure("groups/s", "groups_per_s", digits, key=True),
    TableFigure("s per {window} groups", "window_time_s", seconds, key=True, strong=True),
)
WINDOW = tuple(TableFigure(f"    {label}", f"window_{part}_s", seconds) for label, part in PARTS.items())
STEP = (
    TableFigure("  mean, s", "step_s_mean", seconds),
    TableFigure("  p95, s", "step_s_p95", seconds),
    *(TableFigure(f"    {label}", f"step_{part}_s", seconds) for label, part in PARTS.items()),
)
REST = (
    TableFigure("slots used", "slot_utilization", share, always=True),
    TableFigure("rollouter idle", "rollouter_idle_ratio", share, always=True),
    TableFigure("trainer idle", "trainer_idle_ratio", share, always=True),
    TableFigure("tokens/s", "tokens_per_s", count),
    TableFigure("tokens per group", "tokens_per_group", count),
    TableFigure("staleness mean", "staleness_mean", fixed),
    TableFigure("staleness max", "staleness_max", count),
    TableFigure("partial ratio", "partial_ratio", percent),
    TableFigure("max span", "max_span", count),
    TableFigure("tokens discarded", "tokens_discarded", count),
    TableFigure("final reward", "final_reward", fixed, key=True),
    TableFigure("  95% interval from", "final_reward_low", fixed),
    TableFigure("  to", "final_reward_high", fixed),
    TableFigure("speedup", "speedup", times, key=True, strong=True),
    TableFigure("  per token", "speedup_per_token", times, key=True),
    TableFigure("% of the bound", "bound_ratio", percent, key=True, strong=True),
)
IDEAL = (TableFigure("ideal s per {window} groups", "ideal_s", seconds),)
RATES = (
    TableFigure("  generation, tokens/s", "rollout_tokens_per_s", count),
    TableFigure("  training, tokens/s", "trainer_tokens_per_s", count),
)
"""Of each phase alone, in simulated runs: they show whether the baseline is fair."""


def rows_of(comparison: Comparison, *, all_spreads: bool = False) -> list[TableRow]:
    """The whole table. A metric that no run measured has no row, or, if `always` is set, a row of `-`."""
    results, contestants = comparison.results, [result.contestant for result in comparison.results]
    made: list[TableRow] = []

    def text(label: str, cells: Iterable[object], strong: bool = False) -> None:
        made.append(TableRow(label=label, cells=tuple(map(str, cells)), strong=strong))

    def figures(shown: Iterable[TableFigure]) -> None:
        for one in shown:
            if one.always or any(one.name in result.figures for result in results):
                spreads = [result.figures.get(one.name) for result in results]
                cells = (_cell(spread, one.shown, one.key or all_spreads) for spread in spreads)
                text(one.label.format(window=comparison.window_groups), cells, one.strong)

    unequal = [differences(results[0], result) for result in results]
    if any(unequal):
        text("not equal", map(", ".join, unequal), strong=True)
        text("steps per sync (K)", (one.window_steps for one in contestants))
        text("groups per sync (W)", (one.window_groups for one in contestants))
    figures(SPEED)
    # where each profile's step is a window, the step's rows say the same
    if any(one.step_groups != comparison.window_groups for one in contestants):
        figures(WINDOW)
    text("train step, groups (R)", (one.step_groups for one in contestants))
    figures((*STEP, *REST))
    if comparison.has_bound:
        text("limited by", (result.limited_by or NOTHING for result in results))
        figures(IDEAL)
    if any(RATES[0].name in result.figures for result in results):
        made.append(TableRow(label="each phase alone"))
        figures(RATES)
    return made


def _cell(spread: Range | None, shown: Shown, with_spread: bool) -> str:
    """The median; on a second line, if `with_spread`, the minimum and maximum of the repeats."""
    if spread is None:
        return NOTHING
    median = shown(spread.median)
    if not with_spread or spread.min == spread.max:
        return median
    return f"{median}\n{_short(spread.min, shown)}-{_short(spread.max, shown)}"


def _short(value: float, shown: Shown) -> str:
    """A value of a spread, with at most three digits and no unit."""
    if shown in (seconds, digits) and 0.01 <= value < 1000:
        return f"{value:.3g}"
    return shown(value).removesuffix("x").removesuffix("%")


def table_of(comparison: Comparison) -> Table:
    """The table for a screen, at its full width even if the terminal is narrower. Print it with
    `crop=False`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for result in comparison.results:
        folded = textwrap.wrap(result.profile, NAME_WIDTH)  # at its hyphens
        table.add_column("\n".join(folded), justify="right", no_wrap=True)
    for row in rows_of(comparison):
        cells = []
        for median, _, spread in (cell.partition("\n") for cell in row.cells):
            # the median matters more
            cells.append(Text.assemble(median, (f"\n{spread}", "dim not bold")) if spread else Text(median))
        table.add_row(row.label, *cells, style="bold" if row.strong else "")
    table.width = Console(width=10_000).measure(table).maximum
    return table


def heading_of(comparison: Comparison) -> str:
    """The line above the table: the comparison's title and, with repeats, what the cells show."""
    counts = sorted({len(result.seeds) for result in comparison.results})
    if counts[-1] == 1:
        return comparison.title
    runs = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{comparison.title}; median of {runs} runs, below it least-most"


def markdown_of(comparison: Comparison) -> str:
    """The same table for report.md, with every figure's spread."""
    names = [result.profile for result in comparison.results]
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for row in rows_of(comparison, all_spreads=True):
        cells = row.cells or ("",) * len(names)
        label = row.label.replace("  ", "&nbsp;&nbsp;")
        written = (cell.replace("\n", " (") + (")" if "\n" in cell else "") for cell in cells)
        lines.append(f"| {label} | {' | '.join(written)} |")
    return "\n".join(lines) + "\n"
