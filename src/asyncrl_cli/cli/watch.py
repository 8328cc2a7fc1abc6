"""The commands that look at a run from outside, or end it: `asyncrl status`, `watch` and `stop`."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.paths import as_typed, where_runs_are
from asyncrl_cli.cli.console import print_json, say, stdout
from asyncrl_cli.cli.options import (
    RUNS_DIR,
    JobAddressOption,
    JsonOption,
    RunArgument,
    RunsDirOption,
    run_argument,
)
from asyncrl_cli.cli.submit import Take, Wait, followed_there, on_cluster, print_jobs

if TYPE_CHECKING:
    from asyncrl_cli.observe.run_status import RunStatus

LOOK_EVERY_S = 1.0
STATUS_EXAMPLES = """
  asyncrl status                 all runs, newest first, and what to do next
  asyncrl status first           one run in detail
  asyncrl status --json | jq '.[] | select(.state == "failed") | .error'
  asyncrl status first --json | jq .progress"""
WATCH_EXAMPLES = """
  asyncrl watch                                      the newest run
  asyncrl watch first
  asyncrl watch first --address http://head:8265     a submitted run"""
STOP_EXAMPLES = """
  asyncrl stop first     finish the train step, write a checkpoint, end
  asyncrl stop first     a second time: end at once"""


def status(
    run: Annotated[
        str | None, run_argument("[RUN]", "A run's name or directory. Default: all runs, or the only one.")
    ] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    address: JobAddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all runs and what to do next, or how one run is doing. Works from any terminal, also after the run
    has ended.

    With --json: an array with one entry per run, or the whole status of RUN."""
    if address is not None:
        if run is None:
            return print_jobs(address, as_json=as_json)
        return on_cluster(address, ["status", run, *(["--json"] if as_json else [])], runs_dir)
    if run is None:
        return _print_overview(runs_dir, as_json=as_json)
    from asyncrl_cli.observe.run_status import read_status

    found = read_status(run, runs_dir)
    if as_json:
        print_json(found.to_json())
    else:
        _print_in_depth(found)


def _print_overview(runs_dir: Path, *, as_json: bool) -> None:
    from asyncrl_cli.observe.overview import overview, table_of
    from asyncrl_cli.observe.run_status import read_status

    rows = overview(runs_dir)
    if as_json:
        print_json([asdict(row) for row in rows])
    elif len(rows) == 1:
        _print_in_depth(read_status(rows[0].name, runs_dir))
    else:
        stdout().print(table_of(rows))


def _print_in_depth(found: RunStatus) -> None:
    from asyncrl_cli.observe.screen import print_status

    error = found.last_error if found.state in ("killed", "failed") else ""
    following = found.next_command if found.liveness == "ended" else ""
    print_status(found, stdout(), error=error, go_on=following)


def watch(
    run: Annotated[
        str | None, run_argument("[RUN]", "A run's name or directory. Default: the newest run.")
    ] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    address: JobAddressOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole status once a second, as one line of JSON.")
    ] = False,
) -> None:
    """Show the live screen of a run elsewhere: detached, submitted, or in another terminal.

    q or Ctrl-C leaves the screen. The run continues."""
    from asyncrl_cli.checkpoint.lookup import find_run

    if address is not None:
        name, follow = followed_there(address, run, runs_dir)
        where = f" --address {address}"
    else:
        directory = _newest(runs_dir) if run is None else find_run(run, runs_dir)
        name, follow, where = directory.name, partial(_follow, directory), where_runs_are(directory.parent)
    if as_json:
        follow(_print_line, time.sleep)
    else:
        _show(name, follow, where)


def _newest(runs_dir: Path) -> Path:
    from asyncrl_cli.checkpoint.lookup import run_names
    from asyncrl_cli.observe.run_status import no_runs

    if names := run_names(runs_dir):
        return runs_dir / names[0]
    raise no_runs(runs_dir)


def _follow(directory: Path, take: Take, wait: Wait) -> None:
    """Pass the run's status to `take` once a second until the run is over."""
    from asyncrl_cli.checkpoint.lookup import detached_output
    from asyncrl_cli.observe.run_status import StillStarting, read_status

    while True:
        if not directory.exists():
            why = f"run '{directory.name}' ended while it was starting, and left no files"
            output = detached_output(directory)
            teller = output if output.exists() else "the command that started it"
            raise RefusedError(why, hint=f"{teller} says why")
        try:
            found = read_status(str(directory), directory.parent)
        except StillStarting as not_yet:
            take(not_yet.message)
        else:
            take(found)
            if found.is_over:
                return
        wait(LOOK_EVERY_S)


def _print_line(found: RunStatus | str) -> None:
    import json

    if not isinstance(found, str):
        sys.stdout.write(json.dumps(found.to_json()) + "\n")
        sys.stdout.flush()


def _show(name: str, follow: Callable[[Take, Wait], None], where: str) -> None:
    """Show the live screen until the run is over, or until q or Ctrl-C. `where`: options that find the run
    again."""
    from asyncrl_cli.observe.render import render_summary
    from asyncrl_cli.observe.screen import watching
    from asyncrl_cli.observe.terminal import key_presses

    shown: deque[RunStatus | str] = deque([""], maxlen=1)
    with suppress(KeyboardInterrupt), key_presses() as key, watching(stdout()) as show:

        def take(found: RunStatus | str) -> None:
            shown.append(found)
            show(found)

        def wait(seconds: float) -> None:
            if key(seconds) == "q":
                raise KeyboardInterrupt

        follow(take, wait)
    (last,) = shown
    if isinstance(last, str) or not last.is_over:
        again = f"`asyncrl watch {name}{where}` shows it again"
        say(f"run '{name}' continues; {again}, `asyncrl stop {name}{where}` ends it")
    elif last.liveness == "ended":
        stdout().print(render_summary(last.status))


def stop(run: RunArgument, runs_dir: RunsDirOption = RUNS_DIR, address: JobAddressOption = None) -> None:
    """Ask a run to finish its train step, write a checkpoint and end. If asked twice, it ends at once."""
    if address is not None:
        return on_cluster(address, ["stop", run], runs_dir)
    from asyncrl_cli.checkpoint.run_directory import request_stop
    from asyncrl_cli.observe.run_status import read_status

    found = read_status(run, runs_dir)
    if found.is_over:
        hint = f"`asyncrl status {as_typed(found.directory)}` says how it ended"
        raise RefusedError(f"run '{found.name}' is not running", hint=hint)
    if request_stop(found.directory) > 1:
        say(f"asked run '{found.name}' to end at once")
    elif found.status.doing is not None:  # only while a run starts; the loop's status lacks it
        say(f"asked run '{found.name}' to end; it is still starting and has nothing new to checkpoint")
    else:
        shows = f"`asyncrl watch {as_typed(found.directory)}` shows it"
        say(f"asked run '{found.name}' to finish its step, checkpoint and end; {shows}")
