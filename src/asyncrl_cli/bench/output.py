"""A comparison as its user reads it: the table, in which metrics are rows and profiles are columns, so that
six profiles fit on a terminal; the files results.json and report.md; and the notes that explain the rows:
briefly on the screen, at length in report.md and on the page of `asyncrl report`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.storage import remove_if_empty, replace_text
from asyncrl_cli.bench import figures
from asyncrl_cli.bench.results import Comparison, differences
from asyncrl_cli.observe.format import NOTHING, clock, count, share
from asyncrl_cli.plan.cluster import usable_cores

Format = Callable[[float], str]
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
    form: Format
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
    TableFigure("equal versions", "equal_weights", percent),
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

    def add_row(label: str, cells: Iterable[object], strong: bool = False) -> None:
        made.append(TableRow(label=label, cells=tuple(map(str, cells)), strong=strong))

    def add_figures(shown: Iterable[TableFigure]) -> None:
        for one in shown:
            spreads = [result.figures.get(one.name) for result in results]
            if not one.always and not any(spreads):
                continue
            cells = []
            for spread in spreads:
                cells.append(NOTHING if spread is None else one.form(spread.median))
                if spread is not None and spread.min != spread.max and (one.key or all_spreads):
                    # on a second line, the minimum and maximum of the repeats
                    cells[-1] += f"\n{_short(spread.min, one.form)}-{_short(spread.max, one.form)}"
            add_row(one.label.format(window=comparison.window_groups), cells, one.strong)

    unequal = [differences(results[0], result) for result in results]
    if any(unequal):
        add_row("not equal", map(", ".join, unequal), strong=True)
        add_row("steps per sync (K)", (one.window_steps for one in contestants))
        add_row("groups per sync (W)", (one.window_groups for one in contestants))
    add_figures(SPEED)
    # where each profile's step is a window, the step's rows say the same
    if any(one.step_groups != comparison.window_groups for one in contestants):
        add_figures(WINDOW)
    add_row("train step, groups (R)", (one.step_groups for one in contestants))
    add_figures((*STEP, *REST))
    if comparison.has_bound:
        add_row("limited by", (result.limited_by or NOTHING for result in results))
        add_figures(IDEAL)
    if any(RATES[0].name in result.figures for result in results):
        made.append(TableRow(label="each phase alone"))
        add_figures(RATES)
    return made


def _short(value: float, form: Format) -> str:
    """A value of a spread, with at most three digits and no unit."""
    if form in (seconds, digits) and 0.01 <= value < 1000:
        return f"{value:.3g}"
    return form(value).removesuffix("x").removesuffix("%")


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


STRETCH_NOTE = (
    "All runs are measured over the same groups (to within a train step): after the warm-up (the longest "
    "window of all profiles{scored}) and before the run-out, in which nothing is generated ahead any "
    "more{final}. Wall time, staleness max, max span{reward} cover the whole run."
)
SIMULATED = {"scored": "", "final": "", "reward": " and tokens discarded"}
REAL = {
    "scored": ", or until every run has scored version 0",
    "final": " and the final version is scored. Evals in between are subtracted",
    "reward": ", tokens discarded and final reward",
}
WINDOW_NOTE = (
    "`s per {window} groups` is the time for {window} groups, the W of the baseline ({baseline}), in every "
    "profile; a group is all responses to one prompt. The rows below it split the trainer's time, in the "
    "same unit: `wait_data` is waiting for groups, `gather` is collecting the new weights, `other` is "
    "checkpoints and the rest."
)
SPEEDUP_NOTE = (
    "`speedup` is groups per second relative to the baseline's run of the same seed, as the median over the "
    "repeats; `per token` is the same for trained tokens per second."
)
IDEAL_NOTE = (
    "`% of the bound` is ideal time over measured time. The ideal is the larger of generation's and "
    "training's time if each side has its own resources, and their sum if both take turns on all of them. "
    "`limited by` names the larger one. "
)
BOUND_OF_COSTS = IDEAL_NOTE + (
    "Each is (tokens / speed of the phase alone, in full batches). Generation's tokens are those sampled "
    "for the trained groups, at most those sampled during the measurement (groups made ahead are not made "
    "again); training's are those trained."
)
BOUND_OF_STATES = IDEAL_NOTE + (
    "Each is the time for which the side computed in this very run: the trainer, and the rollout workers on "
    "average. So the rest to 100% is waiting, and not what fuller slots or a machine of its own would save."
)
WEIGHTS_NOTE = (
    "`equal versions`: the share of all weight versions that are the baseline's, bit for bit (deterministic "
    "runs only). On-policy profiles with as many trainer ranks reach 100%."
)
IDLE_NOTE = (
    "Idle: trainer starved, blocked or syncing; rollout workers with no running sequence, or paused. "
    "Measured steps with an eval beside them do not count. Slots used: running sequences over slots, which "
    "shows what a long tail really costs."
)


@contextmanager
def output_directory(out: Path | None) -> Iterator[Path]:
    """Make the directory, or use an empty one. Raises RefusedError if it is not empty. A comparison that
    fails before writing anything leaves no directory behind."""
    directory = out or Path("bench") / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        hint = "give --out another directory: results are never overwritten"
        raise RefusedError(f"{directory} is not empty", hint=hint)
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{directory} cannot be created: {error.strerror}"
        raise RefusedError(why, hint="give --out another directory") from None
    try:
        yield directory
    except BaseException:
        for path in new:
            remove_if_empty(path)
        raise


def write_results(comparison: Comparison, directory: Path) -> list[Path]:
    """Write results.json, then report.md."""
    results, report = directory / "results.json", directory / "report.md"
    replace_text(results, json.dumps(comparison.to_json(), indent=2) + "\n")
    replace_text(report, report_text(comparison))
    return [results, report]


def report_text(comparison: Comparison) -> str:
    """report.md: the table, with every figure's spread, and how to read it."""
    names = [result.profile for result in comparison.results]
    table = [f"| | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for row in rows_of(comparison, all_spreads=True):
        cells = row.cells or ("",) * len(names)
        label = row.label.replace("  ", "&nbsp;&nbsp;")
        written = (cell.replace("\n", " (") + (")" if "\n" in cell else "") for cell in cells)
        table.append(f"| {label} | {' | '.join(written)} |")
    title = comparison.title[:1].upper() + comparison.title[1:]
    cores = "" if comparison.simulated else f" This machine has {usable_cores()} usable cores."
    parts = [
        "# SIMULATED comparison" if comparison.simulated else "# Comparison",
        f"{title}. Seeds: {', '.join(map(str, comparison.seeds))}.{cores}",
        *([f"Not finished: {', '.join(comparison.missing)}."] if comparison.missing else []),
        "\n".join(table),
        "## How to read it",
        "\n".join(f"- {note}" for note in long_notes(comparison)),
    ]
    if comparison.remarks:
        parts += ["## The workload" if comparison.simulated else "## Remarks", *comparison.remarks]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def short_notes(comparison: Comparison) -> Iterator[str]:
    """Notes of one line each, shown below the table."""
    window, baseline = comparison.window_groups, comparison.baseline
    yield f"s per {window} groups: {window} is W of {baseline}; a group is all responses to one prompt"
    whole = "wall time, maxima, tokens discarded and reward cover the whole run"
    yield f"{whole}; the rest excludes warm-up and run-out"
    if any(differences(comparison.results[0], result) for result in comparison.results[1:]):
        fewer = "part of the speedup is fewer syncs (K, W) or fewer tokens (length)"
        yield f"not equal to {baseline}: {fewer}, not asynchrony"
    yield "wait_data: the trainer waits for groups; gather: it collects new weights"
    if comparison.has_bound:
        longer = "the phase that would take longer without any waits"
        yield f"limited by: {longer}; that is the bound, and its time is the ideal"
    yield from _outlooks(comparison)


def _outlooks(comparison: Comparison) -> Iterator[str]:
    for profile, text in comparison.outlooks.items():
        yield f"SIMULATED, {profile}: {text}"


def long_notes(comparison: Comparison) -> Iterator[str]:
    """Sentences for report.md."""
    yield STRETCH_NOTE.format(**(SIMULATED if comparison.simulated else REAL))
    yield WINDOW_NOTE.format(window=comparison.window_groups, baseline=comparison.baseline)
    yield SPEEDUP_NOTE
    if comparison.has_bound:
        yield BOUND_OF_COSTS if comparison.simulated else BOUND_OF_STATES
    if any("equal_weights" in result.figures for result in comparison.results):
        yield WEIGHTS_NOTE
    yield IDLE_NOTE
    yield from _outlooks(comparison)
