"""A comparison as a table: metrics are rows, profiles are columns, so that six profiles fit on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl_cli.bench.results import Comparison, Result, Spread
from asyncrl_cli.observe.format import NOTHING, clock, count, share

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Shown = Callable[[float], str]
NAME_WIDTH = 10
"""Of a column's heading. With six profiles, labels of 22 and spreads of 10 characters a table has 100 columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One metric of all profiles. A row without cells is a heading."""

    label: str
    cells: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A figure by name, and how it is written; `key` ones also show their spread over repeats. `always`: also where nobody measured
    it."""

    label: str
    name: str
    shown: Shown
    key: bool = False
    always: bool = False


def seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}" if value >= 0.01 else f"{value:.1g}"


def digits(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else count(value)


def percent(value: float) -> str:
    return f"{value:.1%}"


def times(value: float) -> str:
    return f"{value:.2f}x"


def fixed(value: float) -> str:
    return f"{value:.3f}"


PARTS = (("wait_data", "wait"), ("old_logprob", "old_logprob"), ("train", "train"), ("gather", "sync"), ("other", "other"))
"""Labels are the names of `timing/*_s`, figures those of `measure.PARTS`."""
SPEED = (
    Metric(label="wall time, whole run", name="wall_s", shown=clock),
    Metric(label="measured of it, s", name="measured_s", shown=seconds),
    Metric(label="groups/s", name="groups_per_s", shown=digits, key=True),
)
STEP = (
    Metric(label="  mean, s", name="step_s_mean", shown=seconds),
    Metric(label="  p95, s", name="step_s_p95", shown=seconds),
    *(Metric(label=f"    {label}", name=f"step_{part}_s", shown=seconds) for label, part in PARTS),
)
WINDOW = tuple(Metric(label=f"    {label}", name=f"window_{part}_s", shown=seconds) for label, part in PARTS)
USE = (
    Metric(label="slots used", name="slot_utilization", shown=share, always=True),
    Metric(label="rollouter idle", name="rollouter_idle_ratio", shown=share, always=True),
    Metric(label="trainer idle", name="trainer_idle_ratio", shown=share, always=True),
    Metric(label="tokens/s", name="tokens_per_s", shown=count),
)
DATA = (
    Metric(label="staleness mean", name="staleness_mean", shown=fixed),
    Metric(label="staleness max", name="staleness_max", shown=count),
    Metric(label="partial ratio", name="partial_ratio", shown=percent),
    Metric(label="max span", name="max_span", shown=count),
    Metric(label="tokens discarded", name="tokens_discarded", shown=count),
    Metric(label="final reward", name="final_reward", shown=fixed, key=True),
)
VERDICT = (
    Metric(label="speedup", name="speedup", shown=times, key=True),
    Metric(label="  per token", name="speedup_per_token", shown=times, key=True),
    Metric(label="% of the bound", name="bound_ratio", shown=percent, key=True),
    Metric(label="% of both at once", name="at_once_ratio", shown=percent, key=True),
)


def rows_of(comparison: Comparison, *, all_spreads: bool = False) -> list[TableRow]:
    """The whole table; a metric that nobody measured has no row, or one of `-`."""
    results = comparison.results
    window = Metric(label=f"s per {comparison.window_groups} groups", name="window_time_s", shown=seconds, key=True)
    steps_differ = any(result.step_groups != comparison.window_groups for result in results)
    rows = _metrics(results, (*SPEED, window), all_spreads)
    if steps_differ:
        rows += _metrics(results, WINDOW, all_spreads)
    rows.append(TableRow(label="train step, groups (R)", cells=tuple(str(result.step_groups) for result in results)))
    rows += _metrics(results, (*STEP, *USE, *DATA, *VERDICT), all_spreads)
    return rows + _bound_rows(comparison)


def _metrics(results: Sequence[Result], metrics: Sequence[Metric], all_spreads: bool) -> list[TableRow]:
    rows = []
    for metric in metrics:
        if metric.always or any(metric.name in result.figures for result in results):
            with_spread = metric.key or all_spreads
            cells = tuple(_cell(result.figures.get(metric.name), metric.shown, with_spread) for result in results)
            rows.append(TableRow(label=metric.label, cells=cells))
    return rows


def _bound_rows(comparison: Comparison) -> list[TableRow]:
    """What limits each profile, and each side's phases alone: which shows whether the baseline is fair."""
    results = comparison.results
    if not any(result.bound for result in results):
        return []
    return [
        TableRow(label="limited by", cells=tuple(result.bound.limited_by if result.bound else NOTHING for result in results)),
        TableRow(
            label=f"ideal s per {comparison.window_groups} groups",
            cells=tuple(seconds(result.bound.ideal_s) if result.bound else NOTHING for result in results),
        ),
        *_at_once_rows(results),
        TableRow(label="each phase alone"),
        TableRow(
            label="  generation, tokens/s",
            cells=tuple(count(result.capacities.rollout_tokens_per_s) if result.capacities else NOTHING for result in results),
        ),
        TableRow(
            label="  training, tokens/s",
            cells=tuple(count(result.capacities.trainer_tokens_per_s) if result.capacities else NOTHING for result in results),
        ),
    ]


