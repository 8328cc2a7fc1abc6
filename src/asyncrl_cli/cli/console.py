"""What commands share: two consoles (stdout carries data, stderr everything else), errors in our words, and common options.

Errors say what and why, then `hint:`.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from asyncrl_cli.errors import AsyncrlError, ConfigError, Interrupted
from asyncrl_cli.observe.terminal import SafeConsole, neutral
from asyncrl_cli.storage import storage_error, system_error

if TYPE_CHECKING:
    from asyncrl_cli.job.run import Run
    from asyncrl_cli.profile.loaded import Loaded

STDOUT = "stdout"
Ui = Literal["auto", "live", "plain", "none"]
ProfileOption = Annotated[
    str,
    typer.Option("--profile", "-p", metavar="NAME|FILE", help="Name of a profile (see [bold]asyncrl profiles[/]), or a TOML file."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; the value is TOML or else a string. May be repeated."),
]
RunsDirOption = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="Directory that holds all runs.")]
UiOption = Annotated[Ui, typer.Option("--ui", help="What to show; auto: live tables on a terminal, plain lines elsewhere.")]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", metavar="RAY", help="HOST:PORT of a Ray cluster; by default Ray is started here for the run."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
RUNS_DIR = Path("runs")


class _Stream(io.FileIO):
    """Stdout's write errors are marked, to be told from those of other files. Stderr's (a closed terminal, a full disk behind
    `2> file`) are ignored: there is nobody left to tell."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() == 2:
                return len(data)
            error.filename = STDOUT
            raise


def open_streams() -> None:
    """For the whole process: characters that an encoding lacks are written as escapes, and no file of ours or of our children gets
    the number of a stream that was closed."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(free, True)
    os.close(free)
    sys.stdout, sys.stderr = _opened(1), _opened(2)


def _opened(number: int) -> io.TextIOWrapper:
    raw = _Stream(number, "w", closefd=False)
    encoding = getattr(sys.stdout or sys.stderr, "encoding", None) or "utf-8"
    by_lines = raw.isatty() or number == 2
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=by_lines)


def stdout() -> Console:
    """As wide as the terminal is now."""
    return SafeConsole()


def stderr() -> Console:
    return SafeConsole(stderr=True)


_has_document = False


def begin() -> None:
    """A command line begins: nothing is on stdout yet."""
    global _has_document
    _has_document = False


def print_json(value: Any) -> None:
    """One JSON document on stdout, and nothing of the terminal in it."""
    global _has_document
    _has_document = True
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def print_json_error(error: AsyncrlError) -> None:
    """For whoever asked for JSON and would get nothing; a failed run's summary, or a refused plan, is a document already."""
    if not _has_document:
        print_json({"error": error.message, "hint": error.hint, "exit_code": error.exit_code})


def print_text(text: str) -> None:
    """Text on stdout, its lines as they are, so that it can be piped into a file."""
    sys.stdout.write(neutral(text if text.endswith("\n") else text + "\n"))


def print_prose(text: str) -> None:
    """Sentences on stdout: a terminal breaks them between words, a pipe gets the lines as they are."""
    console = stdout()
    console.print(Text(text), soft_wrap=not console.is_terminal)


def say(text: str) -> None:
    stderr().print(Text(text), soft_wrap=True)


def warn(text: str) -> None:
    _labelled("warning", "bold yellow", text)


def tell(error: AsyncrlError) -> None:
    """What went wrong and what to do; an end that somebody asked for is no error."""
    if isinstance(error, Interrupted):
        say(error.message)
    else:
        _labelled("error", "bold red", error.message)
    if error.hint:
        _labelled("hint", "bold cyan", error.hint)


def in_our_words(error: BaseException, *, verbose: bool) -> AsyncrlError:
    """The error itself, or the first one that a TaskGroup wrapped; what the system or the locale refused; else a bug of ours. With
    `verbose` its traceback is printed first."""
    if verbose:
        stderr().print(Text("".join(traceback.format_exception(error)), style="dim"), soft_wrap=True)
    hint = "" if verbose else "this is a bug; `asyncrl -v ...` shows where"
    return _known(error) or AsyncrlError(f"{type(error).__name__}: {error}", hint=hint)


def _known(error: BaseException) -> AsyncrlError | None:
    if isinstance(error, AsyncrlError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    if (refusal := system_error(error)) is not None:
        return storage_error(refusal)
    if isinstance(error, UnicodeEncodeError):
        return ConfigError(
            f"{error.object[error.start : error.end]!r} cannot be written in {error.encoding}: {error.reason}",
            hint="give it in UTF-8, in a UTF-8 locale: LANG=C.UTF-8, or PYTHONUTF8=1",
        )
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := _known(inner))), None)
    return None


def _labelled(label: str, style: str, text: str) -> None:
    stderr().print(Text.assemble((f"{label}:", style), " ", text), soft_wrap=True)


def epilog(examples: str) -> str:
    """The end of a command's help. An indented line is an example: typer would join it with its neighbours."""
    return "[bold]Examples[/]" + examples.replace("\n  ", "\n\n  ")


def load_profile(reference: str, sets: list[str] | None, name: str | None = None) -> Loaded:
    """Load a profile, with the options of a command line as its top layers. Showing its warnings is left to the caller."""
    from asyncrl_cli.profile.loaded import load

    return load(reference, sets or [], {} if name is None else {"run.name": name})


def run_to_its_end(run: Run, *, as_json: bool) -> None:
    """Run it, print its summary on stdout if JSON was asked for, and raise what it failed with.

    The run keeps handling signals until the process ends: a late one must not end it in another way.
    """
    import asyncio

    from asyncrl_cli.job.process import collect_garbage_seldom
    from asyncrl_cli.job.run import NEVER_BEGAN

    collect_garbage_seldom()
    run.requests.take_signals()
    try:
        result = asyncio.run(run.run())
    except KeyboardInterrupt:  # typer would leave with 130, without a word
        raise Interrupted(NEVER_BEGAN) from None
    if as_json:
        with suppress(OSError) if result.error is not None else nullcontext():
            print_json(result.summary)
    if result.error is not None:
        raise result.error
    raise typer.Exit(result.exit_code)
