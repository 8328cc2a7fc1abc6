"""The files of a comparison, results.json and report.md, and the notes that explain the rows of its table:
briefly on the screen, at length in report.md and on the page of `asyncrl report`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.storage import remove_if_empty, replace_text
from asyncrl_cli.bench.results import Comparison, differences
from asyncrl_cli.bench.table import markdown_of
from asyncrl_cli.plan.cluster import usable_cores

STRETCH = (
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
WINDOW = (
    "`s per {window} groups` is the time for {window} groups, the W of the baseline ({baseline}), in every "
    "profile; a group is all responses to one prompt. The rows below it split the trainer's time, in the "
    "same unit: `wait_data` is waiting for groups, `gather` is collecting the new weights, `other` is "
    "checkpoints and the rest."
)
SPEEDUP = (
    "`speedup` is groups per second relative to the baseline's run of the same seed, as the median over the "
    "repeats; `per token` is the same for trained tokens per second."
)
IDEAL = (
    "`% of the bound` is ideal time over measured time. The ideal is the larger of generation's and "
    "training's time if each side has its own resources, and their sum if both take turns on all of them. "
    "`limited by` names the larger one. "
)
BOUND_OF_COSTS = IDEAL + (
    "Each is (tokens / speed of the phase alone, in full batches). Generation's tokens are those sampled "
    "for the trained groups, at most those sampled during the measurement (groups made ahead are not made "
    "again); training's are those trained."
)
BOUND_OF_STATES = IDEAL + (
    "Each is the time for which the side computed in this very run: the trainer, and the rollout workers on "
    "average. So the rest to 100% is waiting, and not what fuller slots or a machine of its own would save."
)
IDLE = (
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


def write_results(comparison: Comparison, directory: Path) -> list[Path]:
    """Write results.json, then report.md."""
    results, report = directory / "results.json", directory / "report.md"
    replace_text(results, json.dumps(comparison.to_json(), indent=2) + "\n")
    replace_text(report, report_text(comparison))
    return [results, report]


def report_text(comparison: Comparison) -> str:
    title = comparison.title[:1].upper() + comparison.title[1:]
    cores = "" if comparison.simulated else f" This machine has {usable_cores()} usable cores."
    parts = [
        "# SIMULATED comparison" if comparison.simulated else "# Comparison",
        f"{title}. Seeds: {', '.join(map(str, comparison.seeds))}.{cores}",
        *([f"Not finished: {', '.join(comparison.missing)}."] if comparison.missing else []),
        markdown_of(comparison),
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
    yield (
        "wall time, maxima, tokens discarded and reward cover the whole run; the rest excludes warm-up "
        "and run-out"
    )
    if any(differences(comparison.results[0], result) for result in comparison.results[1:]):
        yield (
            f"not equal to {baseline}: part of the speedup is fewer syncs (K, W) or fewer tokens (length), "
            "not asynchrony"
        )
    yield "wait_data: the trainer waits for groups; gather: it collects new weights"
    if comparison.has_bound:
        yield (
            "limited by: the phase that would take longer without any waits; that is the bound, and its time "
            "is the ideal"
        )


def long_notes(comparison: Comparison) -> Iterator[str]:
    """Sentences for report.md."""
    yield STRETCH.format(**(SIMULATED if comparison.simulated else REAL))
    yield WINDOW.format(window=comparison.window_groups, baseline=comparison.baseline)
    yield SPEEDUP
    if comparison.has_bound:
        yield BOUND_OF_COSTS if comparison.simulated else BOUND_OF_STATES
    yield IDLE
