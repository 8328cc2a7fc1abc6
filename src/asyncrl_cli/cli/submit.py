"""`asyncrl submit`: starts a run as a job of a Ray cluster. Also runs other commands on the cluster, where
the run's files are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.base.errors import AsyncrlError, ConfigError, Interrupted, RefusedError
from asyncrl_cli.cli.console import load_profile, print_json, print_text, say, stdout, warn
from asyncrl_cli.cli.options import RUNS_DIR, JsonOption, NameOption, ProfileOption, SetOption, text_option

if TYPE_CHECKING:
    from asyncrl_cli.job.submit.job_server import Job, JobServer
    from asyncrl_cli.observe.run_status import RunStatus

ShowStatus = Callable[["RunStatus | str"], None]
"""Shows a run's status, or a text that says why there is none yet."""
Pause = Callable[[float], object]
"""Waits for so many seconds, or less if the user leaves the screen."""
WATCHED_S = 5.0
"""How long a command in the background is watched: anything missing there (an engine, a file, a module) is
found by then."""
EXAMPLES = """
  asyncrl submit --address http://head:8265 -p my.toml --runs-dir /shared/runs
  asyncrl submit --address http://head:8265 -p my.toml --wait
  asyncrl submit --address http://head:8265 -p my.toml --dry-run

Then, from anywhere, with the same [bold]--address[/]:
asyncrl watch RUN, status RUN, logs RUN -f, stop RUN, resume RUN."""


