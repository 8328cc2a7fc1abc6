"""Commands for use before a first run: `asyncrl doctor` checks this machine, `init` copies a template."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from asyncrl_cli import __version__
from asyncrl_cli.base.errors import ConfigError, PreflightError, RefusedError
from asyncrl_cli.cli.console import json_text, print_json, print_table, print_text, say, stderr, warn
from asyncrl_cli.cli.options import (
    MOST_DEVICES,
    RUNS_DIR,
    JsonOption,
    RunsDirOption,
    SetOption,
    number_option,
    profile_option,
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


def template_names() -> list[str]:
    from asyncrl_cli.profile.toml_files import shipped_templates

    return list(shipped_templates())


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
        listed = ", ".join(broken)
        say(f"uninstalling {listed}: not usable with this torch, and not needed by vLLM")
        pip = [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet"]
        if subprocess.run([*pip, *broken], check=False).returncode:
            hint = f"remove them by hand: pip uninstall {' '.join(broken)}"
            raise PreflightError(f"pip could not uninstall {listed}", hint=hint)
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
        rows = []
        for one in findings:
            hint = f"  hint: {one.hint}" if one.hint and not one.ok else ""
            rows.append((one.what, marks[one.ok], one.found + hint))
        print_table((), rows)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(3)


def init(
    template: Annotated[
        str,
        typer.Argument(
            metavar="TEMPLATE",
            help="Name of the template: agent, grafana, gsm8k-8gpu, jsonl or parquet-verl; for a cluster: "
            "kuberay, ray-cluster, skypilot or slurm.",
            autocompletion=template_names,
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
