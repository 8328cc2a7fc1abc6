"""Arguments and options that several commands have, and what completes their values in a shell.

`asyncrl --install-completion` installs Typer's own scripts, which call the functions here. Typer drops
suggestions that do not begin with the incomplete word.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from asyncrl_cli.base.paths import RUNS_DIR as RUNS_DIR

MOST, MOST_DEVICES = 10**9, 4096
"""Limits of numbers: of any, and of devices and machines, which are planned one by one."""
Complete = Callable[..., list[str]]
"""Returns the suggestions for a value; typer passes what it asks for."""
Ui = Literal["auto", "live", "plain", "none"]


def profile_names(incomplete: str) -> list[str]:
    """Shipped profiles; after the `+` of `A+B`, those that may be laid over A."""
    from asyncrl_cli.profile.toml_files import shipped_profiles

    below, plus, _ = incomplete.rpartition("+")
    return [f"{below}{plus}{name}" for name in shipped_profiles()]


def run_names(context: typer.Context) -> list[str]:
    """The runs in `--runs-dir`, newest first."""
    from asyncrl_cli.checkpoint import lookup

    return lookup.run_names(Path(context.params.get("runs_dir") or "runs"))


def settings(incomplete: str) -> list[str]:
    """`section.key=`, and after the `=` the key's values if it has a fixed list of them."""
    from asyncrl_cli.profile.keys import keys
    from asyncrl_cli.profile.validation import choices

    key, equals, _ = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in keys()]
    return [f"{key}={choice}" for choice in choices(key)] if key in keys() else []


def workload_names() -> list[str]:
    from asyncrl_cli.profile.toml_files import shipped_workloads

    return list(shipped_workloads())


def key_names() -> list[str]:
    from asyncrl_cli.profile import keys

    return [*keys.sections(), *keys.keys()]


def template_names() -> list[str]:
    from asyncrl_cli.profile.toml_files import shipped_templates

    return list(shipped_templates())


def text_argument(metavar: str, help: str, complete: Complete) -> object:
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete)


def text_option(name: str, metavar: str, help: str, complete: Complete | None = None) -> object:
    return typer.Option(name, metavar=metavar, help=help, autocompletion=complete)


def profile_option(help: str) -> object:
    return typer.Option("--profile", "-p", metavar="NAME|FILE", help=help, autocompletion=profile_names)


def set_option(help: str) -> object:
    return text_option("--set", "SECTION.KEY=VALUE", help, settings)


def number_option(
    name: str, help: str, *, least: float = 1, most: float = MOST, metavar: str = "N", also: str = ""
) -> object:
    """An option with a number, which is finite. `also`: its short form."""
    names = [name, also] if also else [name]
    return typer.Option(*names, metavar=metavar, min=least, max=most, help=help, callback=_finite)


def memory_option(name: str, help: str) -> object:
    """An option in GiB."""
    return number_option(name, help, least=0.1, most=10**6, metavar="GIB")


def _finite(number: float | None) -> float | None:
    """Refuse NaN, which no limit keeps out."""
    if number is not None and number != number:
        raise typer.BadParameter("it is not a number")
    return number


def run_argument(metavar: str, help: str) -> object:
    return text_argument(metavar, help, run_names)


ProfileOption = Annotated[
    str,
    profile_option("Name of a profile (see [bold]asyncrl profiles[/]), or a TOML file. A+B lays B over A."),
]
SetOption = Annotated[
    list[str] | None, set_option("Override a key. The value is TOML, or else a string. May be repeated.")
]
NameOption = Annotated[
    str | None, text_option("--name", "N", "Name of the run. Default: from profile and time.")
]
RunArgument = Annotated[
    str, run_argument("RUN", "A run's name, [bold]last[/] (the newest run), or a directory.")
]
RunsDirOption = Annotated[Path, text_option("--runs-dir", "DIR", "Directory that holds all runs.")]
UiOption = Annotated[
    Ui, typer.Option("--ui", help="What to show; auto: live tables on a terminal, plain lines elsewhere.")
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="RAY",
        envvar="RAY_ADDRESS",
        callback=lambda address: None if address == "local" else address,
        help="HOST:PORT of a Ray cluster, or auto on one of its nodes. By default, or with local, start Ray "
        "on this machine.",
    ),
]
JobAddressOption = Annotated[
    str | None,
    text_option(
        "--address", "URL", "Job server of the cluster to which the run was submitted: http://HEAD:8265."
    ),
]
DetachOption = Annotated[
    bool, typer.Option("--detach", "-d", help="Run in the background, independent of this terminal.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
