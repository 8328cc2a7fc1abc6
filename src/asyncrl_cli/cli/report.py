"""`asyncrl report`: writes runs, or a bench's directory, as one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.console import RUNS_DIR, RunsDirOption, print_text, run_argument, say, warn

EXAMPLES = """
  asyncrl report first                          the report of run "first"; stdout is the file's path
  asyncrl report first second --out two.html    side by side, configuration differences first
  asyncrl report bench/20261123-094500 --open   a bench: its table, its bound and its runs"""


def report(
    runs: Annotated[
        list[str], run_argument("RUN...", "Names or directories of runs, or the directory of a bench.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The file to write. Default: report.html, for one run in the run's directory.",
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Also search for the settings that would have been fastest. Takes minutes; simulated.",
        ),
    ] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Write a report of one or more runs as one HTML file: a verdict in words, and charts of everything
    measured."""
    from asyncrl_cli.observe.starting import Starting
    from asyncrl_cli.report.write import write_report

    with Starting("auto") as progress:
        path, damage = write_report(runs, out, runs_dir, progress, search=search)
    warn(*damage)
    say(f"{path.stat().st_size / 10**6:.1f} MB; the file needs no network")
    print_text(str(path))
    if open_it:
        typer.launch(path.resolve().as_uri())
