"""The commands that look at a run from outside, or end it: `asyncrl status`, `watch`, `logs` and `stop`."""

from __future__ import annotations

import heapq
import json
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from io import TextIOWrapper
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.base.paths import as_typed, where_runs_are
from asyncrl_cli.cli.console import print_json, print_text, say, stdout
from asyncrl_cli.cli.options import (
    RUNS_DIR,
    JobAddressOption,
    JsonOption,
    RunArgument,
    RunsDirOption,
    number_option,
    run_argument,
    text_option,
)
from asyncrl_cli.cli.submit import Pause, ShowStatus, on_cluster, print_jobs, status_follower
from asyncrl_cli.observe.terminal import uncoloured

if TYPE_CHECKING:
    from asyncrl_cli.observe.run_status import RunStatus

LOOK_EVERY_S = 1.0
LOGS_POLL_S = 0.3
MAX_LINE_CHARACTERS = 2**20
LOG_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
STATUS_EXAMPLES = """
  asyncrl status                 all runs, newest first, and what to do next
  asyncrl status first           one run in detail
  asyncrl status --json | jq '.[] | select(.state == "failed") | .error'
  asyncrl status first --json | jq .progress"""
WATCH_EXAMPLES = """
  asyncrl watch                                      the newest run
  asyncrl watch first
  asyncrl watch first --address http://head:8265     a submitted run"""
LOGS_EXAMPLES = """
  asyncrl logs first
  asyncrl logs first -f --role trainer     follow trainer-0, trainer-1, ...
  asyncrl logs first --attempt 1           from before it was resumed"""
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
    if address is not None and run is None:
        return print_jobs(address, as_json=as_json)
    if address is not None and run is not None:
        return on_cluster(address, ["status", run, *(["--json"] if as_json else [])], runs_dir)
    from asyncrl_cli.observe.run_status import StillStarting, overview, read_status
    from asyncrl_cli.observe.screen import table_of

    if run is None:
        rows = overview(runs_dir)
        if as_json:
            return print_json([asdict(row) for row in rows])
        if len(rows) != 1:
            console = stdout()
            console.width = max(console.width, 72)  # a narrower table would lose whole columns
            return console.print(table_of(rows))
        run = rows[0].name
    try:
        found = read_status(run, runs_dir)
    except StillStarting as early:
        if as_json:  # there is no status to print
            raise
        return print_text(f"{early.message}; {early.hint}")
    if as_json:
        return print_json(found.to_json())
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
    from asyncrl_cli.checkpoint.lookup import find_run, run_names
    from asyncrl_cli.observe.run_status import no_runs

    if address is not None:
        name, follow = status_follower(address, run, runs_dir)
        where = f" --address {address}"
    else:
        names = run_names(runs_dir) if run is None else [run]
        if not names:
            raise no_runs(runs_dir)
        directory = find_run(names[0], runs_dir)
        name, follow, where = directory.name, partial(_follow, directory), where_runs_are(directory.parent)
    if not as_json:
        return _show(name, follow, where)

    def print_line(found: RunStatus | str) -> None:
        if not isinstance(found, str):
            sys.stdout.write(json.dumps(found.to_json()) + "\n")
            sys.stdout.flush()

    follow(print_line, time.sleep)


def _follow(directory: Path, show: ShowStatus, pause: Pause) -> None:
    """Show the run's status once a second until the run is over."""
    from asyncrl_cli.checkpoint.lookup import detached_output
    from asyncrl_cli.observe.run_status import StillStarting, read_status

    while True:
        if not directory.exists():
            why = f"run '{directory.name}' ended while it was starting, and left no files"
            output = detached_output(directory)
            source = output if output.exists() else "the command that started it"
            raise RefusedError(why, hint=f"{source} says why")
        try:
            found = read_status(str(directory), directory.parent)
        except StillStarting as not_yet:
            show(not_yet.message)
        else:
            show(found)
            if found.is_over:
                return
        pause(LOOK_EVERY_S)


