"""The commands about files: `asyncrl profiles` lists, explains and shows profiles, `asyncrl schema` prints
their JSON Schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from rich.table import Column
from typer.core import TyperGroup

from asyncrl_cli.cli.console import epilog, load_profile, print_json, print_table, print_text, warn
from asyncrl_cli.cli.options import JsonOption, SetOption, profile_names

PROFILES_EXAMPLES = """
  asyncrl profiles
  asyncrl profiles partial-rollout        a whole profile, with all defaults
  asyncrl profiles show partial-rollout --origin
  asyncrl profiles keys rollout           every key of a section, explained
  asyncrl profiles show base > my.toml    a profile that extends no other"""
SHOW_EXAMPLES = """
  asyncrl profiles show stale-samples --origin   where each value comes from
  asyncrl profiles show base --set run.seed=1 --json"""
SCHEMA_EXAMPLES = """
  asyncrl schema > profile.schema.json
  asyncrl schema workload > workload.schema.json

If its first line is [bold]#:schema ./profile.schema.json[/], editors with taplo support
(Even Better TOML) complete and check a profile."""


class _Profiles(TyperGroup):
    """`asyncrl profiles NAME` is short for `asyncrl profiles show NAME`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["show", *args])


profiles = typer.Typer(
    cls=_Profiles,
    help="List the profiles, or show one.",
    epilog=epilog(PROFILES_EXAMPLES),
    rich_markup_mode="rich",
)


def key_names() -> list[str]:
    from asyncrl_cli.profile import keys

    return [*keys.sections(), *keys.keys()]


@profiles.callback(invoke_without_command=True)
def list_profiles(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the profiles that come with asyncrl; [bold]show NAME[/] prints one."""
    if context.invoked_subcommand is not None:
        return
    from asyncrl_cli.profile.arithmetic import mode_of
    from asyncrl_cli.profile.loaded import load
    from asyncrl_cli.profile.toml_files import shipped_profiles, toml_value

    loaded = ((name, load(name, environ={}).profile) for name in shipped_profiles())
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "mode": mode_of(profile),
            "K": profile.async_training.trigger_parameter_sync_step,
            "eta": str(profile.async_training.staleness_threshold),
            "partial_rollout": profile.async_training.partial_rollout,
            "purpose": profile.purpose,
        }
        for name, profile in loaded
    ]
    if as_json:
        print_json(rows)
        return
    columns = [Column(header, no_wrap=True) for header in ("name", "K", "eta", "partial")]
    shown = (
        (row["name"], str(row["K"]), row["eta"], toml_value(row["partial_rollout"]), row["purpose"])
        for row in rows
    )
    print_table([*columns, "purpose"], shown)


@profiles.command("keys")
def list_keys(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[SECTION|KEY]",
            help="List only this section, e.g. rollout, or this key.",
            autocompletion=key_names,
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """List every key of a profile: its default, what it expects, what it means. The output is TOML."""
    from asyncrl_cli.profile.keys import keys, sections, unknown_key, values_of
    from asyncrl_cli.profile.schema import Profile
    from asyncrl_cli.profile.toml_files import toml_value
    from asyncrl_cli.profile.validation import expected

    defaults = values_of(Profile())
    if name not in ("", *sections(), *keys()):
        raise unknown_key(name, "profiles keys", [*sections(), *keys()])
    rows = [
        {"key": key, "expects": expected(key), "default": defaults[key], "meaning": meaning}
        for key, meaning in keys().items()
        if name in ("", key, key.partition(".")[0])
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:  # as in a profile; a key without a default is a comment
        key, default = row["key"], row["default"]
        line = f"# {key} is not set by default" if default is None else f"{key} = {toml_value(default)}"
        print_text(f"{line}  # {row['expects']}\n    # {row['meaning']}")


@profiles.command("show", epilog=epilog(SHOW_EXAMPLES))
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE", help="A profile by name, or a TOML file.", autocompletion=profile_names
        ),
    ],
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a profile as it would run: every key, including defaults."""
    from asyncrl_cli.profile.loaded import to_document, to_toml

    loaded = load_profile(name, sets)
    warn(*loaded.warnings)
    if as_json:
        print_json(to_document(loaded.profile, loaded.origins))
    else:
        print_text(to_toml(loaded.profile, loaded.origins, only_given=False, with_origins=origin))


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
