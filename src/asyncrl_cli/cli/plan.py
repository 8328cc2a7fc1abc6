"""`asyncrl plan`: shows what a profile means before anything starts; with `--tune`, searches for faster
settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.cli import completion
from asyncrl_cli.cli.console import (
    MOST_DEVICES,
    RUNS_DIR,
    JsonOption,
    RunsDirOption,
    SetOption,
    load_profile,
    number_option,
    profile_option,
    say,
)

EXAMPLES = """
  asyncrl plan --profile stale-samples
  asyncrl plan --profile partial-rollout --gpus 8 --gpu-memory 80
  asyncrl plan --profile my.toml --nodes 2 --gpus 8
  asyncrl plan --profile my.toml --address 10.0.0.1:6379
  asyncrl plan --set model.path=Qwen/Qwen3-0.6B --ask-hub
  asyncrl plan --tune verl-7b-math-128 --max-staleness 1 --out my.toml
  asyncrl plan --tune runs/NAME

[bold]--tune[/] searches split, K, eta and slots on a virtual clock. It takes a minute
or two and needs no GPU. Its output is simulated."""


def plan(
    profile: Annotated[
        str | None,
        profile_option(
            "A profile by name ([bold]asyncrl profiles[/]) or a TOML file. "
            "Default: base, to see the effect of --set; with --tune, partial-rollout or the run's own "
            "profile."
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
        typer.Option(
            "--address",
            metavar="RAY",
            help="Plan for a Ray cluster (HOST:PORT): show its nodes, what fits, and where.",
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        number_option(
            "--gpu-memory",
            "Memory of one GPU. Default: this machine's.",
            least=0.1,
            most=10**6,
            metavar="GIB",
        ),
    ] = None,
    node_memory: Annotated[
        float | None,
        number_option(
            "--node-memory",
            "Host memory of one machine. Default: this one's.",
            least=0.1,
            most=10**6,
            metavar="GIB",
        ),
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            "--tune",
            metavar="WORKLOAD|RUN",
            help="Search for faster settings for a workload, or for a recorded run.",
            autocompletion=completion.workloads,
        ),
    ] = None,
    max_staleness: Annotated[
        int | None,
        number_option(
            "--max-staleness",
            "With --tune: the strict bound in versions. Default: the profile's.",
            least=0,
            metavar="S",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="With --tune: write the recommended settings to a new profile."
        ),
    ] = None,
    ask_hub: Annotated[
        bool, typer.Option("--ask-hub", help="Download a hub model's config.json, to estimate its memory.")
    ] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show a profile's mode, groups, windows, admission budget, staleness bound, placement and memory.

    Exits with 3 if there are too few GPUs, or if the job does not fit their memory by the estimate."""
    named = profile or "partial-rollout"
    if address is not None and (gpus is not None or tune is not None or nodes > 1):
        other = "--tune" if tune is not None else "--gpus" if gpus is not None else "--nodes"
        raise ConfigError(
            f"{other} plans for hypothetical machines, --address for a real cluster", hint="leave one out"
        )
    if node_memory is not None and tune is None and gpus is None:
        raise ConfigError("--node-memory is that of hypothetical machines", hint="--gpus N, the GPUs of one")
    if nodes > 1 and tune is not None:
        raise ConfigError(
            "--tune takes no --nodes: it counts GPUs", hint="--gpus N, with the GPUs of all nodes"
        )
    if nodes > 1 and gpus is None:
        raise ConfigError(f"--nodes {nodes} needs the number of GPUs per node", hint="--gpus 8")
    if tune is not None:
        from asyncrl_cli.bench.recommendation import Asked
        from asyncrl_cli.cli.plan_tune import print_tuned

        for flag, gib in {"--gpu-memory": gpu_memory, "--node-memory": node_memory}.items():
            if gib is not None:
                hint = f"asyncrl plan --profile {named} {flag} {gib:g}"
                raise ConfigError(f"{flag} cannot be used with --tune: memory is not simulated", hint=hint)
        given = tuple(sets or ())
        asked = Asked(
            reference=tune, runs_dir=runs_dir, profile=profile, sets=given, gpus=gpus, bound=max_staleness
        )
        return print_tuned(asked, out, as_json=as_json)
    if out is not None:
        what = "--out writes the result of a search and needs --tune"
        raise ConfigError(what, hint=f"asyncrl profiles show {named} > {out}")
    if max_staleness is not None:
        hint = f"--tune WORKLOAD, or --set async_training.max_staleness={max_staleness}"
        raise ConfigError("--max-staleness limits a search and needs --tune", hint=hint)
    from asyncrl_cli.cli.plan_report import print_plan

    if profile is None:
        say("no --profile given: using base")
    loaded = load_profile(profile or "base", sets)
    if ask_hub:
        from asyncrl_cli.models.resolve import fetch_config

        fetch_config(loaded.profile)
    print_plan(
        loaded,
        gpus=gpus,
        nodes=nodes,
        gpu_memory_gib=gpu_memory,
        node_memory_gib=node_memory,
        address=address,
        as_json=as_json,
    )
