"""The commands that look before anything starts: `asyncrl plan` shows what a profile means, and whether it
fits; `asyncrl doctor` checks a machine or a cluster."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from asyncrl_cli import __version__
from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.cli.console import load_profile, print_json, print_table, say, stderr
from asyncrl_cli.cli.options import (
    MOST_DEVICES,
    RUNS_DIR,
    JsonOption,
    RunsDirOption,
    SetOption,
    memory_option,
    number_option,
    profile_option,
    text_option,
)

PLAN_EXAMPLES = """
  asyncrl plan --profile stale-samples
  asyncrl plan --profile partial-rollout --gpus 8 --gpu-memory 80
  asyncrl plan --profile my.toml --nodes 2 --gpus 8
  asyncrl plan --profile my.toml --address 10.0.0.1:6379
  asyncrl plan --set model.path=Qwen/Qwen3-0.6B --ask-hub"""
DOCTOR_EXAMPLES = """
  asyncrl doctor
  asyncrl doctor --json || echo something needed is missing
  asyncrl doctor --fix
  asyncrl doctor --address 10.0.0.1:6379 --runs-dir /shared/runs"""
CLUSTER_MARKS = {True: Text("ok", "green"), False: Text("refused", "red"), None: Text("warning", "yellow")}
MARKS = {True: Text("ok", "green"), False: Text("missing", "red"), None: Text()}


def plan(
    profile: Annotated[
        str | None,
        profile_option(
            "A profile by name ([bold]asyncrl profiles[/]) or a TOML file. "
            "Default: base, to see the effect of --set."
        ),
    ] = None,
    sets: SetOption = None,
    gpus: Annotated[
        int | None,
        number_option(
            "--gpus", "Plan for a machine with N GPUs instead of this one.", least=0, most=MOST_DEVICES
        ),
    ] = None,
    nodes: Annotated[
        int, number_option("--nodes", "Plan for N machines with --gpus GPUs each.", most=MOST_DEVICES)
    ] = 1,
    address: Annotated[
        str | None,
        text_option(
            "--address", "RAY", "Plan for a Ray cluster (HOST:PORT): show its nodes, what fits, and where."
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        memory_option("--gpu-memory", "Memory of one GPU. Default: this machine's."),
    ] = None,
    node_memory: Annotated[
        float | None,
        memory_option("--node-memory", "Host memory of one machine. Default: this one's."),
    ] = None,
    ask_hub: Annotated[
        bool, typer.Option("--ask-hub", help="Download a hub model's config.json, to estimate its memory.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a profile's mode, groups, windows, admission budget, staleness bound, placement and memory.

    Exits as `train` would: with 2 for a wrong setting, task or reward; with 3 for a missing model, too few
    GPUs, or if the job does not fit their memory by the estimate."""
    if address is not None and (gpus is not None or nodes > 1):
        other = "--gpus" if gpus is not None else "--nodes"
        what = f"{other} plans for hypothetical machines, --address for a real cluster"
        raise ConfigError(what, hint="leave one out")
    if node_memory is not None and gpus is None:
        raise ConfigError("--node-memory is that of hypothetical machines", hint="--gpus N, the GPUs of one")
    if nodes > 1 and gpus is None:
        raise ConfigError(f"--nodes {nodes} needs the number of GPUs per node", hint="--gpus 8")
    from asyncrl_cli.cli.plan_report import print_plan

    if profile is None:
        say("no --profile given: using base")
    loaded = load_profile(profile or "base", sets)
    if ask_hub:
        from asyncrl_cli.models.model_directory import from_hub, is_on_hub

        # a few kB, all that the plan needs to know a model's sizes
        if is_on_hub(path := loaded.profile.model.path):
            from_hub(path, ["config.json"], trust_remote_code=False)
    print_plan(
        loaded,
        gpus=gpus,
        nodes=nodes,
        gpu_memory_gib=gpu_memory,
        node_memory_gib=node_memory,
        address=address,
        as_json=as_json,
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
        text_option("--address", "RAY", "Check the nodes of this Ray cluster (HOST:PORT) instead."),
    ] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Check this machine: versions, cores, GPUs, Ray, engines. Exits with 3 if a requirement is missing.

    With --address: check that the nodes of a cluster have the same versions, see the runs directory, and
    reach each other."""
    from asyncrl_cli.engines.vllm import vllm_kind
    from asyncrl_cli.observe.screen import ProgressLine
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
