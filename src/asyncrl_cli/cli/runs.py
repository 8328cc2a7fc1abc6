"""The commands on runs: `asyncrl train`, `resume`, `status`, `logs` and `stop`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from asyncrl_cli.cli import completion
from asyncrl_cli.cli.console import (
    RUNS_DIR,
    AddressOption,
    JsonOption,
    ProfileOption,
    RunArgument,
    RunsDirOption,
    SetOption,
    UiOption,
    load_profile,
    print_json,
    print_text,
    run_to_its_end,
    say,
    stdout,
    warn,
)
from asyncrl_cli.errors import ConfigError, RefusedError
from asyncrl_cli.observe.terminal import uncoloured
from asyncrl_cli.safe_files import UnsafeFile, open_regular, reason

if TYPE_CHECKING:
    from asyncrl_cli.observe.status import RunStatus

POLL_S = 0.3
MAX_LINE_CHARACTERS = 2**20
TRAIN_EXAMPLES = """
  asyncrl train --profile partial-rollout
  asyncrl train --profile my.toml --set run.train_steps=50 --set rollout.n=4
  asyncrl train --profile one-step-off --name first --json > summary.json

Every key is also an environment variable:
ASYNCRL_RUN__SEED=3 is --set run.seed=3.
Ctrl-C once: finish the step, write a checkpoint, exit with 130; [bold]asyncrl resume[/] continues. Twice: end at once."""
RESUME_EXAMPLES = """
  asyncrl resume first                                   the newest checkpoint of run "first"
  asyncrl resume runs/first/checkpoints/step-000040      that one; later ones are set aside"""
STATUS_EXAMPLES = """
  asyncrl status                 all runs, the newest first, and what to do next
  asyncrl status first           one run in depth
  asyncrl status --watch         the newest run, until it ends
  asyncrl status --json | jq '.[] | select(.state == "failed") | .error'
  asyncrl status first --json | jq .progress"""
LOGS_EXAMPLES = """
  asyncrl logs first
  asyncrl logs first -f --role trainer     trainer-0, trainer-1, ... as they go on
  asyncrl logs first --attempt 1           before it was resumed"""
STOP_EXAMPLES = """
  asyncrl stop first     finish the train step, checkpoint, end
  asyncrl stop first     a second time: end at once"""


def train(
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
        from asyncrl_cli.job.preparing import check_without_making, expectation

        print_plan(loaded, gpus=None, as_json=as_json)
        task = check_without_making(settings, address)
        for note in task.notes:
            warn(note)
        if task.ceiling is not None:
            say(expectation(task))
        return
    if address is None:
        refuse_what_cannot_fit(settings)
    from asyncrl_cli.job.run import Run

    run = Run(settings, loaded.origins, loaded.warnings, runs_dir=runs_dir, name=settings.run.name, address=address, ui=ui)
    run_to_its_end(run, as_json=as_json)


def resume(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|RUN", help="A checkpoint's directory, or a run's name or directory.", autocompletion=completion.runs
        ),
    ],
    runs_dir: RunsDirOption = RUNS_DIR,
    ui: UiOption = "auto",
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a run from a checkpoint. Every group is trained exactly once."""
    from asyncrl_cli.job.run import Run

    run_to_its_end(Run.resume(target, runs_dir=runs_dir, ui=ui, address=address), as_json=as_json)


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run's name or directory; by default all runs, if there are several.",
            autocompletion=completion.runs,
        ),
    ] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Redraw every second until the run, by default the newest, ends.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the runs and what to do next, or how one run is doing: from any terminal, also after it has ended.

    With --json: an array with an entry per run, or the whole status of RUN."""
    from asyncrl_cli.observe.status import newest_status, read_status

    if run is None and not watch:
        _print_overview(runs_dir, as_json=as_json)
        return
    found, wrong = newest_status(runs_dir) if run is None else (read_status(run, runs_dir), [])
    for told in wrong:
        warn(f"{told}; an older run is shown")
    if as_json:
        print_json(found.to_json())
    elif watch:
        _watch(found, runs_dir)
    else:
        _print_in_depth(found)


def _print_overview(runs_dir: Path, *, as_json: bool) -> None:
    from asyncrl_cli.observe.overview import overview, table_of, to_json
    from asyncrl_cli.observe.status import read_status

    rows = overview(runs_dir)
    if as_json:
        print_json(to_json(rows))
    elif len(rows) == 1:
        _print_in_depth(read_status(rows[0].name, runs_dir))
    else:
        stdout().print(table_of(rows))


def _print_in_depth(found: RunStatus) -> None:
    from asyncrl_cli.observe.overview import last_error, next_command, state_of
    from asyncrl_cli.observe.screen import print_status

    state = state_of(found)
    error = last_error(found.directory, found.status) if state in ("killed", "failed") else ""
    print_status(found, stdout(), error=error, go_on=next_command(found.directory, state) if found.liveness == "ended" else "")


def _watch(found: RunStatus, runs_dir: Path) -> None:
    from asyncrl_cli.observe.screen import watch_status
    from asyncrl_cli.observe.status import read_status

    def read_again() -> RunStatus:
        if not found.directory.exists():
            why = f"run '{found.name}' ended while it started, and left nothing"
            raise RefusedError(why, hint="the command that started it said why")
        return read_status(str(found.directory), runs_dir)

    watch_status(read_again, stdout())


def logs(
    run: RunArgument,
    runs_dir: RunsDirOption = RUNS_DIR,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until the run ends.")] = False,
    role: Annotated[
        str | None, typer.Option("--role", metavar="R", help="Only these logs: driver, trainer, rollout-1, ...; by default all.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", min=1, help="Those of the Nth start (each resume is one more).")
    ] = None,
) -> None:
    """Print the logs of a run's newest attempt, or of an earlier one."""
    from asyncrl_cli.checkpoint.find import find_run
    from asyncrl_cli.checkpoint.run_directory import RunDirectory

    directory = find_run(run, runs_dir)
    attempts = RunDirectory(directory).attempts
    if attempt is not None and attempt > attempts:
        raise ConfigError(f"run '{directory.name}' has no attempt {attempt}", hint=f"attempts: 1 to {attempts}")
    if follow and attempt not in (None, attempts):
        raise ConfigError(f"attempt {attempt} has ended: there is nothing to follow", hint="leave out --follow, or --attempt")
    place = directory / "logs" / ("latest" if attempt is None else f"attempt-{attempt}")
    found = logs_of(place, role)
    if not found:
        known = ", ".join(path.stem for path in logs_of(place, None)) or "none yet"
        raise ConfigError(f"no log of role '{role}' in {place}" if role else f"no logs in {place}", hint=f"logs: {known}")
    if attempt is None and attempts > 1:
        say(f"attempt {attempts}; --attempt 1 to {attempts - 1} for the earlier ones")
    is_one = len(found) == 1 and (not follow or role == found[0].stem)
    lines = follow_lines(directory, lambda: logs_of(place, role), follow=follow, wait=lambda: time.sleep(POLL_S))
    for name, line in lines:
        print_text(uncoloured(line if is_one else f"{name:<10} | {line}"))


