"""`asyncrl schema`: prints the JSON Schema of a profile or workload file."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from asyncrl_cli.cli.console import print_json

EXAMPLES = """
  asyncrl schema > profile.schema.json
  asyncrl schema workload > workload.schema.json

If its first line is [bold]#:schema ./profile.schema.json[/], editors with taplo support
(Even Better TOML) complete and check a profile."""


def schema(
    kind: Annotated[
        Literal["profile", "workload"], typer.Argument(metavar="profile|workload", help="Kind of file.")
    ] = "profile",
) -> None:
    """Print the JSON Schema of a profile or a workload, for editors and for `taplo check`."""
    if kind == "profile":
        from asyncrl_cli.profile.validation import profile_schema

        print_json(profile_schema())
    else:
        from asyncrl_cli.simulate.workload import workload_schema

        print_json(workload_schema())
