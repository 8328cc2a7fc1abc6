"""`asyncrl logs`: what driver, trainer and rollout workers wrote, of the newest attempt."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, TextIO

import typer

from asyncrl_cli.cli.console import print_text
from asyncrl_cli.cli.options import RUNS_DIR, RunsDirOption
from asyncrl_cli.errors import ConfigError, RefusedError

POLL_S = 0.3
MAX_LINE_CHARACTERS = 2**20
EXAMPLES = """[bold]Examples[/]

  asyncrl logs first

  asyncrl logs first -f --role trainer     trainer-0, trainer-1, ... as they go on"""


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or directory.")],
    runs_dir: RunsDirOption = RUNS_DIR,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    role: Annotated[
        str | None, typer.Option("--role", metavar="R", help="driver, trainer, rollout-1, ...; all if not given.")
    ] = None,
) -> None:
    """Print the logs of a run's newest attempt."""
    from asyncrl_cli.observe.terminal import uncoloured

    directory = run_directory(run, runs_dir)
    logs = directory / "logs" / "latest"
    paths = select(logs, role)
    is_one = len(paths) == 1 and (not follow or role == paths[0].stem)
    more = partial(logs_of, logs, role)
    for name, line in follow_lines(directory, paths, follow=follow, wait=lambda: time.sleep(POLL_S), more=more):
        print_text(uncoloured(line if is_one else f"{name:<10} | {line}"))


def run_directory(run: str, runs_dir: Path) -> Path:
    """A run's directory by name or path, also of one that has no status yet."""
    from asyncrl_cli.checkpoint.find import run_names

    for candidate in (runs_dir / run, Path(run)):
        if os.path.isdir(candidate / "logs" / "latest"):
            return candidate
    known = ", ".join(run_names(runs_dir)[:8])
    raise ConfigError(f"no run '{run}' with logs in {runs_dir}", hint=f"known runs: {known}" if known else "there are none")


def logs_of(directory: Path, role: str | None) -> list[Path]:
    """The logs of a role: `trainer` is all of its ranks, `trainer-0` one; None is every role."""
    paths = sorted(directory.glob("*.log"))
    return [path for path in paths if role is None or path.stem == role or path.stem.rpartition("-")[0] == role]


def select(directory: Path, role: str | None) -> list[Path]:
    """Like `logs_of`. ConfigError if there are none."""
    chosen = logs_of(directory, role)
    if not chosen:
        known = ", ".join(path.stem for path in logs_of(directory, None)) or "none yet"
        raise ConfigError(f"no log of role '{role}' in {directory}" if role else f"no logs in {directory}", hint=f"logs: {known}")
    return chosen


def follow_lines(
    directory: Path,
    paths: Sequence[Path],
    *,
    follow: bool,
    wait: Callable[[], None],
    more: Callable[[], Sequence[Path]] = lambda: (),
) -> Iterator[tuple[str, str]]:
    """(log, line): what is there, file by file; then, with `follow`, what comes, until nobody holds the run. `more` names logs that
    have come since: a run that starts has only its driver's."""
    from asyncrl_cli.checkpoint.lock import is_locked

    with ExitStack() as stack:
        files: dict[str, TextIO] = {}
        while True:
            live = follow and is_locked(directory)
            for path in (*paths, *more()):
                if path.stem not in files:
                    files[path.stem] = stack.enter_context(_open(path))
            for name, file in files.items():
                yield from ((name, line) for line in _whole_lines(file, live))
            if not live:
                return
            wait()


def _open(path: Path) -> TextIO:
    from asyncrl_cli.safe_files import UnsafeFile, open_regular, reason

    try:
        return TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace")
    except (OSError, UnsafeFile) as error:
        raise RefusedError(f"{path} cannot be read: {reason(error)}", hint="--role names another log") from None


def _whole_lines(file: TextIO, live: bool) -> Iterator[str]:
    """Lines up to the end of the file; while somebody writes, half a line is left for the next round."""
    while True:
        position = file.tell()
        line = file.readline(MAX_LINE_CHARACTERS)
        is_half = not line.endswith("\n") and len(line) < MAX_LINE_CHARACTERS
        if not line or (live and is_half):
            file.seek(position)
            return
        yield line.rstrip("\n")
