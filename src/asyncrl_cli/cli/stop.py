"""`asyncrl stop`: ask a run to end, from any terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from asyncrl_cli.cli.console import RUNS_DIR, RunsDirOption, say
from asyncrl_cli.errors import RefusedError

EXAMPLES = """
  asyncrl stop first     finish the train step, checkpoint, end
  asyncrl stop first     a second time: end at once"""


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or directory.")], runs_dir: RunsDirOption = RUNS_DIR
) -> None:
    """Ask a run to finish its train step, write a checkpoint and end; asked twice, it ends at once."""
    from asyncrl_cli.checkpoint.run_directory import request_stop
    from asyncrl_cli.observe.status import read_status

    found = read_status(run, runs_dir)
    if found.liveness in ("ended", "dead"):
        raise RefusedError(f"run '{found.name}' is not running", hint=f"`asyncrl status {found.name}` says how it ended")
    if request_stop(found.directory) == 1:
        say(f"asked run '{found.name}' to finish its step, checkpoint and end; watch it with `asyncrl status {found.name} --watch`")
    else:
        say(f"asked run '{found.name}' to end at once")
