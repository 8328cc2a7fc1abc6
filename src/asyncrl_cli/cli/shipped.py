"""The commands about the files that come with asyncrl: `asyncrl profiles` lists, explains and shows profiles,
`asyncrl schema` prints their JSON Schema, `asyncrl init` copies a template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Column
from typer.core import TyperGroup

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.cli.console import (
    epilog,
    json_text,
    load_profile,
    print_json,
    print_table,
    print_text,
    say,
    warn,
)
from asyncrl_cli.cli.options import (
    MOST_DEVICES,
    JsonOption,
    SetOption,
    key_names,
    number_option,
    profile_names,
    profile_option,
    template_names,
    text_argument,
    text_option,
)

PROFILES_EXAMPLES = """
  asyncrl profiles
  asyncrl profiles --workloads            for `asyncrl bench --simulate`
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
INIT_EXAMPLES = """
  asyncrl init jsonl my-task          prompts in a file, your own reward function, a profile
  asyncrl init parquet-verl my-task   verl's data, and a reward in verl's signature
  asyncrl init agent my-agent         your own agent, with an OpenAI client and a tool
  asyncrl init pretrained my-run      a pretrained chat model on a laptop, three tasks
  asyncrl init gsm8k-8gpu gsm8k       Qwen2.5-1.5B on eight GPUs, and a rehearsal on two cores
  asyncrl init grafana dashboard      for logging.prometheus_port
  asyncrl init slurm launch --profile my.toml --shared /shared/my-task
  cd my-task && asyncrl train --profile profile.toml"""


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


@profiles.callback(invoke_without_command=True)
def list_profiles(
    context: typer.Context,
    workloads: Annotated[
        bool,
        typer.Option(
            "--workloads", help="List the workloads instead, which [bold]bench --simulate[/] simulates."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the profiles that come with asyncrl; [bold]show NAME[/] prints one."""
    if context.invoked_subcommand is not None:
        return
    if workloads:
        return _list_workloads(as_json=as_json)
    from asyncrl_cli.profile.arithmetic import mode_of
    from asyncrl_cli.profile.loaded import load
    from asyncrl_cli.profile.toml_files import shipped_profiles, toml_value

    loaded = ((name, load(name, environ={}).profile) for name in shipped_profiles())
    rows: list[dict[str, object]] = [
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
    shown = ({**row, "partial_rollout": toml_value(row["partial_rollout"])} for row in rows)
    cells = ([str(value) for key, value in row.items() if key != "mode"] for row in shown)
    print_table([*columns, "purpose"], cells)


def _list_workloads(*, as_json: bool) -> None:
    from asyncrl_cli.profile.toml_files import shipped_workloads
    from asyncrl_cli.simulate.workload_files import load_workload

    rows = [(name, load_workload(name)) for name in shipped_workloads()]
    if as_json:
        return print_json(
            [
                {"name": name, "purpose": one.purpose, "rows": [row.source for row in one.references]}
                for name, one in rows
            ]
        )
    cells = ((name, str(len(one.references)), one.purpose) for name, one in rows)
    headers = Column("name", no_wrap=True), Column("rows", justify="right"), "purpose"
    print_table(headers, cells)
    say("rows: that were measured or published, in parentheses by whom; docs/simulation.md names the sources")


@profiles.command("keys")
def list_keys(
    name: Annotated[
        str,
        text_argument("[SECTION|KEY]", "List only this section, e.g. rollout, or this key.", key_names),
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
        text_argument("NAME|FILE", "A profile by name, or a TOML file.", profile_names),
    ],
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a profile as it would run: every key, including defaults."""
    from asyncrl_cli.profile.resolved import to_document, to_toml

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


def init(
    template: Annotated[
        str,
        text_argument(
            "TEMPLATE",
            "Name of the template: agent, grafana, gsm8k-8gpu, jsonl, parquet-verl or pretrained; for a "
            "cluster: kuberay, ray-cluster, skypilot or slurm.",
            template_names,
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write, new or empty.")],
    profile: Annotated[
        str | None, profile_option("For a cluster: the profile to train, as for `asyncrl train`.")
    ] = None,
    sets: SetOption = None,
    name: Annotated[
        str | None,
        text_option("--name", "N", "For a cluster: name of the run. Default: the profile's."),
    ] = None,
    shared: Annotated[
        Path | None,
        text_option(
            "--shared",
            "DIR",
            "For a cluster: directory shared by all nodes, for the runs. Default: the current one.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        number_option(
            "--nodes", "For a cluster: number of nodes. Default: as few as possible.", most=MOST_DEVICES
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        number_option("--gpus-per-node", "For a cluster: GPUs per node. Default: 8.", most=MOST_DEVICES),
    ] = None,
    image: Annotated[
        str | None,
        text_option("--image", "IMAGE", "For kuberay and skypilot: container image with asyncrl."),
    ] = None,
) -> None:
    """Copy a template: for your own task, ready to train; for a dashboard; or for a job on a cluster."""
    import shutil

    from asyncrl_cli.cli.launchers import Launch, rendered
    from asyncrl_cli.plan.cluster import local_cluster
    from asyncrl_cli.plan.compiler import asked_gpus
    from asyncrl_cli.profile.loaded import load
    from asyncrl_cli.profile.toml_files import shipped_templates
    from asyncrl_cli.profile.validation import profile_schema

    templates = shipped_templates()
    if template not in templates:
        raise ConfigError(f"there is no template '{template}'", hint=f"templates: {', '.join(templates)}")
    source = templates[template]
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        hint = "name a new directory: nothing is overwritten"
        raise RefusedError(f"{directory} exists and is not empty", hint=hint)
    size = {"nodes": nodes, "gpus_per_node": gpus_per_node}
    launch = Launch(profile=profile, image=image, set=sets, name=name, shared=shared, **size)
    files = rendered(source, launch)
    warn(*launch.loaded.warnings if files else ())
    shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in files.items():
        (directory / file).write_text(text, encoding="utf-8")
    is_task = (directory / "profile.toml").exists()
    if is_task:
        (directory / "profile.schema.json").write_text(json_text(profile_schema()), encoding="utf-8")
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            print_text(str(path))
    following = str(directory / "README.md")
    if is_task:
        following = f"cd {directory} && asyncrl plan --profile profile.toml"
        settings = load(str(directory / "profile.toml"), environ={}).profile
        if settings.placement.device == "cuda" and not local_cluster().gpus:
            following += f" --gpus {asked_gpus(settings) or 8}"  # `plan` would look for them here
    say(f"next: {following}")