def logs_of(directory: Path, role: str | None) -> list[Path]:
    """The log files of a role: `trainer` means all its ranks, `trainer-0` one rank, None every role."""
    paths = sorted(directory.glob("*.log"))
    return [path for path in paths if role is None or path.stem == role or path.stem.rpartition("-")[0] == role]


def follow_lines(
    directory: Path, logs: Callable[[], Sequence[Path]], *, follow: bool, wait: Callable[[], None]
) -> Iterator[tuple[str, str]]:
    """Yield (log, line): all lines so far, file by file; then, with `follow`, new lines until no process holds the run. `logs` is
    called each time, because a run that is starting has only its driver's log."""
    from asyncrl_cli.checkpoint.find import is_locked

    with ExitStack() as stack:
        files: dict[str, TextIO] = {}
        while True:
            live = follow and is_locked(directory)
            for path in logs():
                if path.stem not in files:
                    files[path.stem] = stack.enter_context(_open(path))
            yield from ((name, line) for name, file in files.items() for line in _whole_lines(file, live))
            if not live:
                return
            wait()


def _open(path: Path) -> TextIO:
    try:
        return TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace")
    except (OSError, UnsafeFile) as error:
        raise RefusedError(f"{path} cannot be read: {reason(error)}", hint="--role names another log") from None


def _whole_lines(file: TextIO, live: bool) -> Iterator[str]:
    """Lines up to the end of the file. In a `live` file an unfinished last line is left for the next call."""
    while True:
        position = file.tell()
        line = file.readline(MAX_LINE_CHARACTERS)
        is_half = not line.endswith("\n") and len(line) < MAX_LINE_CHARACTERS
        if not line or (live and is_half):
            file.seek(position)
            return
        yield line.rstrip("\n")


def stop(run: RunArgument, runs_dir: RunsDirOption = RUNS_DIR) -> None:
    """Ask a run to finish its train step, write a checkpoint and end; asked twice, it ends at once."""
    from asyncrl_cli.checkpoint.run_directory import request_stop
    from asyncrl_cli.observe.status import read_status

    found = read_status(run, runs_dir)
    if found.liveness in ("ended", "dead"):
        raise RefusedError(f"run '{found.name}' is not running", hint=f"`asyncrl status {found.name}` says how it ended")
    if request_stop(found.directory) == 1:
        say(f"asked run '{found.name}' to finish its step, checkpoint and end; watch it with `asyncrl status {found.name} --watch`")
    else:
        say(f"asked run '{found.name}' to end at once")
