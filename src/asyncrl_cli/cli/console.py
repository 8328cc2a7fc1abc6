"""Shared by all commands: two consoles (stdout for data, stderr for everything else), and error messages.

An error message says what is wrong and why; then `hint:` says what to do.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import typer
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from asyncrl_cli.base.errors import AsyncrlError, ConfigError, Interrupted, PreflightError
from asyncrl_cli.observe.terminal import SafeConsole, neutral

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from asyncrl_cli.job.driver_run import Run
    from asyncrl_cli.profile.loaded import Loaded

STDOUT = "stdout"


class _Stream(io.FileIO):
    """A raw stdout or stderr. Write errors of stdout get the filename `STDOUT`, to distinguish them from
    errors of other files. Write errors of stderr (a closed terminal, a full disk behind `2> file`) are
    ignored: they could not be shown anywhere."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() == 2:
                return memoryview(data).nbytes
            error.filename = STDOUT
            raise


def open_streams() -> None:
    """Replace stdout and stderr with streams that escape characters missing from the encoding. Also open
    /dev/null for closed standard streams, so that no file opened here or in a child process gets their
    descriptors."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(free, True)
    os.close(free)
    sys.stdout, sys.stderr = _opened(1), _opened(2)


def _opened(number: int) -> io.TextIOWrapper:
    raw = _Stream(number, "w", closefd=False)
    encoding = getattr(sys.stdout or sys.stderr, "encoding", None) or "utf-8"
    by_lines = raw.isatty() or number == 2
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=by_lines
    )


def stdout() -> Console:
    """A console on stdout, as wide as the terminal is now."""
    return SafeConsole()


def stderr() -> Console:
    return SafeConsole(stderr=True)


_has_document = False


def forget_document() -> None:
    """Called before each command line, which has not printed a JSON document yet."""
    global _has_document
    _has_document = False


def print_json(value: object) -> None:
    """Print one JSON document on stdout, without colours or line wrapping."""
    global _has_document
    _has_document = True
    sys.stdout.write(json_text(value))


def json_text(value: object) -> str:
    import json

    return json.dumps(value, indent=2, default=str) + "\n"


def print_text(text: str) -> None:
    """Print text on stdout without wrapping its lines, so that it can be piped into a file."""
    sys.stdout.write(neutral(text if text.endswith("\n") else text + "\n"))


def print_prose(text: str) -> None:
    """Print sentences on stdout: wrapped between words on a terminal, unwrapped in a pipe."""
    console = stdout()
    console.print(Text(text), soft_wrap=not console.is_terminal)


def print_table(
    columns: Sequence[str | Column], rows: Iterable[Iterable[RenderableType]], title: str | None = None
) -> None:
    """Print a table without borders on stdout; without columns it has no header."""
    table = Table(
        *columns, title=title, title_justify="left", box=None, pad_edge=False, show_header=bool(columns)
    )
    for cells in rows:
        table.add_row(*cells)
    stdout().print(table)


def figures_table(headings: Sequence[str], *, texts: int = 1, gap: int = 2) -> Table:
    """A table without borders, whose first `texts` columns are text and the others figures."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < texts else "right", no_wrap=True)
    return table


def print_whole(table: Table) -> None:
    """Print a table on stdout at its natural width. Where the terminal is narrower, and in a pipe, no column
    is dropped and no cell is cut."""
    console = stdout()
    unlimited = console.options.update(max_width=1_000)
    console.width = max(console.width, console.measure(table, options=unlimited).maximum)
    console.print(table, crop=False)


def say(text: str) -> None:
    stderr().print(Text(text), soft_wrap=True)


def warn(*texts: str) -> None:
    for text in texts:
        _labelled("warning", "bold yellow", text)


