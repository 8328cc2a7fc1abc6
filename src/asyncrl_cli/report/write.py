"""Writes what people take elsewhere: a report's page, whole or not at all, and a trace. Neither overwrites
anything but an earlier one of its kind.

A bench's directory has its table with the bound, notes and a bar for each profile's speed on the page. The
first run of each profile has charts.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import IO, cast

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.base.paths import as_typed
from asyncrl_cli.base.safe_files import UnsafeFile, open_regular, reason
from asyncrl_cli.base.storage import appearing_file, replace_text
from asyncrl_cli.bench.output import heading_of, long_notes, rows_of
from asyncrl_cli.bench.results import read_results
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.report.page import (
    GENERATOR,
    MAX_CHARACTERS,
    audit_html,
    before_and_after_html,
    card,
    page_of,
    plotly,
    samples_html,
    side_by_side_html,
    table,
)
from asyncrl_cli.report.perfetto import trace_entries
from asyncrl_cli.report.run_data import run_data
from asyncrl_cli.report.scaling import drawing
from asyncrl_cli.report.side_by_side import compare

NAME = "report.html"
TRACE_GENERATOR = "asyncrl trace"
"""In each trace's head. A file that has it may be overwritten."""
HEAD_BYTES = 4096
GZIP_WINDOW_BITS = 31
RESULTS = "results.json"
LATER_RUN = re.compile(r".*-r[1-9][0-9]*")
"""Real runs are named by profile and repeat; of simulated ones only the first of each profile is recorded."""


