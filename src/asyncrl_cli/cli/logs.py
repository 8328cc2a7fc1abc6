"""`asyncrl logs`: what driver, trainer and rollout workers wrote, of the newest attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, TextIO

import typer

from asyncrl_cli.cli.console import RUNS_DIR, RunsDirOption, print_text
from asyncrl_cli.errors import ConfigError, RefusedError
from asyncrl_cli.observe.terminal import uncoloured
from asyncrl_cli.safe_files import UnsafeFile, open_regular, reason

POLL_S = 0.3
MAX_LINE_CHARACTERS = 2**20
EXAMPLES = """
  asyncrl logs first
  asyncrl logs first -f --role trainer     trainer-0, trainer-1, ... as they go on"""


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or directory.")],
    runs_dir: RunsDirOption = RUNS_DIR,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until the run ends.")] = False,
    role: Annotated[
        str | None, typer.Option("--role", metavar="R", help="Only these logs: driver, trainer, rollout-1, ...; by default all.")
    ] = None,
) -> None:
    """Print the logs of a run's newest attempt."""
    from asyncrl_cli.checkpoint.find import find_run

    directory = find_run(run, runs_dir)
    logs = directory / "logs" / "latest"
    found = logs_of(logs, role)
    if not found:
        known = ", ".join(path.stem for path in logs_of(logs, None)) or "none yet"
        raise ConfigError(f"no log of role '{role}' in {logs}" if role else f"no logs in {logs}", hint=f"logs: {known}")
    is_one = len(found) == 1 and (not follow or role == found[0].stem)
    lines = follow_lines(directory, lambda: logs_of(logs, role), follow=follow, wait=lambda: time.sleep(POLL_S))
    for name, line in lines:
        print_text(uncoloured(line if is_one else f"{name:<10} | {line}"))


def logs_of(directory: Path, role: str | None) -> list[Path]:
    """The logs of a role: `trainer` is all of its ranks, `trainer-0` one; None is every role."""
    paths = sorted(directory.glob("*.log"))
    return [path for path in paths if role is None or path.stem == role or path.stem.rpartition("-")[0] == role]


def follow_lines(
    directory: Path, logs: Callable[[], Sequence[Path]], *, follow: bool, wait: Callable[[], None]
) -> Iterator[tuple[str, str]]:
    """(log, line): what is there, file by file; then, with `follow`, what comes, until nobody holds the run. `logs` is asked again
    each time: a run that starts has only its driver's."""
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
    """Lines up to the end of the file; while somebody writes, half a line is left for the next round."""
    while True:
        position = file.tell()
        line = file.readline(MAX_LINE_CHARACTERS)
        is_half = not line.endswith("\n") and len(line) < MAX_LINE_CHARACTERS
        if not line or (live and is_half):
            file.seek(position)
            return
        yield line.rstrip("\n")
