"""`asyncrl profiles`: which profiles there are, and what one says."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from asyncrl_cli.cli.console import JsonOption, SetOption, epilog, load_profile, print_json, print_text, stdout, warn

LIST_EXAMPLES = """
  asyncrl profiles
  asyncrl profiles show partial-rollout --origin
  asyncrl profiles keys rollout           every key of a section, explained
  asyncrl profiles show base > my.toml    a profile that needs no other"""
SHOW_EXAMPLES = """
  asyncrl profiles show stale-samples --origin   where each value comes from
  asyncrl profiles show base --set run.seed=1 --json"""

app = typer.Typer(help="List the profiles, or show one.", epilog=epilog(LIST_EXAMPLES), rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def list_profiles(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the profiles that come with asyncrl; [bold]show NAME[/] prints one."""
    if context.invoked_subcommand is not None:
        return
    from asyncrl_cli.profile.arithmetic import mode_of
    from asyncrl_cli.profile.loaded import load
    from asyncrl_cli.profile.toml_files import shipped_profiles

    profiles = ((name, load(name, environ={}).profile) for name in shipped_profiles())
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "mode": mode_of(profile),
            "K": profile.async_training.trigger_parameter_sync_step,
            "eta": str(profile.async_training.staleness_threshold),
            "partial_rollout": profile.async_training.partial_rollout,
            "purpose": profile.purpose,
        }
        for name, profile in profiles
    ]
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False)
    for header in ("name", "K", "eta", "partial", "purpose"):
        table.add_column(header, no_wrap=header != "purpose")
    for row in rows:
        table.add_row(row["name"], str(row["K"]), row["eta"], str(row["partial_rollout"]).lower(), row["purpose"])
    stdout().print(table)


@app.command("keys")
def list_keys(
    section: Annotated[str, typer.Argument(metavar="[SECTION]", help="List only the keys of this section, e.g. rollout.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List every key of a profile: its default, what it expects, what it means. All of it is TOML."""
    from asyncrl_cli.errors import ConfigError
    from asyncrl_cli.profile.keys import expected, keys, sections
    from asyncrl_cli.profile.toml_files import toml_value

    def default_of(key: str) -> Any:
        of, _, name = key.partition(".")
        return sections()[of].model_fields[name].get_default(call_default_factory=True)

    if section and section not in sections():
        raise ConfigError(f"there is no section '{section}'", hint=f"sections: {', '.join(sections())}")
    rows = [
        {"key": key, "expects": expected(key), "default": default_of(key), "meaning": meaning}
        for key, meaning in keys().items()
        if key.startswith(section)
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:  # as a profile would say it; a key that is not set by default is a comment
        name, default = row["key"], row["default"]
        line = f"# {name} is not set by default" if default is None else f"{name} = {toml_value(default)}"
        print_text(f"{line}  # {row['expects']}\n    # {row['meaning']}")


@app.command("show", epilog=epilog(SHOW_EXAMPLES))
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A profile by name, or a TOML file.")],
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a profile as it would run: every key, defaults filled in."""
    from asyncrl_cli.profile.loaded import to_document, to_toml

    loaded = load_profile(name, sets)
    for warning in loaded.warnings:
        warn(warning)
    if as_json:
        print_json(to_document(loaded.profile, loaded.origins))
    else:
        print_text(to_toml(loaded.profile, loaded.origins, only_given=False, with_origins=origin))
