"""`asyncrl plan`: shows what a profile means before anything starts."""

from __future__ import annotations

from typing import Annotated

import typer

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.cli.console import load_profile, say
from asyncrl_cli.cli.options import MOST_DEVICES, JsonOption, SetOption, number_option, profile_option

EXAMPLES = """
  asyncrl plan --profile stale-samples
  asyncrl plan --profile partial-rollout --gpus 8 --gpu-memory 80
  asyncrl plan --profile my.toml --nodes 2 --gpus 8
  asyncrl plan --profile my.toml --address 10.0.0.1:6379
  asyncrl plan --set model.path=Qwen/Qwen3-0.6B --ask-hub"""


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
    ask_hub: Annotated[
        bool, typer.Option("--ask-hub", help="Download a hub model's config.json, to estimate its memory.")
    ] = False,
    as_json: JsonOption = False,
    search: Annotated[
        str | None, typer.Option("--tune", "--max-staleness", "--out", metavar="X", hidden=True)
    ] = None,
) -> None:
    """Show a profile's mode, groups, windows, admission budget, staleness bound, placement and memory.

    Exits with 3 if there are too few GPUs, or if the job does not fit their memory by the estimate."""
    if search is not None:
        moved = "the search for faster settings is a command of its own"
        raise ConfigError(f"--tune, --max-staleness and --out: {moved}", hint="asyncrl tune WORKLOAD|RUN")
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