def write_report(
    names: Sequence[str],
    out: Path | None,
    runs_dir: Path,
    progress: Callable[..., None],
    target: float | None = None,
) -> tuple[Path, list[str]]:
    """Write the page of these runs, or of one bench's directory, and return its file, and what was left out
    because it is damaged.

    Raises ConfigError if a run or bench does not exist, RefusedError for a run without train steps, and as
    `check_out`.
    """
    bench = next((Path(name) for name in names if (Path(name) / RESULTS).is_file()), None)
    if bench is not None and len(names) > 1:
        raise ConfigError(f"{bench} is a bench, which has its own page", hint=f"asyncrl report {bench}")
    found = runs_in(bench) if bench else [Recorded.find(name, runs_dir) for name in dict.fromkeys(names)]
    path = out or (bench / NAME if bench else found[0].files.path / NAME if len(found) == 1 else Path(NAME))
    check_out(path, GENERATOR, "report")
    is_renewed = out is None and path == Path(NAME) and path.exists()
    words = bench_html(bench) if bench else ""
    runs, samples, doubts = [], "", list[str]()
    for recorded in found:
        progress(f"reading {recorded.name}")
        title = f"Samples of {recorded.name}" if len(found) > 1 else "Samples"
        samples += audit_html(recorded, f"Audit of {recorded.name}")
        samples += before_and_after_html(recorded)
        samples += samples_html(recorded, title, MAX_CHARACTERS // len(found))
        runs.append(run_data(recorded))
    if len(found) > 1:
        comparison = compare(found, target)
        doubts = comparison.doubts
        heading = "Side by side: whole runs, with warm-up and evals" if bench else "Side by side"
        words += side_by_side_html(comparison, heading)
    progress(f"writing {path}")
    title = f"bench {bench.resolve().name}" if bench else " · ".join(run.name for run in runs)
    library = plotly() if runs else ""
    replace_text(path, page_of(runs, library=library, title=title, before=words, after=samples))
    if is_renewed:  # of other runs, perhaps
        doubts = [*doubts, f"the report that was in {path} is replaced; --out FILE would keep it"]
    return path, [note for recorded in found for note in recorded.damage.notes] + doubts


def runs_in(directory: Path) -> list[Recorded]:
    """The first run of each profile, in the order of the table."""
    order = [result.profile for result in read_results(directory / RESULTS).results]
    paths = [path for path in (directory / "runs").glob("*") if not LATER_RUN.fullmatch(path.name)]
    runs = [Recorded(path) for path in sorted(paths) if (path / "metrics.jsonl").is_file()]
    return sorted(
        (run for run in runs if run.loaded.profile.name in order),
        key=lambda run: order.index(run.loaded.profile.name),
    )


def bench_html(directory: Path) -> str:
    """A bench's table, how to read it, and groups per second as bars: the dashed outline around a bar is its
    bound. Raises RefusedError if its results cannot be read."""
    comparison = read_results(directory / RESULTS)
    results, notes = comparison.results, [*long_notes(comparison), *comparison.remarks]
    missing = f"Not finished: {', '.join(comparison.missing)}." if comparison.missing else ""
    listed = "".join(f"<li>{escape(note.replace('`', ''))}</li>" for note in notes)
    rows, names = rows_of(comparison, all_spreads=True), [result.profile for result in results]
    labels = [escape(row.label).replace("  ", "&nbsp;&nbsp;&nbsp;") for row in rows]
    figures = [list(map(escape, row.cells or [""] * len(names))) for row in rows]
    cells = [[label, *row] for label, row in zip(labels, figures, strict=True)]
    strong = {number for number, row in enumerate(rows) if row.strong}
    bars, speeds = "", [result.median("groups_per_s") or 0.0 for result in results]
    ideals_s = [result.median("ideal_s") for result in results]
    bounds = [comparison.window_groups / ideal_s if ideal_s else 0.0 for ideal_s in ideals_s]
    outlines = [max(speed, bound) or 1.0 for speed, bound in zip(speeds, bounds, strict=True)]
    for result, speed, outline in zip(results, speeds, outlines, strict=True):
        kind, width = "ideal" if result.limited_by else "", f"{outline / max(outlines):.1%}"
        inner = f'<i style="width:{speed / outline:.1%}"></i>'
        bar = f'<div class="{kind}" style="width:{width}">{inner}</div>'
        bars += f"<span>{escape(result.profile)}</span>{bar}<span>{speed:.3g}</span>"
    title = "Groups per second" + (", and the bound (dashed)" if comparison.has_bound else "")
    parts = [
        f"<p>{escape(heading_of(comparison))}</p>",
        f"<p><b>{escape(missing)}</b></p>" if missing else "",
        table(["", *map(escape, names)], cells, figures=True, strong=strong),
        f"<details><summary>how to read it</summary><ul>{listed}</ul></details>",
        f'<h3>{title}</h3><div class="bars">{bars}</div>',
    ]
    if comparison.scalings:
        parts.append(f"<h3>Groups per second over GPUs, SIMULATED</h3>{drawing(comparison.scalings)}")
    return card("SIMULATED comparison" if comparison.simulated else "Comparison", "".join(parts))


def write_trace(run: Recorded, path: Path, first: int = 1, last: int | None = None) -> Counter[str]:
    """Write the train steps from `first` to `last` (None: to the end) to `path`, gzipped if it ends with .gz.
    Returns how many entries there are of each kind.

    Raises ConfigError for a range without a train step or a malformed file of the run, OSError if `path`
    cannot be written, and as `check_out`.
    """
    check_out(path, TRACE_GENERATOR, "trace")
    head = json.dumps({"generator": TRACE_GENERATOR, "run": run.name})
    counted: Counter[str] = Counter()
    opened = cast("Callable[..., IO[str]]", gzip.open if path.suffix == ".gz" else open)
    with appearing_file(path) as temporary, opened(temporary, "wt", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {head}, "traceEvents": [\n')
        for index, entry in enumerate(trace_entries(run, first, last)):
            counted[str(entry["cat"] if entry["ph"] in ("X", "i") else entry["ph"])] += 1
            file.write((",\n" if index else "") + json.dumps(entry, separators=(",", ":")))
        file.write("\n]}\n")
        if (first > 1 or last is not None) and not counted["step"]:
            asked = f"--steps {first}:{'' if last is None else last}"
            hint = f"`asyncrl status {as_typed(run.files.path)}` says how far it has come"
            raise ConfigError(f"run '{run.name}' has trained no step of {asked}", hint=hint)
    return counted


def check_out(path: Path, mark: str, kind: str) -> None:
    """Check, before any work, that a file can be written at `path`.

    Raises ConfigError if its directory does not exist, RefusedError if the file exists and is not an earlier
    `kind` (`report`, `trace`): each of those has `mark` in its head.
    """
    if not path.parent.is_dir():
        why = f"{path} cannot be written: {path.parent} is not a directory"
        raise ConfigError(why, hint="create it, or give another --out")
    try:
        with open_regular(path) as file:
            head = file.read(HEAD_BYTES)
    except FileNotFoundError:
        return
    except (OSError, UnsafeFile) as error:
        why = f"{path} cannot be written: {reason(error)}"
        raise RefusedError(why, hint="give --out the name of a file") from None
    with suppress(zlib.error):  # it is not gzipped
        head = zlib.decompressobj(GZIP_WINDOW_BITS).decompress(head, HEAD_BYTES)
    if mark.encode() not in head:
        why = f"{path} exists and is not a {kind}: it is not overwritten"
        raise RefusedError(why, hint="give another --out")