def submit(
    profile: ProfileOption,
    address: Annotated[
        str,
        typer.Option(
            "--address",
            metavar="URL",
            envvar="RAY_API_SERVER_ADDRESS",
            help="Job server of the cluster: http://HEAD:8265.",
        ),
    ],
    sets: SetOption = None,
    name: NameOption = None,
    runs_dir: Annotated[
        Path,
        text_option(
            "--runs-dir", "DIR", "Directory that holds all runs: a path on the cluster, shared by all nodes."
        ),
    ] = RUNS_DIR,
    wait: Annotated[
        bool, typer.Option("--wait", help="Print the driver's output until it ends, and exit with its code.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job as JSON, but submit nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train on a Ray cluster, as a job that needs neither this terminal nor this machine.

    Uploads the profile as resolved here, the modules that it names, and the files of run.ship."""
    from asyncrl_cli.base.paths import check_name
    from asyncrl_cli.checkpoint.run_directory import fresh_name
    from asyncrl_cli.job.driver_prompt_checks import check_further_here
    from asyncrl_cli.job.submit.cargo import PROFILE, cargo_of
    from asyncrl_cli.job.submit.job_server import Job, JobServer

    loaded = load_profile(profile, sets, name)
    run = loaded.profile.run.name or fresh_name(loaded.profile.name, runs_dir)
    check_name(run)
    cargo = cargo_of(loaded, Path.cwd())
    check_further_here(loaded.profile, is_elsewhere=True)
    warn(*loaded.warnings, *cargo.notes)
    arguments = ["train", "--profile", PROFILE, "--name", run]
    job = Job(arguments=arguments, run=run, runs_dir=runs_dir.absolute(), cargo=cargo)
    if dry_run:
        print_json(job.to_json())
    else:
        send(JobServer(address), job, wait=wait, as_json=as_json)


def send(server: JobServer, job: Job, *, wait: bool = False, as_json: bool = False) -> None:
    """Submit the job and print the next commands. Raises the job's error if it fails within the first
    seconds."""
    from asyncrl_cli.job.submit.job_server import FAILED

    server.check_version()
    server.submit(job)
    if as_json:
        print_json({"run": job.run, "job": job.id, "runs_dir": str(job.runs_dir), "address": server.address})
    found = server.started(job.id, 0.0 if wait else WATCHED_S)
    if found.status == "PENDING":
        say(f"the job waits: {found.message}")
    elif found.status == FAILED and not wait:
        code = server.follow(job.id, say, warn)
        why, hint = f"the job of run '{job.run}' has failed (exit {code})", f"`ray job logs {job.id}`"
        failed = AsyncrlError(why, hint=f"on the cluster, {hint}")
        failed.exit_code = code
        raise failed
    say(f"run '{job.run}' is job {job.id} at {server.address}; its files: {job.runs_dir / job.run}")
    say_next(job.run, f" --address {server.address}")
    if wait:
        try:
            raise typer.Exit(server.follow(job.id, say, warn))
        except KeyboardInterrupt:
            left = f"run '{job.run}' continues; `asyncrl stop {job.run} --address {server.address}` ends it"
            raise Interrupted(left) from None


def say_next(run: str, where: str) -> None:
    say(f"  asyncrl watch {run}{where}    its live screen")
    say(f"  asyncrl logs {run}{where}    its processes' logs")
    say(f"  asyncrl stop {run}{where}    write a checkpoint and end")


def print_jobs(address: str, *, as_json: bool) -> None:
    """`asyncrl status --address URL`: the runs that were submitted there, the newest first."""
    from asyncrl_cli.job.submit.job_server import RUN_KEY, RUNS_DIR_KEY, JobServer

    jobs = JobServer(address).runs()
    rows = []
    for job in jobs:
        state = "done" if job.status == "SUCCEEDED" else str(job.status).lower()
        if job.driver_exit_code == Interrupted.exit_code:  # Ray calls a driver that stopped its run "failed"
            state = "stopped"
        run, directory = job.metadata[RUN_KEY], job.metadata[RUNS_DIR_KEY]
        rows.append({"run": run, "state": state, "job": job.submission_id, "runs_dir": directory})
    if as_json:
        print_json(rows)
    for row in () if as_json else rows:
        print_text("{run:<32} {state:<10} {job}  {runs_dir}".format(**row))
    if not rows:
        say(f"no run was submitted to {address}")


def set_words(sets: Sequence[str] | None) -> list[str]:
    return [word for text in sets or () for word in ("--set", text)]


def status_follower(
    address: str, run: str | None, runs_dir: Path
) -> tuple[str, Callable[[ShowStatus, Pause], None]]:
    """The name of a run on the cluster (default: the newest run), and a function that shows its status: a job
    on the cluster prints it once a second."""
    from asyncrl_cli.job.submit.job_server import TIMED_OUT, JobServer
    from asyncrl_cli.observe.run_status import RunStatus

    server = JobServer(address)
    name, place = server.find(run, runs_dir)

    def follow(show: ShowStatus, pause: Pause) -> None:
        errors: list[str] = []

        def write(line: str) -> None:
            if line.startswith('{"'):  # a whole status; an error takes several lines
                show(RunStatus.from_json(place / name, line))
                pause(0.0)
            else:
                errors.append(line)

        show(f"asking {address} for run '{name}'")
        while (code := server.call(["watch", name, "--json", "--runs-dir", str(place)], write)) == TIMED_OUT:
            errors.clear()
        if code:
            why = next((line.removeprefix("error: ") for line in errors if line.startswith("error: ")), "")
            what = f"run '{name}' at {address} can no longer be followed (exit {code}): {why}"
            raise RefusedError(what, hint=f"asyncrl logs {name} --address {address}")

    return name, follow


def on_cluster(address: str, arguments: Sequence[str], runs_dir: Path) -> None:
    """Run a command for run `arguments[1]` on the cluster, where its files are. Print its output as it
    arrives and exit with its code. For a run that ended before it had files, print the output of its job."""
    from asyncrl_cli.job.submit.job_server import FAILED, RUN_KEY, TIMED_OUT, JobServer

    server = JobServer(address)
    run, place = server.find(arguments[1], runs_dir)
    code = server.call([*arguments, "--runs-dir", str(place)], print_text, columns=stdout().width)
    if code == TIMED_OUT:
        say("the time limit for following on the cluster was reached: call it again to continue")
    if code == ConfigError.exit_code:  # there is no run of that name
        newest = next((job for job in server.runs() if job.metadata[RUN_KEY] == run), None)
        if newest is not None and newest.status == FAILED:  # it may also have been stopped
            say(f"its job {newest.submission_id} said:")
            server.follow(newest.submission_id, say, warn)
    raise typer.Exit(code)
