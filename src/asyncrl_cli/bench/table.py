"""A comparison as a table. Metrics are rows and profiles are columns, so that six profiles fit on a
terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl_cli.bench import figures
from asyncrl_cli.bench.results import Comparison, Range, Result, differences
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
    results = comparison.results

    def rows(metrics: Iterable[TableFigure]) -> list[TableRow]:
        return [
            TableRow(
                label=metric.label.format(window=comparison.window_groups),
                cells=tuple(
                    _cell(result.figures.get(metric.name), metric.shown, metric.key or all_spreads)
                    for result in results
                ),
                strong=metric.strong,
            )
            for metric in metrics
            if metric.always or any(metric.name in result.figures for result in results)
        ]

    step_groups = [result.contestant.step_groups for result in results]
    made = [*_unequal(results), *rows(SPEED)]
    if any(groups != comparison.window_groups for groups in step_groups):
        made += rows(WINDOW)
    made += [
        TableRow(label="train step, groups (R)", cells=tuple(map(str, step_groups))),
        *rows((*STEP, *REST)),
    ]
    if comparison.has_bound:
        made += [
            TableRow(label="limited by", cells=tuple(result.limited_by or NOTHING for result in results)),
            *rows(IDEAL),
        ]
    if rates := rows(RATES):
        made += [TableRow(label="each phase alone"), *rates]
    return made


def _unequal(results: Sequence[Result]) -> list[TableRow]:
    """Rows that say where the sides differ in more than their schedule; none if they do not."""
    found = [differences(results[0], result) for result in results]
    if not any(found):
        return []
    contestants = [result.contestant for result in results]
    return [
        TableRow(label="not equal", cells=tuple(", ".join(names) for names in found), strong=True),
        TableRow(label="steps per sync (K)", cells=tuple(str(one.window_steps) for one in contestants)),
        TableRow(label="groups per sync (W)", cells=tuple(str(one.window_groups) for one in contestants)),
    ]


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
    return (
        f"{value:.3g}"
        if shown in (seconds, digits) and 0.01 <= value < 1000
        else shown(value).removesuffix("x").removesuffix("%")
    )


def table_of(comparison: Comparison) -> Table:
    """The table for a screen, at its full width even if the terminal is narrower. Print it with
    `crop=False`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for result in comparison.results:
        folded = textwrap.wrap(result.profile, NAME_WIDTH)  # at its hyphens
        table.add_column("\n".join(folded), justify="right", no_wrap=True)
    for row in rows_of(comparison):
        table.add_row(row.label, *map(_dimmed, row.cells), style="bold" if row.strong else "")
    table.width = Console(width=10_000).measure(table).maximum
    return table


def heading_of(comparison: Comparison) -> str:
    """The line above the table: the comparison's title and, with repeats, what the cells show."""
    counts = sorted({len(result.seeds) for result in comparison.results})
    if counts[-1] == 1:
        return comparison.title
    runs = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{comparison.title}; median of {runs} runs, below it least-most"


def _dimmed(cell: str) -> Text:
    """Print the spread below a median dim, because the median matters more."""
    median, _, spread = cell.partition("\n")
    return Text.assemble(median, (f"\n{spread}", "dim not bold")) if spread else Text(median)


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
