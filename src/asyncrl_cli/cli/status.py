"""`asyncrl status`: how a run is doing, from its status.json."""

from __future__ import annotations

from typing import Annotated

import typer

from asyncrl_cli.cli.console import RUNS_DIR, JsonOption, RunsDirOption, print_json, stdout, warn
from asyncrl_cli.errors import RefusedError

EXAMPLES = """
  asyncrl status                 the newest run
  asyncrl status first --watch   until it ends
  asyncrl status --json | jq .progress"""


def command(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run's name or directory; by default the newest.")] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Redraw every second until the run ends.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show how a run is doing, from any terminal, also after it has ended."""
    from asyncrl_cli.observe.screen import print_status, watch_status
    from asyncrl_cli.observe.status import RunStatus, newest_status, read_status

    found, wrong = newest_status(runs_dir) if run is None else (read_status(run, runs_dir), [])
    for told in wrong:
        warn(f"{told}; an older run is shown")

    def read_again() -> RunStatus:
        if not found.directory.exists():
            why = f"run '{found.name}' ended while it started, and left nothing"
            raise RefusedError(why, hint="the command that started it said why")
        return read_status(str(found.directory), runs_dir)

    if as_json:
        print_json(found.to_json())
    elif watch:
        watch_status(read_again, stdout())
    else:
        print_status(found, stdout())
