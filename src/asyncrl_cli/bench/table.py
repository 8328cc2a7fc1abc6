"""A comparison as a table: metrics are rows, profiles are columns, so that six profiles fit on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl_cli.bench.results import Comparison, Result, Spread
from asyncrl_cli.observe.format import NOTHING, clock, count, share

if TYPE_CHECKING:
    from rich.table import Table

Shown = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of all profiles. A row without cells is a heading."""

    label: str
    cells: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A figure by name, and how it is written; `key` ones also show their spread over repeats."""

    label: str
    name: str
    shown: Shown
    key: bool = False


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


PARTS = (("gen-wait", "wait"), ("old-logprob", "old_logprob"), ("train", "train"), ("sync", "sync"), ("other", "other"))
SPEED = (
    Metric(label="wall time", name="wall_s", shown=clock),
    Metric(label="groups/s", name="groups_per_s", shown=digits, key=True),
)
STEP = (
    Metric(label="  mean, s", name="step_s_mean", shown=seconds),
    Metric(label="  p95, s", name="step_s_p95", shown=seconds),
    *(Metric(label=f"    {label}", name=f"step_{part}_s", shown=seconds) for label, part in PARTS),
)
WINDOW = tuple(Metric(label=f"    {label}", name=f"window_{part}_s", shown=seconds) for label, part in PARTS)
USE = (
    Metric(label="trainer idle", name="trainer_idle_ratio", shown=share),
    Metric(label="rollouter idle", name="rollouter_idle_ratio", shown=share),
    Metric(label="slot utilization", name="slot_utilization", shown=share),
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
    Metric(label="% of the bound", name="bound_ratio", shown=percent, key=True),
)


def rows_of(comparison: Comparison, *, all_spreads: bool = False) -> list[Row]:
    """The whole table; a metric that nobody measured has no row."""
    results = comparison.results
    window = Metric(label=f"s per {comparison.window_groups} groups", name="window_time_s", shown=seconds, key=True)
    steps_differ = any(result.step_groups != comparison.window_groups for result in results)
    rows = _metrics(results, (*SPEED, window), all_spreads)
    if steps_differ:
        rows += _metrics(results, WINDOW, all_spreads)
    rows.append(Row(label="train step: groups (R)", cells=tuple(str(result.step_groups) for result in results)))
    rows += _metrics(results, (*STEP, *USE, *DATA, *VERDICT), all_spreads)
    return rows + _bound_rows(comparison)


def _metrics(results: Sequence[Result], metrics: Sequence[Metric], all_spreads: bool) -> list[Row]:
    rows = []
    for metric in metrics:
        if any(metric.name in result.figures for result in results):
            with_spread = metric.key or all_spreads
            cells = tuple(_cell(result.figures.get(metric.name), metric.shown, with_spread) for result in results)
            rows.append(Row(label=metric.label, cells=cells))
    return rows


def _bound_rows(comparison: Comparison) -> list[Row]:
    """What limits each profile, and each side's phases alone: which shows whether the baseline is fair."""
    results = comparison.results
    if not any(result.bound for result in results):
        return []
    return [
        Row(label="limited by", cells=tuple(result.bound.limited_by if result.bound else NOTHING for result in results)),
        Row(
            label=f"ideal s per {comparison.window_groups} groups",
            cells=tuple(seconds(result.bound.ideal_s) if result.bound else NOTHING for result in results),
        ),
        Row(label="each phase alone, tokens/s"),
        Row(
            label="  generation",
            cells=tuple(count(result.capacities.rollout_tokens_per_s) if result.capacities else NOTHING for result in results),
        ),
        Row(
            label="  training",
            cells=tuple(count(result.capacities.trainer_tokens_per_s) if result.capacities else NOTHING for result in results),
        ),
    ]


def _cell(spread: Spread | None, shown: Shown, with_spread: bool) -> str:
    if spread is None:
        return NOTHING
    median = shown(spread.median)
    if not with_spread or spread.min == spread.max:
        return median
    return f"{median}\n{shown(spread.min)}-{shown(spread.max)}"


def table_of(comparison: Comparison) -> Table:
    from rich.table import Table

    title = f"{comparison.title}{_of_repeats(comparison)}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for result in comparison.results:
        table.add_column(_folded(result.profile), justify="right", overflow="fold")
    for row in rows_of(comparison):
        strong = row.label in ("speedup", "% of the bound") or row.label.startswith("s per ")
        table.add_row(row.label, *row.cells, style="bold" if strong else "")
    return table


def _folded(name: str) -> str:
    """A long name on several lines, broken at its hyphens."""
    import textwrap

    return "\n".join(textwrap.wrap(name, 12))


def _of_repeats(comparison: Comparison) -> str:
    repeats = len(comparison.seeds)
    return f"; median of {repeats} runs (least-most)" if repeats > 1 else ""


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
