"""Two consoles: stdout carries data, stderr everything else. Errors say what and why, then `hint:`."""

from __future__ import annotations

import json
import sys
import traceback
from functools import cache
from typing import Any

from rich.console import Console
from rich.text import Text

from asyncrl_cli.errors import AsyncrlError


@cache
def stdout() -> Console:
    return Console(highlight=False)


@cache
def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout, and nothing of the terminal in it."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def print_text(text: str) -> None:
    """Text on stdout as it is, so that it can be piped into a file."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def print_prose(text: str) -> None:
    """Sentences on stdout: a terminal breaks them between words, a pipe gets the lines as they are."""
    stdout().print(Text(text), soft_wrap=not stdout().is_terminal)


def say(text: str) -> None:
    stderr().print(Text(text), soft_wrap=True)


def warn(text: str) -> None:
    _labelled("warning", "bold yellow", text)


def say_error(message: str, hint: str = "") -> None:
    _labelled("error", "bold red", message)
    if hint:
        _labelled("hint", "bold cyan", hint)


def say_failure(error: BaseException, *, verbose: bool) -> int:
    """Report an error for people; with `verbose` its traceback first. Returns the exit code."""
    if verbose:
        stderr().print(Text("".join(traceback.format_exception(error)), style="dim"), soft_wrap=True)
    known = _known(error)
    if known is not None:
        say_error(known.message, known.hint)
        return known.exit_code
    say_error(f"{type(error).__name__}: {error}", "" if verbose else "this is a bug; `asyncrl -v ...` shows where")
    return 1


def _known(error: BaseException) -> AsyncrlError | None:
    """The error itself, or the first one that a TaskGroup wrapped."""
    if isinstance(error, AsyncrlError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := _known(inner))), None)
    return None


def _labelled(label: str, style: str, text: str) -> None:
    stderr().print(Text.assemble((f"{label}:", style), " ", text), soft_wrap=True)