def _show(name: str, follow: Callable[[ShowStatus, Pause], None], where: str) -> None:
    """Show the live screen until the run is over, or until q or Ctrl-C. `where`: options that find the run
    again."""
    from asyncrl_cli.observe.render import render_summary
    from asyncrl_cli.observe.screen import watching
    from asyncrl_cli.observe.terminal import key_presses

    shown: deque[RunStatus | str] = deque([""], maxlen=1)
    with suppress(KeyboardInterrupt), key_presses() as key, watching(stdout()) as show:

        def show_and_remember(found: RunStatus | str) -> None:
            shown.append(found)
            show(found)

        def pause(seconds: float) -> None:
            if key(seconds) == "q":
                raise KeyboardInterrupt

        follow(show_and_remember, pause)
    (last,) = shown
    if isinstance(last, str) or not last.is_over:
        again = f"`asyncrl watch {name}{where}` shows it again"
        say(f"run '{name}' continues; {again}, `asyncrl stop {name}{where}` ends it")
    elif last.liveness == "ended":
        stdout().print(render_summary(last.status))


def logs(
    run: RunArgument,
    runs_dir: RunsDirOption = RUNS_DIR,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the run ends.")
    ] = False,
    role: Annotated[
        str | None,
        text_option("--role", "R", "Only these logs: driver, trainer, rollout-1, ... Default: all."),
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
    is_one = len(found) == 1 and (not follow or role == found[0].stem)
    look, wait = partial(logs_of, place, role), partial(time.sleep, LOGS_POLL_S)
    others = ""
    if attempt is None and attempts > 1:
        earlier = "1 shows the earlier one" if attempts == 2 else f"1 to {attempts - 1} show earlier ones"
        others = f"attempt {attempts} is the newest; --attempt {earlier}"
    if others and follow:
        say(others)
    for name, line in follow_lines(directory, look, follow=follow, wait=wait):
        print_text(uncoloured(line if is_one else f"{name:<10} | {line}"))
        if follow:
            sys.stdout.flush()
    if others and not follow:
        say(others)


def logs_of(directory: Path, role: str | None) -> list[Path]:
    """The log files of a role: `trainer` means all its ranks, `trainer-0` one rank, None every role."""
    names = {path: (path.stem, path.stem.rpartition("-")[0]) for path in sorted(directory.glob("*.log"))}
    return [path for path in names if role is None or role in names[path]]


def follow_lines(
    directory: Path, logs: Callable[[], Sequence[Path]], *, follow: bool, wait: Callable[[], None]
) -> Iterator[tuple[str, str]]:
    """Yield (log, line): all lines so far, by time; then, with `follow`, new lines until no process holds the
    run. Call `logs` again each time, because a run that is still starting has only its driver's
    log."""
    from asyncrl_cli.checkpoint.lookup import is_locked

    with ExitStack() as stack:
        files: dict[str, TextIO] = {}
        while True:
            live = follow and is_locked(directory)
            for path in logs():
                if path.stem not in files:
                    files[path.stem] = stack.enter_context(_open(path))
            new = (_new_lines(name, file, is_live=live) for name, file in files.items())
            yield from (named for _, named in heapq.merge(*new, key=itemgetter(0)))
            if not live:
                return
            wait()


def _new_lines(name: str, file: TextIO, *, is_live: bool) -> Iterator[tuple[str, tuple[str, str]]]:
    """A log's new lines, each with its time, or that of the line before."""
    time_text = ""
    while True:
        position = file.tell()
        line = file.readline(MAX_LINE_CHARACTERS)
        is_half = not line.endswith("\n") and len(line) < MAX_LINE_CHARACTERS
        if not line or (is_live and is_half):
            file.seek(position)  # an unfinished last line is left for the next look
            return
        time_text = found[0] if (found := LOG_TIME.match(line)) else time_text
        yield time_text, (name, line.rstrip("\n"))


def _open(path: Path) -> TextIO:
    from asyncrl_cli.base.safe_files import UnsafeFile, open_regular, reason

    try:
        return TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace")
    except (OSError, UnsafeFile) as error:
        why = f"{path} cannot be read: {reason(error)}"
        raise RefusedError(why, hint="--role names another log") from None


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
