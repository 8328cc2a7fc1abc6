"""`asyncrl plan`: what a profile comes to, before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncrl_cli.cli.console import print_json, stdout, warn
from asyncrl_cli.cli.options import JsonOption, ProfileOption, SetOption, load_profile

if TYPE_CHECKING:
    from asyncrl_cli.job.plan import JobPlan
    from asyncrl_cli.profile.arithmetic import Schedule
    from asyncrl_cli.profile.layers import Loaded
    from asyncrl_cli.profile.schema import Profile

EXAMPLES = """[bold]Examples[/]

  asyncrl plan --profile stale-samples

  asyncrl plan --profile partial-rollout --set async_training.staleness_threshold=1 --gpus 8"""


def command(
    profile: ProfileOption,
    sets: SetOption = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=0, help="Plan for a machine with N GPUs instead of this one."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show mode, groups, windows, admission budget, staleness bound and placement of a profile."""
    print_plan(load_profile(profile, sets), gpus=gpus, as_json=as_json)


def print_plan(loaded: Loaded, *, gpus: int | None, as_json: bool) -> None:
    """On stdout; for this machine, or one like it with `gpus` GPUs."""
    from dataclasses import replace

    from asyncrl_cli.job.cluster import local_cluster
    from asyncrl_cli.job.plan import compile_job
    from asyncrl_cli.profile.arithmetic import Schedule

    profile = loaded.profile
    schedule = Schedule.of(profile)
    cluster = local_cluster()
    if gpus is not None:
        cluster = replace(cluster, nodes=(replace(cluster.nodes[0], gpus=gpus),))
    job = compile_job(profile, cluster)
    for warning in (*loaded.warnings, *job.warnings):
        warn(warning)
    if as_json:
        print_json(_document(profile, schedule, job))
    else:
        _print_tables(profile, schedule, job)


def _document(profile: Profile, schedule: Schedule, job: JobPlan) -> dict[str, Any]:
    from dataclasses import asdict

    from asyncrl_cli.job.plan import plan_rows

    return {
        "profile": profile.name,
        "schedule": asdict(schedule),
        "placement": {
            "device": job.device,
            "colocate": job.colocate,
            "gpus": job.gpus,
            "cpus": job.cpus,
            "roles": plan_rows(job),
        },
    }


def schedule_rows(schedule: Schedule, on_stale: str) -> list[tuple[str, str, str]]:
    """(name, value, meaning), in the words of the documentation."""
    strict = "strict: no token trained is older" if on_stale == "wait" else f'not strict: on_stale = "{on_stale}"'
    last = schedule.last_window_groups
    shorter = "" if last == schedule.window_groups else f", the last window has {last} groups"
    return [
        ("mode", schedule.mode, "follows from colocate, K, eta and partial_rollout"),
        ("B", str(schedule.mini_batch_groups), "groups per optimizer step"),
        ("R", str(schedule.step_groups), "groups per train step"),
        ("K", str(schedule.window_steps), "train steps per weight sync"),
        ("W", str(schedule.window_groups), "groups per window, that is between two weight syncs"),
        ("eta", str(schedule.eta), "share of a window admitted ahead"),
        ("budget", str(schedule.budget_groups), "groups admitted per window: floor((1 + eta) * W)"),
        ("staleness bound", str(schedule.max_staleness), f"versions; {strict}"),
        ("train steps", str(schedule.train_steps), f"{schedule.optimizer_steps} optimizer steps"),
        ("groups", str(schedule.groups), "trained by the whole run"),
        ("syncs", str(schedule.syncs), f"weight syncs, one at the end of each window{shorter}"),
    ]


def _print_tables(profile: Profile, schedule: Schedule, job: JobPlan) -> None:
    from rich.table import Table

    from asyncrl_cli.job.plan import plan_rows

    table = Table(title=f"{profile.name}: schedule", title_justify="left", box=None, pad_edge=False)
    for header, justify in (("", "left"), ("value", "right"), ("meaning", "left")):
        table.add_column(header, justify=justify)  # type: ignore[arg-type]
    for cells in schedule_rows(schedule, profile.async_training.on_stale):
        table.add_row(*cells)
    roles = Table(title=f"\nplacement: {job}", title_justify="left", box=None, pad_edge=False)
    rows = plan_rows(job)
    for header in rows[0]:
        roles.add_column(header.replace("_", " "))
    for row in rows:
        roles.add_row(*(str(value) for value in row.values()))
    stdout().print(table)
    stdout().print(roles)
