"""`asyncrl plan`: shows what a profile means before anything starts; with `--tune`, searches for faster settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.console import RUNS_DIR, JsonOption, RunsDirOption, SetOption, load_profile
from asyncrl_cli.errors import ConfigError

EXAMPLES = """
  asyncrl plan --profile stale-samples
  asyncrl plan --profile partial-rollout --gpus 8 --gpu-memory 80
  asyncrl plan --tune verl-7b-math-128 --max-staleness 1 --out my.toml
  asyncrl plan --tune runs/NAME

[bold]--tune[/] searches split, K, eta and slots on a virtual clock, in a minute
or two, without a GPU: its output is simulated."""


def plan(
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            "-p",
            metavar="NAME|FILE",
            help="A profile by name ([bold]asyncrl profiles[/]) or a TOML file. "
            "With --tune by default partial-rollout, or the run's own.",
        ),
    ] = None,
    sets: SetOption = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=0, help="Plan for a machine with N GPUs instead of this one.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", metavar="GIB", min=0.1, help="Memory of one GPU, if not this machine's.")
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option("--tune", metavar="WORKLOAD|RUN", help="Search for faster settings of a workload, or of a run measured here."),
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
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show mode, groups, windows, admission budget, staleness bound, placement and memory of a profile.

    Exit 3 if the GPUs are too few, or too small for the weights alone."""
    named = profile or "partial-rollout"
    if tune is not None:
        from asyncrl_cli.bench.tune import Asked
        from asyncrl_cli.cli.plan_tune import print_tuned

        if gpu_memory is not None:
            raise ConfigError(
                "--gpu-memory does not belong to --tune: memory is not simulated",
                hint=f"asyncrl plan --profile {named} --gpu-memory {gpu_memory:g}",
            )
        given = tuple(sets or ())
        asked = Asked(reference=tune, profile=profile, sets=given, gpus=gpus, bound=max_staleness, runs_dir=runs_dir, out=out)
        return print_tuned(asked, as_json=as_json)
    if out is not None:
        what = "--out writes what a search has found and belongs to --tune"
        raise ConfigError(what, hint=f"asyncrl profiles show {named} > {out}")
    if profile is None:
        raise ConfigError("a plan needs --profile, or --tune", hint="asyncrl plan --profile partial-rollout")
    if max_staleness is not None:
        hint = f"--tune WORKLOAD, or --set async_training.max_staleness={max_staleness}"
        raise ConfigError("--max-staleness bounds a search and belongs to --tune", hint=hint)
    from asyncrl_cli.cli.plan_report import print_plan

    print_plan(load_profile(profile, sets), gpus=gpus, gpu_memory_gib=gpu_memory, as_json=as_json)
