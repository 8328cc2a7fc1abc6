"""The files of a comparison: results.json, report.md, timeline.png, speedup.png."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from asyncrl_cli.bench.results import Comparison
from asyncrl_cli.bench.table import markdown_of
from asyncrl_cli.bench.timeline import Timeline
from asyncrl_cli.checkpoint.files import replace_text
from asyncrl_cli.errors import RefusedError

HOW_TO_READ = """\
- Measured are whole windows between the first one, which is warm-up, and the last one, in which nothing is generated ahead any
  more and the final version is scored. Wall time, staleness max, max span, tokens discarded and final reward are of the whole run.
- `s per {window} groups` is the time of as many groups as a window of the baseline ({baseline}) has, whatever the profile's own W;
  its parts, in the same unit, are the trainer's time: gen-wait is waiting for groups, sync the gather of new weights.
- `speedup` is the ratio of groups per second to the baseline's.
- `% of the bound` is ideal over measured time. Ideal is the larger of (tokens / generation alone) and (tokens / training
  alone) where the sides have resources of their own, and the sum of both where they take turns on all of them.
- Idle ratios: trainer starved, blocked or syncing; rollout workers with no running sequence, or paused. Slot utilization is what
  a long tail really costs.
"""


def output_directory(out: Path | None) -> Path:
    """A new or empty directory; raises RefusedError for one that holds anything."""
    directory = out or Path("bench") / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RefusedError(f"{directory} is not empty", hint="give --out another directory: results are never overwritten")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(f"{directory} cannot be made: {error.strerror}", hint="give --out another directory") from None
    return directory


def write(comparison: Comparison, timelines: Sequence[Timeline], directory: Path) -> list[Path]:
    """All files; a picture for which nothing is known is not drawn. Returns what was written."""
    from asyncrl_cli.bench.figures import draw_speedups, draw_timelines

    results, report = directory / "results.json", directory / "report.md"
    pictures = [draw_speedups(comparison, directory / "speedup.png")]
    if timelines:
        pictures.append(draw_timelines(comparison, timelines, directory / "timeline.png"))
    replace_text(results, json.dumps(comparison.to_json(), indent=2) + "\n")
    replace_text(report, report_text(comparison, pictures))
    return [results, report, *pictures]


def report_text(comparison: Comparison, pictures: Sequence[Path]) -> str:
    title = "# SIMULATED comparison" if comparison.simulated else "# Comparison"
    cores = "" if comparison.simulated else f" This machine has {os.cpu_count()} cores."
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    parts = [
        title,
        f"{comparison.title[:1].upper()}{comparison.title[1:]}. Seeds: {seeds}.{cores}",
        *(f"Not finished: {name}." for name in comparison.missing),
        markdown_of(comparison),
        *(f"![{picture.stem}]({picture.name})" for picture in pictures),
        "## How to read it",
        HOW_TO_READ.format(window=comparison.window_groups, baseline=comparison.baseline),
    ]
    if comparison.remarks:
        heading = "## The workload" if comparison.simulated else "## Remarks"
        parts += [heading, *comparison.remarks]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"
