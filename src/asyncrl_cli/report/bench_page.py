"""A bench's directory on a page: its table with the bound, notes and pictures. The first run of each profile has charts."""

from __future__ import annotations

import base64
import re
from html import escape
from pathlib import Path

from asyncrl_cli.bench.report import long_notes
from asyncrl_cli.bench.results import Comparison, read_results
from asyncrl_cli.bench.table import heading_of, rows_of
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.report.page import card, table
from asyncrl_cli.safe_files import MIB, read_bytes

RESULTS = "results.json"
PICTURES = {
    "speedup.png": "Groups per second, and the bound if it was measured",
    "timeline.png": "Where the time goes, in the middle of the run",
}
MOST_PICTURE_BYTES = 4 * MIB
LATER_RUN = re.compile(r".*-r[1-9][0-9]*")
"""Real runs are named by profile and repeat; of simulated ones only the first of each profile is recorded."""


def is_bench(directory: Path) -> bool:
    return (directory / RESULTS).is_file()


def runs_in(directory: Path) -> list[Recorded]:
    """The first run of each profile, in the order of the table."""
    order = [result.profile for result in read_results(directory / RESULTS).results]
    paths = [path for path in (directory / "runs").glob("*") if not LATER_RUN.fullmatch(path.name)]
    runs = [Recorded(path) for path in sorted(paths) if (path / "metrics.jsonl").is_file()]
    return sorted((run for run in runs if run.loaded.profile.name in order), key=lambda run: order.index(run.loaded.profile.name))


def bench_html(directory: Path) -> str:
    """Raises RefusedError if its results cannot be read."""
    comparison = read_results(directory / RESULTS)
    notes = [*long_notes(comparison), *comparison.remarks]
    missing = f"<p><b>Not finished: {escape(', '.join(comparison.missing))}.</b></p>" if comparison.missing else ""
    listed = "".join(f"<li>{escape(note.replace('`', ''))}</li>" for note in notes)
    reading = f"<details><summary>how to read it</summary><ul>{listed}</ul></details>"
    parts = [f"<p>{escape(heading_of(comparison))}</p>", missing, _table(comparison), reading]
    parts += [_picture(directory / name, words) for name, words in PICTURES.items() if (directory / name).is_file()]
    return card("Comparison" if not comparison.simulated else "SIMULATED comparison", "".join(parts))


def _table(comparison: Comparison) -> str:
    rows = rows_of(comparison, all_spreads=True)
    names = [result.profile for result in comparison.results]
    cells = [[escape(row.label).replace("  ", "&nbsp;&nbsp;&nbsp;"), *map(escape, row.cells or [""] * len(names))] for row in rows]
    strong = {number for number, row in enumerate(rows) if row.strong}
    return table(["", *map(escape, names)], cells, figures=True, strong=strong)


def _picture(path: Path, words: str) -> str:
    content = base64.b64encode(read_bytes(path, max_bytes=MOST_PICTURE_BYTES)).decode("ascii")
    return f'<h3>{escape(words)}</h3><div class="scroll"><img alt="{escape(words)}" src="data:image/png;base64,{content}"></div>'
