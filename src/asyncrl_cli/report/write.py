"""Makes a report's file: finds what is asked for, reads it, and writes the page whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.report.page import GENERATOR, page_of, plotly
from asyncrl_cli.report.run_data import run_data
from asyncrl_cli.safe_files import open_regular
from asyncrl_cli.storage import replace_text

NAME = "report.html"
HEAD_BYTES = 300


def write_report(names: Sequence[str], out: Path | None, runs_dir: Path, progress: Callable[[str], None]) -> Path:
    """Returns the file. Raises ConfigError for a run that does not exist, RefusedError for one without train steps, or if the file
    exists and is no report."""
    found = [Recorded.find(name, runs_dir) for name in dict.fromkeys(names)]
    path = out or (found[0].files.path / NAME if len(found) == 1 else Path(NAME))
    refuse_foreign(path)
    runs = []
    for recorded in found:
        progress(f"reading {recorded.name}")
        runs.append(run_data(recorded))
    progress(f"writing {path}")
    title = " · ".join(run.name for run in runs)
    replace_text(path, page_of(runs, library=plotly(), title=title))
    return path


def refuse_foreign(path: Path) -> None:
    """Raises RefusedError if there is a file that this command did not write."""
    if not path.exists():
        return
    with open_regular(path) as file:
        if GENERATOR.encode() not in file.read(HEAD_BYTES):
            raise RefusedError(f"{path} exists and is no report: it is not overwritten", hint="give another --out")
