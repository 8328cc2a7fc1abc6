"""Commands for use before a first run: `asyncrl doctor` (checks this machine), `init` (copies a template) and
`profiles`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column
from rich.text import Text
from typer.core import TyperGroup

from asyncrl_cli import __version__
from asyncrl_cli.base.errors import ConfigError, PreflightError, RefusedError
from asyncrl_cli.cli import completion
from asyncrl_cli.cli.console import (
    MOST_DEVICES,
    RUNS_DIR,
    JsonOption,
    RunsDirOption,
    SetOption,
    epilog,
    json_text,
    load_profile,
    number_option,
    print_json,
    print_table,
    print_text,
    profile_option,
    say,
    stderr,
    warn,
)

CLUSTER_MARKS = {True: Text("ok", "green"), False: Text("refused", "red"), None: Text("warning", "yellow")}
MARKS = {True: Text("ok", "green"), False: Text("missing", "red"), None: Text()}
DOCTOR_EXAMPLES = """
  asyncrl doctor
  asyncrl doctor --json || echo something needed is missing
  asyncrl doctor --fix
  asyncrl doctor --address 10.0.0.1:6379 --runs-dir /shared/runs"""
INIT_EXAMPLES = """
  asyncrl init jsonl my-task          prompts in a file, your own reward function, a profile
  asyncrl init parquet-verl my-task   verl's data, and a reward in verl's signature
  asyncrl init agent my-agent         your own agent, with an OpenAI client and a tool
  asyncrl init gsm8k-8gpu gsm8k       Qwen2.5-1.5B on eight GPUs, and a rehearsal on two cores
  asyncrl init grafana dashboard      for logging.prometheus_port
  asyncrl init slurm launch --profile my.toml --shared /shared/my-task
  cd my-task && asyncrl train --profile profile.toml"""
PROFILES_EXAMPLES = """
  asyncrl profiles
  asyncrl profiles partial-rollout        a whole profile, with all defaults
  asyncrl profiles show partial-rollout --origin
  asyncrl profiles keys rollout           every key of a section, explained
  asyncrl profiles show base > my.toml    a profile that extends no other"""
SHOW_EXAMPLES = """
  asyncrl profiles show stale-samples --origin   where each value comes from
  asyncrl profiles show base --set run.seed=1 --json"""


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


def doctor(
    as_json: JsonOption = False,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix", help="Uninstall packages that came with vLLM but cannot be loaded with this torch."
        ),
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="RAY", help="Check the nodes of this Ray cluster (HOST:PORT) instead."
        ),
    ] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Check this machine: versions, cores, GPUs, Ray, engines. Exits with 3 if a requirement is missing.

    With --address: check that the nodes of a cluster have the same versions, see the runs directory, and
    reach each other."""
    from asyncrl_cli.engines.vllm import vllm_kind
    from asyncrl_cli.observe.startup import ProgressLine
    from asyncrl_cli.plan import machine

    if fix and (broken := vllm_kind.broken_packages()):
        _uninstall(broken)
        # A failed import leaves traces in this process, so check again in a fresh one.
        again = [sys.executable, "-m", "asyncrl_cli", "doctor", *(["--json"] if as_json else [])]
        raise typer.Exit(subprocess.run(again, check=False).returncode)
    with ProgressLine("auto", stderr()) as checking:
        if address is not None:
            from asyncrl_cli.job.driver_preflight import cluster_findings

            findings = cluster_findings(address, runs_dir, checking)
        else:
            findings = [machine.Finding("asyncrl", __version__), *machine.examine(checking)]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        marks = MARKS if address is None else CLUSTER_MARKS
        rows = (
            (one.what, marks[one.ok], one.found + (f"  hint: {one.hint}" if one.hint and not one.ok else ""))
            for one in findings
        )
        print_table((), rows)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(3)


def _uninstall(packages: list[str]) -> None:
    listed = ", ".join(packages)
    say(f"uninstalling {listed}: not usable with this torch, and not needed by vLLM")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", *packages], check=False
    )
    if done.returncode:
        raise PreflightError(
            f"pip could not uninstall {listed}",
            hint=f"remove them by hand: pip uninstall {' '.join(packages)}",
        )


def init(
    template: Annotated[
        str,
        typer.Argument(
            metavar="TEMPLATE",
            help="Name of the template: agent, grafana, gsm8k-8gpu, jsonl or parquet-verl; for a cluster: "
            "kuberay, ray-cluster, "
            "skypilot or slurm.",
            autocompletion=completion.templates,
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write, new or empty.")],
    profile: Annotated[
        str | None, profile_option("For a cluster: the profile to train, as for `asyncrl train`.")
    ] = None,
    sets: SetOption = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="N", help="For a cluster: name of the run. Default: the profile's."),
    ] = None,
    shared: Annotated[
        Path | None,
        typer.Option(
            "--shared",
            metavar="DIR",
            help="For a cluster: directory shared by all nodes, for the runs. Default: the current one.",
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
        typer.Option(
            "--image", metavar="IMAGE", help="For kuberay and skypilot: container image with asyncrl."
        ),
    ] = None,
) -> None:
    """Copy a template: for your own task, ready to train; for a dashboard; or for a job on a cluster."""
    import shutil

    from asyncrl_cli.cli.launchers import Launch, rendered
    from asyncrl_cli.profile.validation import profile_schema

    source = _find(template)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RefusedError(
            f"{directory} exists and is not empty", hint="name a new directory: nothing is overwritten"
        )
    launch = Launch(
        profile=profile,
        image=image,
        set=sets,
        name=name,
        shared=shared,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
    )
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
    gpus = _missing_gpus(directory / "profile.toml") if is_task else ""
    say(
        f"next: cd {directory} && asyncrl plan --profile profile.toml{gpus}"
        if is_task
        else f"next: {directory / 'README.md'}"
    )


def _missing_gpus(profile: Path) -> str:
    """The option that `asyncrl plan` needs for the profile on a machine without GPUs; empty if it needs
    none."""
    from asyncrl_cli.plan.cluster import local_cluster
    from asyncrl_cli.plan.compiler import asked_gpus
    from asyncrl_cli.profile.loaded import load

    settings = load(str(profile), environ={}).profile
    needs = settings.placement.device == "cuda" and not local_cluster().gpus
    return f" --gpus {asked_gpus(settings) or 8}" if needs else ""


def _find(template: str) -> Path:
    from asyncrl_cli.profile.toml_files import shipped_templates

    known = shipped_templates()
    if template not in known:
        raise ConfigError(f"there is no template '{template}'", hint=f"templates: {', '.join(known)}")
    return known[template]


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
            autocompletion=completion.sections,
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
            metavar="NAME|FILE",
            help="A profile by name, or a TOML file.",
            autocompletion=completion.profiles,
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
