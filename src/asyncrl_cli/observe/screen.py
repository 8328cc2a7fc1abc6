"""Shows runs to people: the progress of a start, the live screen, plain lines where there is no terminal, and
`asyncrl status`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from asyncrl_cli.contracts.events import ENDED
from asyncrl_cli.contracts.status import Status
from asyncrl_cli.observe.format import NOTHING, clock, event_text, number, share, step_text, summary_rows
from asyncrl_cli.observe.render import PHASE_STYLES, render, render_summary, waits_text
from asyncrl_cli.observe.run_lines import Line
from asyncrl_cli.observe.run_status import RunRow, RunStatus
from asyncrl_cli.observe.sinks import Sink
from asyncrl_cli.observe.terminal import SafeConsole, neutral

REDRAWS_PER_S = 2
"""Twice as often as a new status is made."""
CLOSE_TIMEOUT_S = 5.0
PLAIN_EVERY_S = 5.0
"""Minimum time between two lines of a start, or of steps: a fast run must not flood a log."""
QUIET_S = 30.0
"""After so long without a line of a run, one says what the run waits for."""
AROUND_WORDS = 1 + 1 + 7 + 4
"""Cells of spinner, shortest bar and clock, and of the four gaps between the columns."""
PACE_OVER_S = 15.0
"""The time left is estimated from the pace over this many last seconds: long enough to smooth out one slow
step."""
MOST_ROWS = 20
"""Rows of the table; `--json` has all."""
STYLES = {
    **PHASE_STYLES,
    "killed": "bold red",
    "damaged": "bold red",
    "silent": "bold yellow",
    "stopped": "yellow",
}
LEGEND = "idle: trainer, rollouter; stale: versions per token; age: of the last report"


class ProgressLine:
    """`with ProgressLine(ui) as show: show("loading the task")`; `show(text, done, total, figures)` draws a
    bar and the time left.

    On a terminal this is one live line that disappears at the end; elsewhere a plain line at the beginning of
    each stage (a new text) and every five seconds. `listen(line, is_new)` gets every line, whatever is shown;
    `is_new`: it is the first of its stage.
    """

    def __init__(
        self,
        ui: str,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        listen: Callable[[str, bool], None] = lambda line, is_new: None,
    ) -> None:
        self._console = console or SafeConsole(stderr=True)
        self._now = now
        self._listen = listen
        is_live = ui == "live" or (ui == "auto" and self._console.is_terminal)
        self._is_plain = ui != "none" and not is_live
        self._printed_s = 0.0
        self.bar = Progress(
            SpinnerColumn(),
            _Words("text"),
            BarColumn(bar_width=None, table_column=Column(max_width=40)),
            _Words("how_far"),
            TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
            console=self._console,
            transient=True,
            get_time=now,
            speed_estimate_period=PACE_OVER_S,
            disable=not is_live,
        )

    def __enter__(self) -> ProgressLine:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def __call__(self, text: str, done: int = 0, total: int = 0, figures: str = "") -> None:
        bar = self.bar
        if is_new := [stage.description for stage in bar.tasks] != [text]:
            for earlier in bar.task_ids:
                bar.remove_task(earlier)
            bar.add_task(text, how_far="", first=None, width=self._console.width)
        (stage,) = bar.tasks
        first = stage.fields["first"] or ((done, self._now()) if done else None)
        bar.update(stage.id, completed=done, total=total or None, first=first, width=self._console.width)
        # "120/300 40% loss 0.61 0:00:25 left", as far as it is known: no count before the first item is done.
        counted, left = "", ""
        if stage.completed and stage.total:
            counted = f"{stage.completed:.0f}/{stage.total:.0f}  {stage.percentage:.0f}%"
            # When a stage began, and what it took before its first item, says nothing about the others.
            since_s = self._now() - first[1] if first else 0.0
            pace = stage.speed or (first and since_s and (done - first[0]) / since_s)
            left = f"{clock(stage.remaining / pace)} left" if pace and stage.remaining else ""
        how_far = "  ".join(words for words in (counted, figures, left) if words)
        bar.update(stage.id, how_far=how_far)
        line = f"{text}  {how_far}".rstrip()
        self._listen(line, is_new)
        if self._is_plain and (is_new or self._now() - self._printed_s >= PLAIN_EVERY_S):
            self._printed_s = self._now()
            print(neutral(line), file=self._console.file, flush=True)

    def show(self, line: str) -> None:
        """Print a line that stays."""
        if self._is_plain or not self.bar.disable:
            self._console.print(Text(neutral(line)), soft_wrap=True)


class _Words(ProgressColumn):
    """A stage's text, or how far it is. On a narrow terminal they are cut, the text first: spinner, bar and
    clock keep their room. Markup is off, because paths may contain brackets."""

    def __init__(self, field: Literal["text", "how_far"]) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._field = field

    def render(self, task: Task) -> Text:
        is_text, how_far = self._field == "text", str(task.fields["how_far"])
        words = Text(neutral(task.description if is_text else how_far))
        room = task.fields["width"] - AROUND_WORDS - (len(how_far) if is_text else 1)
        words.truncate(max(1, room), overflow="ellipsis")
        return words


class Screen(Sink):
    """Draws the newest status live. `close` leaves the last picture and the run's totals on the terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._live = Live(
            console=self._console,
            get_renderable=self._picture,
            refresh_per_second=REDRAWS_PER_S,
            vertical_overflow="crop",
        )
        self._live.start()

    def status(self, status: Status) -> None:
        self._status = status

    def close(self, status: Status) -> None:
        """Draw the last picture. Gives up after CLOSE_TIMEOUT_S if the terminal is stuck."""
        self._status = status
        closing = threading.Thread(target=self._live.stop, name="screen", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        if not closing.is_alive():
            # The command's last line reports the error.
            self._console.print(render_summary(replace(status, error="")))

    def _picture(self) -> Text:
        return Text() if self._status is None else _picture(self._console, self._status)


class Plain(Sink):
    """Writes events, changes of phase and step lines to `stream` (stderr: stdout carries data)."""

    def __init__(self, stream: IO[str], *, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now
        self._shown_s = float("-inf")
        self._written_s = now()
        self._shown_step = 0
        self._phase = ""

    def event(self, event: Line) -> None:
        if (text := event_text(event)) is None:
            return
        match event["event"]:
            case "warning":
                text = f"warning: {text}"
            case "checkpointed":
                text = f"{text} written"
            case "failed":
                # which executor; why is the command's last line
                text = f"stopping: {str(event.get('error', '')).partition(': ')[0]}"
        self._write(event["time_s"], text)

    def status(self, status: Status) -> None:
        doing = (status.doing or "").partition("  ")[0]  # without how far it is
        phase = f"{status.phase}: {doing}" if doing else status.phase
        if phase != self._phase:
            self._phase = phase
            self._write(status.progress.time_s, f"{status.name} ({status.mode}): {self._phase}")
        if status.phase not in ENDED and self._now() - self._shown_s >= PLAIN_EVERY_S:
            self._write_step(status)
        if status.phase not in ENDED and self._now() - self._written_s >= QUIET_S:
            self._write(status.progress.time_s, f"still {status.phase} ({waits_text(status)})")

    def close(self, status: Status) -> None:
        self._write_step(status)
        # The command's last line reports the error.
        rows = summary_rows(replace(status, error=""))
        self._stream.write(neutral("".join(f"{what:<11}{figures}\n" for what, figures in rows)))
        self._stream.flush()

    def _write_step(self, status: Status) -> None:
        """Write a step line: at most one per step, and none before the first step has ended."""
        step = status.progress.step
        if step != self._shown_step and status.periods.steps:
            self._write(status.progress.time_s, step_text(status))
            self._shown_s, self._shown_step = self._now(), step

    def _write(self, time_s: float, text: str) -> None:
        self._written_s = self._now()
        self._stream.write(neutral(f"{clock(time_s)}  {text}\n"))
        self._stream.flush()


def _picture(console: Console, status: Status, remark: str = "") -> Text:
    width, height = console.size
    return render(status, width=width, height=height - 1, remark=remark)


def make_ui(ui: str, console: Console | None = None) -> Sink | None:
    """The sink for `--ui`; None for `none`. `auto`: the screen on a terminal that can show it, else plain
    lines on stderr."""
    console = console or SafeConsole(stderr=True)
    if ui == "none":
        return None
    if ui == "live" or (ui == "auto" and can_show(console)):
        return Screen(console)
    return Plain(sys.stderr)


def can_show(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and "utf" in console.encoding.lower()


def print_status(found: RunStatus, console: Console, *, error: str = "", go_on: str = "") -> None:
    """`asyncrl status RUN`: the picture once, and the totals of an ended run.

    `error`: what ended the run, if its status does not say so; `go_on`: the next command."""
    console.print(render(found.status, width=console.width, height=200, remark=found.remark), highlight=False)
    if found.replayed:
        console.print(Text(found.replayed), soft_wrap=True)
    if found.liveness == "ended":
        console.print(render_summary(found.status))
    elif error:
        console.print(Text(f"last error: {error}", "bold red"))
    if go_on:
        console.print(Text(f"next: {go_on}"), soft_wrap=True)


@contextmanager
def watching(console: Console) -> Iterator[Callable[[RunStatus | str], None]]:
    """Yields a function that shows a status, or why there is none yet: as a live picture or, without a
    terminal, as plain lines."""
    if not console.is_terminal:
        plain = Plain(console.file)
        yield lambda found: None if isinstance(found, str) else plain.status(found.status)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda found: live.update(
            found if isinstance(found, str) else _picture(console, found.status, found.remark), refresh=True
        )


def table_of(rows: Sequence[RunRow]) -> Group:
    """The newest runs for a terminal, and below them the errors of those that did not end well."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold", min_width=8)
    table.add_column("state", no_wrap=True)
    table.add_column("profile", overflow="fold", min_width=8)
    for heading in ("step", "reward", "idle", "stale", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("next", no_wrap=True)
    below: list[Text] = []
    if (older := len(rows) - MOST_ROWS) > 0:
        below.append(Text(f"... and {older} older runs: --json lists all", "dim"))
    for row in rows[:MOST_ROWS]:
        is_known = row.step is not None
        table.add_row(
            row.name,
            Text(row.state, STYLES.get(row.state, "")),
            row.profile or NOTHING,
            f"{row.step}/{row.train_steps}" if is_known else NOTHING,
            number(row.reward, 3),
            f"{share(row.trainer_idle_ratio)} {share(row.rollouter_idle_ratio)}" if is_known else NOTHING,
            number(row.staleness_mean),
            since(row.age_s),
            row.next.split()[1],
        )
        if row.error:
            below.append(Text.assemble((f"{row.name}: ", "bold red"), f"{row.error}\n  {row.next}"))
    legend = f"{LEGEND}\nnext: what to do with the run, as in `{rows[0].next}`"
    return Group(table, *below, Text(legend, "dim"))


def since(seconds: float) -> str:
    """`12 s`, `5 min`, `3 h`, `2 d`."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
