"""`asyncrl plan`: what a profile comes to, before anything starts; with `--tune`, which settings would be faster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncrl_cli.cli.console import print_json, stdout, warn
from asyncrl_cli.cli.options import RUNS_DIR, JsonOption, RunsDirOption, SetOption, load_profile
from asyncrl_cli.errors import ConfigError, PreflightError

if TYPE_CHECKING:
    from asyncrl_cli.cli.plan_memory import MemoryReport
    from asyncrl_cli.plan.job_plan import JobPlan
    from asyncrl_cli.profile.arithmetic import Schedule
    from asyncrl_cli.profile.layers import Loaded
    from asyncrl_cli.profile.schema import Profile

EXAMPLES = """[bold]Examples[/]

  asyncrl plan --profile stale-samples

  asyncrl plan --profile partial-rollout --gpus 8 --gpu-memory 80

  asyncrl plan --tune verl-7b-math-128 --max-staleness 1 --out my.toml

  asyncrl plan --tune runs/NAME

[bold]--tune[/] searches split, K, eta and slots on a virtual clock, in a minute
or two, without a GPU: its output is simulated."""
GIB = 2**30


ProfileOrOwn = Annotated[
    str | None,
    typer.Option(
        "--profile",
        "-p",
        metavar="NAME|FILE",
        help="A profile by name (see [bold]asyncrl profiles[/]) or a TOML file; with --tune partial-rollout, or the run's own.",
    ),
]
GpusOption = Annotated[
    int | None, typer.Option("--gpus", metavar="N", min=0, help="Plan for a machine with N GPUs instead of this one.")
]
GpuMemoryOption = Annotated[
    float | None, typer.Option("--gpu-memory", metavar="GIB", min=0.1, help="Memory of one GPU, if not this machine's.")
]
TuneOption = Annotated[
    str | None,
    typer.Option("--tune", metavar="WORKLOAD|RUN", help="Search for faster settings of a workload, or of a run measured here."),
]
BoundOption = Annotated[
    int | None,
    typer.Option("--max-staleness", metavar="S", min=0, help="With --tune: the strict bound in versions; the profile's own."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="With --tune: write what is recommended as a profile; never overwrites."),
]


def command(
    profile: ProfileOrOwn = None,
    sets: SetOption = None,
    gpus: GpusOption = None,
    gpu_memory: GpuMemoryOption = None,
    tune: TuneOption = None,
    max_staleness: BoundOption = None,
    out: OutOption = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show mode, groups, windows, admission budget, staleness bound, placement and memory of a profile.

    Exit 3 if the GPUs are too few, or too small for the weights alone."""
    named = profile or "partial-rollout"
    if tune is not None:
        from asyncrl_cli.cli.plan_tune import Asked, print_tuned

        if gpu_memory is not None:
            raise ConfigError(
                "--gpu-memory does not belong to --tune: memory is not simulated",
                hint=f"asyncrl plan --profile {named} --gpu-memory {gpu_memory:g}",
            )
        given = tuple(sets or ())
        asked = Asked(reference=tune, profile=profile, sets=given, gpus=gpus, bound=max_staleness, runs_dir=runs_dir, out=out)
        return print_tuned(asked, as_json=as_json)
    if out is not None:
        raise _only_with_tune("--out writes what a search has found", f"asyncrl profiles show {named} > {out}")
    if profile is None:
        raise ConfigError("a plan needs --profile, or --tune", hint="asyncrl plan --profile partial-rollout")
    if max_staleness is not None:
        hint = f"--tune WORKLOAD, or --set async_training.max_staleness={max_staleness}"
        raise _only_with_tune("--max-staleness bounds a search", hint)
    print_plan(load_profile(profile, sets), gpus=gpus, gpu_memory_gib=gpu_memory, as_json=as_json)


def _only_with_tune(what: str, hint: str) -> ConfigError:
    return ConfigError(f"{what} and belongs to --tune", hint=hint)


