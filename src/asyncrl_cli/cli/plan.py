"""`asyncrl plan`: shows what a profile means before anything starts; with `--tune`, searches for faster settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli import completion
from asyncrl_cli.cli.console import RUNS_DIR, JsonOption, RunsDirOption, SetOption, load_profile, profile_option, say
from asyncrl_cli.errors import ConfigError

EXAMPLES = """
  asyncrl plan --profile stale-samples
  asyncrl plan --profile partial-rollout --gpus 8 --gpu-memory 80
  asyncrl plan --profile my.toml --nodes 2 --gpus 8
  asyncrl plan --profile my.toml --address 10.0.0.1:6379
  asyncrl plan --set model.path=Qwen/Qwen3-0.6B --ask-hub
  asyncrl plan --tune verl-7b-math-128 --max-staleness 1 --out my.toml
  asyncrl plan --tune runs/NAME

[bold]--tune[/] searches split, K, eta and slots on a virtual clock, in a minute
or two, without a GPU: its output is simulated."""


def plan(
    profile: Annotated[
        str | None,
        profile_option(
            "A profile by name ([bold]asyncrl profiles[/]) or a TOML file. "
            "By default base, for a look at what --set does; with --tune partial-rollout, or the run's own."
        ),
    ] = None,
    sets: SetOption = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=0, help="Plan for a machine with N GPUs instead of this one.")
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, max=4096, help="Plan for N machines, each with so many --gpus.")
    ] = 1,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="RAY", help="Plan for a Ray cluster (HOST:PORT): what it has, what fits, and where."),
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", metavar="GIB", min=0.1, help="Memory of one GPU, if not this machine's.")
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            "--tune",
            metavar="WORKLOAD|RUN",
            help="Search for faster settings of a workload, or of a run measured here.",
            autocompletion=completion.workloads,
        ),
    ] = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(
            "--max-staleness", metavar="S", min=0, help="With --tune: the strict bound in versions; by default the profile's own."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="With --tune: write what is recommended as a profile; never overwrites."),
    ] = None,
    ask_hub: Annotated[
        bool, typer.Option("--ask-hub", help="Download the config.json of a model on the hub, for the estimate of its memory.")
    ] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show mode, groups, windows, admission budget, staleness bound, placement and memory of a profile.

    Exit 3 if the GPUs are too few, or too small for the weights alone."""
    named = profile or "partial-rollout"
    if address is not None and (gpus is not None or tune is not None or nodes > 1):
        other = "--tune" if tune is not None else "--gpus" if gpus is not None else "--nodes"
        raise ConfigError(f"{other} is for machines that are not there, and --address for those that are", hint="leave one out")
    if nodes > 1 and tune is not None:
        raise ConfigError("--tune takes no --nodes: it counts GPUs", hint="--gpus with those of all nodes")
    if nodes > 1 and gpus is None:
        raise ConfigError(f"--nodes {nodes}: of how many GPUs each?", hint="--gpus 8")
    if tune is not None:
        from asyncrl_cli.bench.tune import Asked
        from asyncrl_cli.cli.plan_tune import print_tuned

        if gpu_memory is not None:
            raise ConfigError(
                "--gpu-memory does not belong to --tune: memory is not simulated",
                hint=f"asyncrl plan --profile {named} --gpu-memory {gpu_memory:g}",
            )
        given = tuple(sets or ())
        asked = Asked(reference=tune, runs_dir=runs_dir, profile=profile, sets=given, gpus=gpus, bound=max_staleness)
        return print_tuned(asked, out, as_json=as_json)
    if out is not None:
        what = "--out writes what a search has found and belongs to --tune"
        raise ConfigError(what, hint=f"asyncrl profiles show {named} > {out}")
    if max_staleness is not None:
        hint = f"--tune WORKLOAD, or --set async_training.max_staleness={max_staleness}"
        raise ConfigError("--max-staleness bounds a search and belongs to --tune", hint=hint)
    from asyncrl_cli.cli.plan_report import print_plan

    if profile is None:
        say("no --profile: this is base")
    loaded = load_profile(profile or "base", sets)
    if ask_hub:
        from asyncrl_cli.models.resolve import fetch_config

        fetch_config(loaded.profile)
    print_plan(loaded, gpus=gpus, nodes=nodes, gpu_memory_gib=gpu_memory, address=address, as_json=as_json)
