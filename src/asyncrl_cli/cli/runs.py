"""The commands that drive a run, in the foreground or detached: `asyncrl train` and `resume`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from asyncrl_cli.base.errors import ConfigError, first_names
from asyncrl_cli.base.paths import as_typed, where_runs_are
from asyncrl_cli.cli.console import load_profile, print_json, run_to_its_end, say, warn
from asyncrl_cli.cli.options import (
    RUNS_DIR,
    AddressOption,
    DetachOption,
    JsonOption,
    NameOption,
    ProfileOption,
    RunsDirOption,
    SetOption,
    UiOption,
    run_argument,
)
from asyncrl_cli.cli.submit import WATCHED_S, say_next, send, set_words

if TYPE_CHECKING:
    from asyncrl_cli.job.driver_run import Run
    from asyncrl_cli.profile.loaded import Loaded

TRAIN_EXAMPLES = """
  asyncrl train --profile partial-rollout
  asyncrl train --profile my.toml --set run.train_steps=50 --set rollout.n=4
  asyncrl train --profile one-step-off --name first --json > summary.json
  asyncrl train --profile my.toml --detach                   runs on when the terminal closes
  asyncrl train --profile my.toml --name x --resume auto     starts or resumes run x

Every key is also an environment variable:
ASYNCRL_RUN__SEED=3 is --set run.seed=3.
Ctrl-C once: finish the step, write a checkpoint, exit with 130; [bold]asyncrl resume[/]
continues. Twice: end at once."""
RESUME_EXAMPLES = """
  asyncrl resume first                                   from the newest checkpoint of run "first"
  asyncrl resume first/step-000040                       from this one; later checkpoints are set aside
  asyncrl resume first --set run.train_steps=200         makes a run longer, even if it is done
  asyncrl resume first --set trainer.lr=1e-6             with another learning rate
  asyncrl resume first --set rollout.workers=2 --set placement.trainer_workers=1"""


def train(
    profile: ProfileOption,
    sets: SetOption = None,
    name: NameOption = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    ui: UiOption = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the profile and print the plan, but start nothing.")
    ] = False,
    address: AddressOption = None,
    detach: DetachOption = False,
    go_on: Annotated[
        Literal["never", "auto"],
        typer.Option(
            "--resume",
            help="auto: if a run with this name has begun, resume it. For jobs that may be requeued.",
        ),
    ] = "never",
    as_json: JsonOption = False,
) -> None:
    """Train a model with asynchronous RL, as a profile describes."""
    from asyncrl_cli.checkpoint.run_directory import check_free, fresh_name
    from asyncrl_cli.cli.plan_report import print_plan
    from asyncrl_cli.plan.remedies import refuse_what_cannot_fit

    loaded = load_profile(profile, sets, name)
    settings = loaded.profile
    is_run_here = not (dry_run or detach)
    has_begun = go_on == "auto" and _has_begun(settings.run.name, runs_dir, is_cleared=is_run_here)
    if settings.run.name is not None and not has_begun:
        check_free(runs_dir, settings.run.name)
    if dry_run:
        from asyncrl_cli.job.driver_preparation import check_prompts, check_surroundings, expectation
        from asyncrl_cli.models.model_directory import model_here
        from asyncrl_cli.plan.cluster import local_cluster
        from asyncrl_cli.plan.compiler import device_of
        from asyncrl_cli.plan.job_plan import for_device
        from asyncrl_cli.tasks.task import load_task

        print_plan(loaded, gpus=None, as_json=as_json)
        device = device_of(settings, local_cluster())
        settings = for_device(loaded, device, is_here=address is None).profile
        # what a run would refuse, as far as no model has to be made or downloaded for that
        check_surroundings(settings, address)
        task = load_task(settings)
        task = check_prompts(settings, task, model_here(settings))
        warn(*task.notes)
        if task.ceiling is not None:
            say(expectation(task))
        return
    if address is None and not has_begun:
        refuse_what_cannot_fit(loaded)
    if detach:
        named = settings.run.name or fresh_name(settings.name, runs_dir)
        arguments = ["train", "--profile", profile, *set_words(sets), "--name", named, "--resume", go_on]
        return _detach(arguments, named, runs_dir, address, as_json=as_json)
    run = _run_of(loaded, runs_dir, ui, address, is_resumed=has_begun)
    if has_begun:
        _refuse_what_cannot_resume(run)
    run_to_its_end(run, as_json=as_json)


def _has_begun(name: str | None, runs_dir: Path, *, is_cleared: bool) -> bool:
    """Whether there is a run of this name to resume. Exits with 0 if that run is done. `is_cleared`: a run
    that was killed before its first checkpoint cannot be resumed, and gives its name free again."""
    from asyncrl_cli.checkpoint.lookup import last_status
    from asyncrl_cli.checkpoint.run_directory import clear_lost, never_began

    if name is None:
        raise ConfigError("--resume auto needs the run's name", hint="--name NAME, the same each time")
    run_dir = runs_dir / name
    if last_status(run_dir).get("phase") == "done":
        longer = f"`asyncrl resume {as_typed(run_dir)} --set run.train_steps=N` makes it longer"
        say(f"run '{name}' is done: nothing is left to train; {longer}")
        raise typer.Exit
    if not run_dir.exists() or never_began(run_dir):
        return False
    if is_cleared and (logs := clear_lost(run_dir)) is not None:
        killed = f"run '{name}' was killed before its first checkpoint and starts anew"
        warn(f"{killed}; its old logs are in {logs}")
        return False
    return True


def _run_of(loaded: Loaded, runs_dir: Path, ui: str, address: str | None, *, is_resumed: bool) -> Run:
    """A new run, or the run of this name from its newest checkpoint, with a warning if its settings differ
    from `loaded`."""
    from asyncrl_cli.job.driver_run import Run
    from asyncrl_cli.profile.keys import entries_of
    from asyncrl_cli.profile.loaded import is_default

    profile = loaded.profile
    if not is_resumed:
        name, facts = profile.run.name, (profile, loaded.origins, loaded.warnings)
        return Run(*facts, runs_dir=runs_dir, name=name, address=address, ui=ui)
    run = Run.resume(str(profile.run.name), runs_dir=runs_dir, ui=ui, address=address)
    recorded = entries_of(run.profile)
    defaults = [{key for key in one if is_default(one[key])} for one in (run.origins, loaded.origins)]
    compared = entries_of(profile).keys() - {"run.name"} - (defaults[0] & defaults[1])
    given = {key: value for key, value in entries_of(profile).items() if key in compared}
    others = [key for key, value in given.items() if recorded.get(key) != value]
    say(f"run '{profile.run.name}' resumes from step {run.checkpoint.step if run.checkpoint else 0}")
    if others:
        warn(f"the run keeps its own settings, which differ from this command's: {first_names(others)}")
    return run


def _detach(
    arguments: Sequence[str], name: str, runs_dir: Path, address: str | None, *, as_json: bool
) -> None:
    """Start the command in a session of its own, which outlives the terminal. Returns after `WATCHED_S`,
    or at a Ctrl-C, which the command does not get; exits with its code if it has ended by then."""
    from asyncrl_cli.base.storage import make_in, remove_if_empty
    from asyncrl_cli.checkpoint.lookup import detached_output

    output = detached_output(runs_dir / name)
    where = ["--runs-dir", str(runs_dir), "--ui", "none", "--address", address or "local"]
    command = [sys.executable, "-m", "asyncrl_cli", *arguments, *where]
    opened, made_runs_dir = make_in(output.parent, lambda: output.open("w+b"))
    with opened as file:
        child = Popen(command, stdin=DEVNULL, stdout=file, stderr=file, start_new_session=True)
        with suppress(TimeoutExpired, KeyboardInterrupt):
            exit_code = child.wait(WATCHED_S)
            file.seek(0)
            say(file.read().decode(errors="replace").rstrip())
            output.unlink(missing_ok=True)
            if made_runs_dir:
                remove_if_empty(output.parent)
            raise typer.Exit(exit_code)
    if as_json:
        print_json({"run": name, "pid": child.pid, "directory": str((runs_dir / name).absolute())})
    say(f"run '{name}' runs in the background (pid {child.pid}); if it does not start, {output} says why")
    say_next(name, where_runs_are(runs_dir))


def resume(
    target: Annotated[
        str,
        run_argument(
            "CHECKPOINT|RUN", "A run's name or directory, RUN/step-000040, or a checkpoint's directory."
        ),
    ],
    sets: SetOption = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    ui: UiOption = "auto",
    address: AddressOption = None,
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a run from a checkpoint. Every group is trained exactly once.

    --set may change where and how the run computes (numbers of workers, placement, engine, timeouts), but
    nothing that the checkpoint depends on. With the address of a job server (http://HEAD:8265), the run
    resumes as a job there."""
    from asyncrl_cli.checkpoint.lookup import resolve
    from asyncrl_cli.job.driver_run import Run
    from asyncrl_cli.job.ray.session import is_job_server

    if address is not None and is_job_server(address):
        from asyncrl_cli.job.submit.job_server import Job, JobServer

        server = JobServer(address)
        name, place = server.find(target, runs_dir)
        job = Job(arguments=["resume", name, *set_words(sets)], run=name, runs_dir=place)
        return send(server, job, as_json=as_json)
    if detach:
        run = resolve(target, runs_dir).resolve().parent.parent
        return _detach(["resume", target, *set_words(sets)], run.name, run.parent, address, as_json=as_json)
    resumed = Run.resume(target, runs_dir=runs_dir, sets=sets or (), ui=ui, address=address)
    _refuse_what_cannot_resume(resumed)
    run_to_its_end(resumed, as_json=as_json)


def _refuse_what_cannot_resume(run: Run) -> None:
    """Raises PreflightError if the run, with its recorded settings, does not fit this machine."""
    from asyncrl_cli.plan.remedies import refuse_what_cannot_fit
    from asyncrl_cli.profile.loaded import Loaded

    if run.address is None:
        refuse_what_cannot_fit(Loaded(profile=run.profile, origins=run.origins), is_resumed=True)