def print_plan(loaded: Loaded, *, gpus: int | None, as_json: bool, gpu_memory_gib: float | None = None) -> None:
    """On stdout; for this machine, or another one with `gpus` GPUs of `gpu_memory_gib` each.

    Raises PreflightError for what cannot run there: before the plan where there is none, else after it is printed.
    """
    from asyncrl_cli.cli.plan_memory import memory_report, print_memory
    from asyncrl_cli.engines.registry import kind_of
    from asyncrl_cli.profile.arithmetic import Schedule

    profile = loaded.profile
    schedule = Schedule.of(profile)
    job = _planned(profile, gpus)
    kind_of(profile).check_arguments(profile, job.device)
    memory = memory_report(profile, job, _device_memory_bytes(job, gpus, gpu_memory_gib))
    missing = _missing_engine(profile, job) if gpus is None else []
    for warning in (*loaded.warnings, *job.warnings, *missing, *_unused(job, gpus, gpu_memory_gib), *memory.warnings):
        warn(warning)
    if as_json:
        print_json(_document(profile, schedule, job, memory))
    else:
        _print_tables(profile, schedule, job)
        print_memory(memory, job)
    if memory.refusal is not None:
        raise memory.refusal


def _planned(profile: Profile, gpus: int | None) -> JobPlan:
    """On this machine, or on one with `gpus` GPUs, whose cores nobody has counted: they are as many as the job computes with."""
    from dataclasses import replace

    from asyncrl_cli.plan.cluster import local_cluster
    from asyncrl_cli.plan.job_plan import compile_job

    here = local_cluster()
    if gpus is None:
        return compile_job(profile, here)
    there = replace(here.nodes[0], gpus=gpus)
    job = compile_job(profile, replace(here, nodes=(there,)))
    if job.device == "cpu":
        return job
    return compile_job(profile, replace(here, nodes=(replace(there, cpus=max(there.cpus, job.cpus)),)))


def _missing_engine(profile: Profile, job: JobPlan) -> list[str]:
    """A plan needs no engine; a run on this machine does."""
    from asyncrl_cli.engines.registry import kind_of

    try:
        kind_of(profile).check_here(job.device)
    except PreflightError as refusal:
        return [f"a run on this machine would be refused: {refusal.message} ({refusal.hint})"]
    return []


def _unused(job: JobPlan, gpus: int | None, gpu_memory_gib: float | None) -> list[str]:
    """Options that say nothing of a plan on CPUs."""
    if job.device != "cpu":
        return []
    given = {"--gpus": gpus or None, "--gpu-memory": gpu_memory_gib}
    return [f"{flag} {value:g} is not used: the job runs on CPUs" for flag, value in given.items() if value is not None]


def _device_memory_bytes(job: JobPlan, gpus: int | None, gpu_memory_gib: float | None) -> int | None:
    """What was said of the GPUs; else this machine's, unless the plan is for GPUs of another one."""
    from asyncrl_cli.plan.memory_fit import known_memory_bytes

    if job.device == "cuda" and gpu_memory_gib is not None:
        return int(gpu_memory_gib * GIB)
    if job.device == "cuda" and gpus is not None:
        return None
    return known_memory_bytes(job.device)


def _document(profile: Profile, schedule: Schedule, job: JobPlan, memory: MemoryReport) -> dict[str, Any]:
    from dataclasses import asdict

    from asyncrl_cli.cli.plan_memory import memory_document
    from asyncrl_cli.plan.job_plan import plan_rows

    of_job = {name: getattr(job, name) for name in ("device", "engine", "colocate", "gpus", "cpus")}
    return {
        "profile": profile.name,
        "schedule": asdict(schedule),
        "placement": {**of_job, "roles": plan_rows(job)},
        "memory": memory_document(memory),
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

    from asyncrl_cli.plan.job_plan import plan_rows

    table = Table("", title=f"{profile.name}: schedule", title_justify="left", box=None, pad_edge=False)
    table.add_column("value", justify="right")
    table.add_column("meaning")
    for cells in schedule_rows(schedule, profile.async_training.on_stale):
        table.add_row(*cells)
    rows = plan_rows(job)
    headers = (header.replace("_", " ") for header in rows[0])
    roles = Table(*headers, title=f"\nplacement: {job}", title_justify="left", box=None, pad_edge=False)
    for row in rows:
        roles.add_row(*(str(value) for value in row.values()))
    stdout().print(table)
    stdout().print(roles)
