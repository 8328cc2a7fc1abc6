"""`asyncrl resume`: a run goes on from a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from asyncrl_cli.cli.console import RUNS_DIR, AddressOption, JsonOption, RunsDirOption, UiOption, run_to_its_end

EXAMPLES = """
  asyncrl resume first                                   the newest checkpoint of run "first"
  asyncrl resume runs/first/checkpoints/step-000040      that one; later ones are set aside"""


def command(
    target: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|RUN", help="A checkpoint's directory, or a run's name or directory.")
    ],
    runs_dir: RunsDirOption = RUNS_DIR,
    ui: UiOption = "auto",
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a run from a checkpoint. Every group is trained exactly once."""
    from asyncrl_cli.job.run import Run

    run_to_its_end(Run.resume(target, runs_dir=runs_dir, ui=ui, address=address), as_json=as_json)