def _at_once_rows(results: Sequence[Result]) -> list[TableRow]:
    """Where both sides share a machine."""
    known = [result.capacities for result in results]
    if not any(one and one.rollout_beside_tokens_per_s for one in known):
        return []
    rollout = [one.rollout_beside_tokens_per_s if one else None for one in known]
    trainer = [one.trainer_beside_tokens_per_s if one else None for one in known]
    return [
        TableRow(label="both phases at once"),
        TableRow(label="  generation, tokens/s", cells=tuple(NOTHING if rate is None else count(rate) for rate in rollout)),
        TableRow(label="  training, tokens/s", cells=tuple(NOTHING if rate is None else count(rate) for rate in trainer)),
    ]


def _cell(spread: Spread | None, shown: Shown, with_spread: bool) -> str:
    """The median; on a second line the least and the most of the repeats."""
    if spread is None:
        return NOTHING
    median = shown(spread.median)
    if not with_spread or spread.min == spread.max:
        return median
    return f"{median}\n{_short(spread.min, shown)}-{_short(spread.max, shown)}"


def _short(value: float, shown: Shown) -> str:
    """A spread needs no fourth digit."""
    return (
        f"{value:.3g}" if shown in (seconds, digits) and 0.01 <= value < 1000 else shown(value).removesuffix("x").removesuffix("%")
    )


def table_of(comparison: Comparison) -> Table:
    """As wide as it must be, however wide the terminal or pipe: print it with `crop=False`."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for result in comparison.results:
        table.add_column(_folded(result.profile), justify="right", no_wrap=True)
    for row in rows_of(comparison):
        strong = row.label in ("speedup", "% of the bound") or row.label.startswith("s per ")
        table.add_row(row.label, *map(_dimmed, row.cells), style="bold" if strong else "")
    table.width = Console(width=10_000).measure(table).maximum
    return table


def heading_of(comparison: Comparison) -> str:
    """Above the table."""
    counts = sorted({len(result.seeds) for result in comparison.results})
    if counts[-1] == 1:
        return comparison.title
    runs = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{comparison.title}; median of {runs} runs, below it least-most"


def _dimmed(cell: str) -> Text:
    """The spread below a median is not what is read first."""
    from rich.text import Text

    median, _, spread = cell.partition("\n")
    return Text.assemble(median, (f"\n{spread}", "dim not bold")) if spread else Text(median)


def _folded(name: str) -> str:
    """A long name on several lines, broken at its hyphens."""
    import textwrap

    return "\n".join(textwrap.wrap(name, NAME_WIDTH))


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
