"""`asyncrl logs`: prints the logs of a run's processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, TextIO

import typer

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.cli.console import print_text, say
from asyncrl_cli.cli.options import RUNS_DIR, JobAddressOption, RunArgument, RunsDirOption, number_option
from asyncrl_cli.cli.submit import on_cluster
from asyncrl_cli.observe.terminal import uncoloured

POLL_S = 0.3
MAX_LINE_CHARACTERS = 2**20
EXAMPLES = """
  asyncrl logs first
  asyncrl logs first -f --role trainer     follow trainer-0, trainer-1, ...
  asyncrl logs first --attempt 1           from before it was resumed"""


def logs(
    run: RunArgument,
    runs_dir: RunsDirOption = RUNS_DIR,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the run ends.")
    ] = False,
    role: Annotated[
        str | None,
        typer.Option(
            "--role", metavar="R", help="Only these logs: driver, trainer, rollout-1, ... Default: all."
        ),
    ] = None,
    attempt: Annotated[
        int | None, number_option("--attempt", "Logs of the Nth attempt; each resume is a new attempt.")
    ] = None,
    address: JobAddressOption = None,
) -> None:
    """Print the logs of a run's newest attempt, or of an earlier one."""
    if address is not None:
        arguments = ["logs", run, *(["--follow"] if follow else [])]
        arguments += [] if role is None else ["--role", role]
        arguments += [] if attempt is None else ["--attempt", str(attempt)]
        return on_cluster(address, arguments, runs_dir)
    from asyncrl_cli.checkpoint.lookup import find_run
    from asyncrl_cli.checkpoint.run_directory import RunDirectory

    directory = find_run(run, runs_dir)
    attempts = RunDirectory(directory).attempts
    if attempt is not None and attempt > attempts:
        what = f"run '{directory.name}' has no attempt {attempt}"
        raise ConfigError(what, hint=f"attempts: 1 to {attempts}")
    if follow and attempt not in (None, attempts):
        what = f"attempt {attempt} has ended: there is nothing to follow"
        raise ConfigError(what, hint="leave out --follow or --attempt")
    place = directory / "logs" / ("latest" if attempt is None else f"attempt-{attempt}")
    found = logs_of(place, role)
    if not found:
        known = ", ".join(path.stem for path in logs_of(place, None)) or "none yet"
        what = f"no log of role '{role}' in {place}" if role else f"no logs in {place}"
        raise ConfigError(what, hint=f"logs: {known}")
    if attempt is None and attempts > 1:
        earlier = "1 shows the earlier one" if attempts == 2 else f"1 to {attempts - 1} show earlier ones"
        say(f"attempt {attempts}; --attempt {earlier}")
    is_one = len(found) == 1 and (not follow or role == found[0].stem)
    look, wait = partial(logs_of, place, role), partial(time.sleep, POLL_S)
    for name, line in follow_lines(directory, look, follow=follow, wait=wait):
        print_text(uncoloured(line if is_one else f"{name:<10} | {line}"))
        if follow:
            sys.stdout.flush()


def logs_of(directory: Path, role: str | None) -> list[Path]:
    """The log files of a role: `trainer` means all its ranks, `trainer-0` one rank, None every role."""
    names = {path: (path.stem, path.stem.rpartition("-")[0]) for path in sorted(directory.glob("*.log"))}
    return [path for path in names if role is None or role in names[path]]


def follow_lines(
    directory: Path, logs: Callable[[], Sequence[Path]], *, follow: bool, wait: Callable[[], None]
) -> Iterator[tuple[str, str]]:
    """Yield (log, line): all lines so far, file by file; then, with `follow`, new lines until no process
    holds the run. Call `logs` again each time, because a run that is still starting has only its driver's
    log."""
    from asyncrl_cli.checkpoint.lookup import is_locked

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
    from asyncrl_cli.base.safe_files import UnsafeFile, open_regular, reason

    try:
        return TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace")
    except (OSError, UnsafeFile) as error:
        why = f"{path} cannot be read: {reason(error)}"
        raise RefusedError(why, hint="--role names another log") from None


def _whole_lines(file: TextIO, live: bool) -> Iterator[str]:
    """Lines up to the end of the file. In a `live` file, leave an unfinished last line for the next call."""
    while True:
        position = file.tell()
        line = file.readline(MAX_LINE_CHARACTERS)
        is_half = not line.endswith("\n") and len(line) < MAX_LINE_CHARACTERS
        if not line or (live and is_half):
            file.seek(position)
            return
        yield line.rstrip("\n")