def print_error(error: AsyncrlError, *, as_json: bool = False) -> None:
    """Print the error and its hint on stderr. An interruption is not labelled as an error. With `as_json`
    also on stdout, unless a document has been printed there (a failed run's summary, a refused plan)."""
    with suppress(OSError):  # what stdout has so far comes first where both go to the same file
        sys.stdout.flush()
    if isinstance(error, Interrupted):
        say(error.message)
    else:
        _labelled("error", "bold red", error.message)
    for hint in error.hint.splitlines():
        _labelled("hint", "bold cyan", hint)
    if as_json and not _has_document:
        with suppress(OSError):  # stdout cannot be written: only the exit code is left
            print_json({"error": error.message, "hint": error.hint, "exit_code": error.exit_code})


def as_asyncrl_error(error: BaseException, *, verbose: bool) -> AsyncrlError:
    """Turn any exception into an AsyncrlError. An exception is reported as a bug unless it is one of ours
    (perhaps inside a TaskGroup's group), an OSError or an encoding error. With `verbose` the traceback is
    printed first."""
    if verbose:
        stderr().print(Text("".join(traceback.format_exception(error)), style="dim"), soft_wrap=True)
    if (known := _known(error)) is not None:
        return known
    from asyncrl_cli.engines.vllm.vllm_kind import STRAY_PACKAGES, broken_packages

    text = f"{type(error).__name__}: {error}"
    for name in STRAY_PACKAGES:
        # transformers imports such a package whenever it is installed, though it was built for another torch
        if name in text and name in broken_packages():
            fix = f"asyncrl doctor --fix removes {name}, which does not fit this torch"
            return PreflightError(text, hint=fix)
    return AsyncrlError(text, hint="" if verbose else "this is a bug; `asyncrl -v ...` shows where")


def _known(error: BaseException) -> AsyncrlError | None:
    from asyncrl_cli.base.storage import storage_error, system_error

    if isinstance(error, AsyncrlError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    if (refusal := system_error(error)) is not None:
        return storage_error(refusal)
    if isinstance(error, UnicodeEncodeError):
        text = f"{error.object[error.start : error.end]!r}"
        why = f"{text} cannot be written in {error.encoding}: {error.reason}"
        return ConfigError(why, hint="use a UTF-8 locale: LANG=C.UTF-8, or PYTHONUTF8=1")
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := _known(inner))), None)
    return None


def _labelled(label: str, style: str, text: str) -> None:
    stderr().print(Text.assemble((f"{label}:", style), " ", text), soft_wrap=True)


def epilog(examples: str) -> str:
    """The end of a command's help. Indented lines are examples; blank lines between them keep typer from
    joining them."""
    return "[bold]Examples[/]" + examples.replace("\n  ", "\n\n  ")


def load_profile(reference: str, sets: list[str] | None, name: str | None = None) -> Loaded:
    """Load a profile, with the command line's options as its top layers. The caller shows the warnings."""
    from asyncrl_cli.profile.loaded import load

    return load(reference, sets or [], {} if name is None else {"run.name": name})


def run_to_its_end(run: Run, *, as_json: bool) -> None:
    """Run `run`, print its summary on stdout if `as_json`, and raise its error or `typer.Exit` with its exit
    code.

    The run handles signals until the process ends, so that a late signal cannot end the process in another
    way.
    """
    import asyncio

    from asyncrl_cli.job.driver_process import collect_garbage_seldom
    from asyncrl_cli.job.driver_run import NEVER_BEGAN
    from asyncrl_cli.observe.run_status import next_command

    collect_garbage_seldom()
    run.requests.take_signals()
    try:
        result = asyncio.run(run.run())
    except KeyboardInterrupt:  # typer would exit with 130 and no message
        raise Interrupted(NEVER_BEGAN) from None
    if as_json:
        with suppress(OSError) if result.error is not None else nullcontext():
            print_json(result.summary)
    if result.error is not None:
        raise result.error
    if run.ui != "none":
        say(f"next: {next_command(result.run_dir, 'done')}")
    raise typer.Exit(result.exit_code)
