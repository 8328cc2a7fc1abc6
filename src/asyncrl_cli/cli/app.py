"""`asyncrl`: assembles the commands, and turns every error into a message and an exit code.

Exit codes: 0 done; 1 the run failed; 2 usage or configuration; 3 preflight; 4 refused; 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from asyncrl_cli import __version__
from asyncrl_cli.base.errors import AsyncrlError, ConfigError, Interrupted, PreflightError
from asyncrl_cli.base.paths import MAX_NAME_BYTES, MAX_PATH_BYTES, is_path
from asyncrl_cli.cli import bench, evidence, plan, records, runs, serve, shipped, submit, tune, watch
from asyncrl_cli.cli.console import (
    STDOUT,
    as_asyncrl_error,
    epilog,
    forget_document,
    open_streams,
    print_error,
    print_text,
)


class _Commands(TyperGroup):
    """As Typer's, but a Ctrl-C is an error that is shown: Typer would exit with 130 and say nothing."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _shown_interrupts():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _shown_interrupts():
            return super().invoke(ctx)


@contextmanager
def _shown_interrupts() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None


app = typer.Typer(
    name="asyncrl",
    cls=_Commands,
    help="Asynchronous RL for language models: turns a TOML profile into a Ray job and shows live who is "
    "idle, why, and how stale the data is.",
    epilog="Start with [bold]asyncrl train --profile partial-rollout[/]: "
    "it needs no GPU and takes a few minutes.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command, examples in (
    (runs.train, runs.TRAIN_EXAMPLES),
    (submit.submit, submit.EXAMPLES),
    (runs.resume, runs.RESUME_EXAMPLES),
    (watch.watch, watch.WATCH_EXAMPLES),
    (watch.status, watch.STATUS_EXAMPLES),
    (records.compare, records.COMPARE_EXAMPLES),
    (watch.stop, watch.STOP_EXAMPLES),
    (watch.logs, watch.LOGS_EXAMPLES),
    (records.samples, records.SAMPLES_EXAMPLES),
    (records.trace, records.TRACE_EXAMPLES),
    (records.export, records.EXPORT_EXAMPLES),
    (evidence.audit, evidence.AUDIT_EXAMPLES),
    (evidence.replay, evidence.REPLAY_EXAMPLES),
    (records.report, records.REPORT_EXAMPLES),
    (serve.serve, serve.EXAMPLES),
    (bench.bench, bench.EXAMPLES),
    (plan.plan, plan.PLAN_EXAMPLES),
    (tune.tune, tune.EXAMPLES),
    (plan.doctor, plan.DOCTOR_EXAMPLES),
    (shipped.init, shipped.INIT_EXAMPLES),
    (shipped.schema, shipped.SCHEMA_EXAMPLES),
):
    summary = " ".join((command.__doc__ or "").split()).partition(". ")[0].rstrip(".")
    app.command(epilog=epilog(examples), short_help=f"{summary}.")(command)
app.add_typer(shipped.profiles, name="profiles")


def _print_version(asked: bool) -> None:
    if asked:
        print_text(f"asyncrl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that come before the command. `_answer`, which catches errors, handles --verbose."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. Errors go to stderr and, with `--json`, also to stdout as
    JSON."""
    args = sys.argv[1:] if arguments is None else list(arguments)
    forget_document()
    code = 0
    try:
        code = _answer(args)
        sys.stdout.flush()  # here instead of at exit, so that a closed pipe can be handled
    except BrokenPipeError:  # the reader has exited (`| head`): not an error
        _lose_stdout()
    except OSError as error:
        _lose_stdout()
        if code == 0:
            why = f"stdout cannot be written: {error.strerror}"
            print_error(AsyncrlError(why, hint="check where it is redirected to"))
            return 1
    return code


def _answer(args: Sequence[str]) -> int:
    """Run the command, print its error if it fails, and return the exit code. Raises OSError only if stdout
    cannot be written."""
    try:
        _check(args)
        return app(args=list(args), prog_name="asyncrl", standalone_mode=False) or 0
    except SystemExit as ended:
        # On a closed pipe, Typer and rich exit with 1.
        raise ended.__context__ if isinstance(ended.__context__, BrokenPipeError) else ended from None
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) or (isinstance(error, OSError) and error.filename == STDOUT):
            raise
        if isinstance(error, TyperException) and not error.format_message():
            return error.exit_code  # `asyncrl` without a command: the help has been printed
        if isinstance(error, TyperException):
            # in our form of a message, and without pydantic's prefix
            message, context = error.format_message(), getattr(error, "ctx", None)
            message = message[:1].lower() + message[1:].rstrip(".").replace(": Value error, ", ": ")
            word = next((word for word in args if not word.startswith("-")), "")
            command = context.command_path if context is not None else f"asyncrl {word}".rstrip()
            shown: AsyncrlError = ConfigError(message, hint=f"`{command} --help` shows how it is used")
        else:
            shown = as_asyncrl_error(error, verbose=not {"--verbose", "-v"}.isdisjoint(args))
    print_error(shown, as_json="--json" in args)
    return shown.exit_code


def _check(args: Sequence[str]) -> None:
    """Raises ConfigError for arguments that no command can use, PreflightError if the working directory is
    gone."""
    try:
        os.getcwd()
    except OSError as error:
        why = f"the working directory no longer exists: {error.strerror}"
        raise PreflightError(why, hint="cd to one that does") from error
    for before, argument in zip(("", *args), args, strict=False):
        # only values of --set may be longer than any path
        if before != "--set" and not argument.startswith("--set=") and not is_path(argument):
            what = f"{argument[:40]}... is too long for a name or a path: it has {len(argument):,} characters"
            hint = f"a name has at most {MAX_NAME_BYTES} bytes, a path {MAX_PATH_BYTES:,}"
            raise ConfigError(what, hint=hint)
        # usually of a variable that is not set: as a path it would be this directory, and as a name any
        option, equals, value = argument.partition("=")
        is_option = argument.startswith("--")
        if argument == "" or (is_option and equals and not value):
            named = option or (before if before.startswith("-") else "")
            what = f"{named} has an empty value" if named else "an argument is empty"
            raise ConfigError(what, hint="give a value, or leave it out")


def _lose_stdout() -> None:
    """Redirect stdout to /dev/null: otherwise Python prints an error when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> NoReturn:
    open_streams()
    code = run()
    # the exit code is fixed by now: a late signal must not print a traceback
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if threading.active_count() > 1:
        # A thread is still working. Python would wait for it, or stop it midway, which makes torch abort.
        from asyncrl_cli.job.driver_process import leave

        sys.stderr.flush()
        leave(code)
    sys.exit(code)
