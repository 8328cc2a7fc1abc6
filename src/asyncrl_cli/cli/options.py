"""Options that several commands share."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from asyncrl_cli.cli.console import print_json
from asyncrl_cli.errors import Interrupted

if TYPE_CHECKING:
    from asyncrl_cli.job.run import Run
    from asyncrl_cli.profile.loaded import Loaded


Ui = Literal["auto", "live", "plain", "none"]
ProfileOption = Annotated[
    str,
    typer.Option("--profile", "-p", metavar="NAME|FILE", help="Name of a profile (see [bold]asyncrl profiles[/]), or a TOML file."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; the value is TOML or else a string. May be repeated."),
]
RunsDirOption = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="Directory that holds all runs.")]
UiOption = Annotated[Ui, typer.Option("--ui", help="What to show; auto: live tables on a terminal, plain lines elsewhere.")]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", metavar="RAY", help="HOST:PORT of a Ray cluster; by default Ray is started here for the run."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]

RUNS_DIR = Path("runs")


def epilog(examples: str) -> str:
    """The end of a command's help. An indented line is an example: typer would join it with its neighbours."""
    return "[bold]Examples[/]" + examples.replace("\n  ", "\n\n  ")


def load_profile(reference: str, sets: list[str] | None, name: str | None = None) -> Loaded:
    """Load a profile, with the options of a command line as its top layers. Showing its warnings is left to the caller."""
    from asyncrl_cli.profile.loaded import load

    return load(reference, sets or [], {} if name is None else {"run.name": name})


def run_to_its_end(run: Run, *, as_json: bool) -> None:
    """Run it, print its summary on stdout if JSON was asked for, and raise what it failed with.

    The run keeps handling signals until the process ends: a late one must not end it in another way.
    """
    import asyncio

    from asyncrl_cli.job.process import collect_garbage_seldom
    from asyncrl_cli.job.run import NEVER_BEGAN

    collect_garbage_seldom()
    run.requests.take_signals()
    try:
        result = asyncio.run(run.run())
    except KeyboardInterrupt:  # typer would leave with 130, without a word
        raise Interrupted(NEVER_BEGAN) from None
    if as_json:
        with suppress(OSError) if result.error is not None else nullcontext():
            print_json(result.summary)
    if result.error is not None:
        raise result.error
    raise typer.Exit(result.exit_code)
