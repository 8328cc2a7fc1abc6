"""The files of a comparison: results.json, report.md, timeline.png, speedup.png."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from asyncrl_cli.bench.gantt import Timeline
from asyncrl_cli.bench.legend import long_notes
from asyncrl_cli.bench.results import Comparison
from asyncrl_cli.bench.table import markdown_of
from asyncrl_cli.errors import RefusedError
from asyncrl_cli.plan.cluster import usable_cores
from asyncrl_cli.storage import replace_text

PICTURES = ("speedup.png", "timeline.png")


@contextmanager
def output_directory(out: Path | None) -> Iterator[Path]:
    """A new or empty directory; RefusedError for one that holds anything. A comparison that fails before it has written leaves none
    behind."""
    directory = out or Path("bench") / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RefusedError(f"{directory} is not empty", hint="give --out another directory: results are never overwritten")
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(f"{directory} cannot be made: {error.strerror}", hint="give --out another directory") from None
    try:
        yield directory
    except BaseException:
        with suppress(OSError):  # one that holds something stays
            for path in new:
                path.rmdir()
        raise


def write_results(comparison: Comparison, directory: Path) -> Path:
    """results.json: written before anything else is tried."""
    path = directory / "results.json"
    replace_text(path, json.dumps(comparison.to_json(), indent=2) + "\n")
    return path


def write_report(comparison: Comparison, timelines: Sequence[Timeline], directory: Path) -> tuple[list[Path], list[str]]:
    """report.md and the pictures of which something is known. Returns what was written, and what could not be drawn and why."""
    drawn: list[Path] = []
    failures: list[str] = []
    for name in PICTURES if timelines else PICTURES[:1]:
        try:
            drawn.append(_draw(name, comparison, timelines, directory))
        except Exception as error:  # whatever a plotting library may raise: results are worth more than a picture
            failures.append(f"{name} could not be drawn: {type(error).__name__}: {error}")
    report = directory / "report.md"
    replace_text(report, report_text(comparison, [path.name for path in drawn]))
    return [report, *drawn], failures


def _draw(name: str, comparison: Comparison, timelines: Sequence[Timeline], directory: Path) -> Path:
    """Whole or not there."""
    from asyncrl_cli.bench.pictures import draw_speedups, draw_timelines

    path, temporary = directory / name, directory / f".{name}.{os.getpid()}.tmp.png"
    try:
        if name == "timeline.png":
            draw_timelines(comparison, timelines, temporary)
        else:
            draw_speedups(comparison, temporary)
        return temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
