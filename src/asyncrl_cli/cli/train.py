"""`asyncrl train`: a profile becomes a run."""

from __future__ import annotations

from typing import Annotated

import typer

from asyncrl_cli.cli.console import (
    RUNS_DIR,
    AddressOption,
    JsonOption,
    ProfileOption,
    RunsDirOption,
    SetOption,
    UiOption,
    load_profile,
    run_to_its_end,
    warn,
)

EXAMPLES = """
  asyncrl train --profile partial-rollout
  asyncrl train --profile my.toml --set run.train_steps=50 --set rollout.n=4
  asyncrl train --profile one-step-off --name first --json > summary.json

Every key is also an environment variable:
ASYNCRL_RUN__SEED=3 is --set run.seed=3.
Ctrl-C once: finish the step, write a checkpoint, exit with 130; [bold]asyncrl resume[/] continues. Twice: end at once."""


def command(
    profile: ProfileOption,
    sets: SetOption = None,
    name: Annotated[str | None, typer.Option("--name", metavar="N", help="Name of the run; by default profile and time.")] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    ui: UiOption = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the profile and print the plan; start nothing.")] = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model by asynchronous RL, as described by a profile."""
    from asyncrl_cli.checkpoint.run_directory import check_free
    from asyncrl_cli.cli.plan_report import print_plan
    from asyncrl_cli.plan.memory_fit import refuse_what_cannot_fit

    loaded = load_profile(profile, sets, name)
    settings = loaded.profile
    if settings.run.name is not None:
        check_free(runs_dir, settings.run.name)
    if dry_run:
        from asyncrl_cli.job.preparing import check_without_making

        print_plan(loaded, gpus=None, as_json=as_json)
        for note in check_without_making(settings, address).notes:
            warn(note)
        return
    if address is None:
        refuse_what_cannot_fit(settings)
    from asyncrl_cli.job.run import Run

    run = Run(settings, loaded.origins, loaded.warnings, runs_dir=runs_dir, name=settings.run.name, address=address, ui=ui)
    run_to_its_end(run, as_json=as_json)
