"""Writes the files of a comparison: results.json, report.md, timeline.png, speedup.png. Also explains the
rows that its table has: briefly on the screen, at length in report.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.storage import appearing_file, remove_if_empty, replace_text
from asyncrl_cli.bench.results import Comparison, differences
from asyncrl_cli.bench.table import markdown_of
from asyncrl_cli.plan.cluster import usable_cores

SIMULATED_STRETCH = (
    "All runs are measured over the same groups (to within a train step): after the warm-up (the longest "
    "window of all profiles) "
    "and before the run-out, in which nothing is generated ahead any more. Wall time, staleness max, "
    "max span and tokens discarded cover the whole run."
)
REAL_STRETCH = (
    "All runs are measured over the same groups (to within a train step): after the warm-up (the longest "
    "window of all profiles, "
    "or until every run has scored version 0) and before the run-out, in which nothing is generated ahead "
    "any more and the final "
    "version is scored. Evals in between are subtracted. Wall time, staleness max, max span, tokens "
    "discarded and final reward cover the whole run."
)
WINDOW = (
    "`s per {window} groups` is the time for {window} groups, the W of the baseline ({baseline}), in every "
    "profile; a group is all "
    "responses to one prompt. The rows below it split the trainer's time, in the same unit: `wait_data` is "
    "waiting "
    "for groups, `gather` is collecting the new weights, `other` is checkpoints and the rest."
)
BOUND = (
    "`% of the bound` is ideal time over measured time. The ideal is the larger of (tokens / generation "
    "alone) and (tokens / "
    "training alone) if each side has its own resources, and their sum if both take turns on all of them. "
    "`limited by` "
    "names the larger one. Generation's tokens are those sampled for the trained groups, at most those "
    "sampled during the "
    "measurement (groups made ahead are not made again); training's are those trained."
)
AT_ONCE = (
    "`both phases at once`: each side's speed while the other works too, if they share a machine's cores and "
    "memory. The "
    "bound ignores this; `% of both at once` includes it: the rest to 100% is what the job itself loses."
)
IDLE = (
    "Idle: trainer starved, blocked or syncing; rollout workers with no running sequence, or paused. "
    "Measured steps with an eval "
    "beside them do not count. Slots used: running sequences over slots, which shows what a long tail really "
    "costs."
)


@contextmanager
def output_directory(out: Path | None) -> Iterator[Path]:
    """Make the directory, or use an empty one. Raises RefusedError if it is not empty. A comparison that
    fails before writing anything leaves no directory behind."""
    directory = out or Path("bench") / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RefusedError(
            f"{directory} is not empty", hint="give --out another directory: results are never overwritten"
        )
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(
            f"{directory} cannot be created: {error.strerror}", hint="give --out another directory"
        ) from None
    try:
        yield directory
    except BaseException:
        for path in new:
            remove_if_empty(path)
        raise


def write_results(comparison: Comparison, directory: Path) -> Path:
    """Write results.json. Called first, so that a later failure cannot lose the results."""
    path = directory / "results.json"
    replace_text(path, json.dumps(comparison.to_json(), indent=2) + "\n")
    return path


def write_report(comparison: Comparison, directory: Path) -> tuple[list[Path], list[str]]:
    """Write report.md and the pictures for which there are data, each file whole or not at all. Returns the
    files written, and messages about pictures that could not be drawn."""
    from asyncrl_cli.bench import pictures

    draws = {"speedup.png": pictures.draw_speedups}
    if comparison.timelines:
        draws["timeline.png"] = pictures.draw_timelines
    drawn: list[Path] = []
    failures: list[str] = []
    for name, draw in draws.items():
        try:
            with appearing_file(directory / name) as temporary:
                draw(comparison, temporary)
            drawn.append(directory / name)
        # a plotting library may raise anything, and a picture is not worth losing the report
        except Exception as error:
            failures.append(f"{name} could not be drawn: {type(error).__name__}: {error}")
    report = directory / "report.md"
    replace_text(report, report_text(comparison, [path.name for path in drawn]))
    return [report, *drawn], failures


def report_text(comparison: Comparison, pictures: Sequence[str]) -> str:
    """`pictures`: names of files next to the report."""
    title = "# SIMULATED comparison" if comparison.simulated else "# Comparison"
    cores = "" if comparison.simulated else f" This machine has {usable_cores()} usable cores."
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    parts = [
        title,
        f"{comparison.title[:1].upper()}{comparison.title[1:]}. Seeds: {seeds}.{cores}",
        *([f"Not finished: {', '.join(comparison.missing)}."] if comparison.missing else []),
        markdown_of(comparison),
        *(f"![{Path(name).stem}]({name})" for name in pictures),
        "## How to read it",
        "\n".join(f"- {note}" for note in long_notes(comparison)),
    ]
    if comparison.remarks:
        heading = "## The workload" if comparison.simulated else "## Remarks"
        parts += [heading, *comparison.remarks]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def short_notes(comparison: Comparison) -> Iterator[str]:
    """Notes of one line each, shown below the table."""
    window, baseline = comparison.window_groups, comparison.baseline
    yield f"s per {window} groups: {window} is W of {baseline}; a group is all responses to one prompt"
    yield (
        "wall time, maxima, tokens discarded and reward cover the whole run; the rest excludes warm-up "
        "and "
        "run-out"
    )
    if any(differences(comparison.results[0], result) for result in comparison.results[1:]):
        yield (
            f"not equal to {baseline}: part of the speedup is fewer syncs (K, W) or fewer tokens "
            "(length), "
            "not asynchrony"
        )
    yield "wait_data: the trainer waits for groups; gather: it collects new weights"
    if comparison.has_bound:
        yield (
            "limited by: the phase that would take longer without any waits; that is the bound, and its "
            "time is the ideal"
        )


def long_notes(comparison: Comparison) -> Iterator[str]:
    """Sentences for report.md."""
    window, baseline = comparison.window_groups, comparison.baseline
    yield SIMULATED_STRETCH if comparison.simulated else REAL_STRETCH
    yield WINDOW.format(window=window, baseline=baseline)
    yield (
        "`speedup` is groups per second relative to the baseline's run of the same seed, as the median over "
        "the repeats; "
        "`per token` is the same for trained tokens per second."
    )
    if comparison.has_bound:
        yield BOUND
    if any("at_once_ratio" in result.figures for result in comparison.results):
        yield AT_ONCE
    yield IDLE
