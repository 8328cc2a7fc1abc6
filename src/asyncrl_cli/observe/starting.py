"""Progress of a run's start, before its loop runs: which part is under way and how far it is, on stderr and
in status.json."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from asyncrl_cli.base.storage import replace_text
from asyncrl_cli.observe.format import clock
from asyncrl_cli.observe.live_status import LiveStatus, RunFacts
from asyncrl_cli.observe.metrics import StepMetrics
from asyncrl_cli.observe.observers import to_json
from asyncrl_cli.observe.status import parse_status
from asyncrl_cli.observe.terminal import SafeConsole, neutral

log = logging.getLogger("asyncrl")

PLAIN_EVERY_S = 5.0
AROUND_WORDS = 1 + 1 + 7 + 4
"""Cells of spinner, shortest bar and clock, and of the four gaps between the columns."""
PACE_OVER_S = 15.0
"""The time left is estimated from the pace over this many last seconds: long enough to smooth out one slow
step."""
STATUS_EVERY_S = 1.0
OF_THE_START = ("phase", "executors", "admission", "error", "pid", "host", "started_at")
"""Keys of status.json that a resumed run's start takes from itself; all others keep the earlier attempt's
values."""


class Starting:
    """`with Starting(ui) as say: say("loading the task")`; `say(text, done, total, figures)` draws a bar and
    the time left.

    On a terminal this is one live line that disappears at the end; elsewhere a plain line at the beginning of
    each part and every five seconds. `tell(line, is_new)` gets every line, whatever is shown; `is_new`: it is
    the first of its part.
    """

    def __init__(
        self,
        ui: str,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        tell: Callable[[str, bool], None] = lambda line, is_new: None,
    ) -> None:
        self._console = console or SafeConsole(stderr=True)
        self._now = now
        self._tell = tell
        is_live = ui == "live" or (ui == "auto" and self._console.is_terminal)
        self._is_plain = ui != "none" and not is_live
        self._said_s = 0.0
        self._progress = Progress(
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

    def __enter__(self) -> Starting:
        self._progress.start()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._progress.stop()

    def __call__(self, text: str, done: int = 0, total: int = 0, figures: str = "") -> None:
        progress = self._progress
        if is_new := [task.description for task in progress.tasks] != [text]:
            for earlier in progress.task_ids:
                progress.remove_task(earlier)
            progress.add_task(text, total=total or None, how_far="", width=self._console.width)
        (task,) = progress.tasks
        progress.update(task.id, completed=done, total=total or None)
        how_far = _how_far(task, figures, is_new)
        progress.update(task.id, how_far=how_far, width=self._console.width)
        line = f"{text}  {how_far}".rstrip()
        self._tell(line, is_new)
        if self._is_plain and (is_new or self._now() - self._said_s >= PLAIN_EVERY_S):
            self._said_s = self._now()
            print(neutral(line), file=self._console.file, flush=True)

    def show(self, line: str) -> None:
        """Print a line that stays."""
        if self._is_plain or not self._progress.disable:
            self._console.print(Text(neutral(line)), soft_wrap=True)


def _how_far(task: Task, figures: str, is_new: bool) -> str:
    """ "120/300 40% loss 0.61 0:00:25 left", as far as it is known. There is no count before the first item
    is done."""
    counted, left = "", ""
    if task.completed and task.total:
        counted = f"{task.completed:.0f}/{task.total:.0f}  {task.percentage:.0f}%"
        # a new part's start is not known
        pace = task.speed or (not is_new and task.elapsed and task.completed / task.elapsed)
        left = f"{clock(task.remaining / pace)} left" if pace and task.remaining else ""
    return "  ".join(part for part in (counted, figures, left) if part)


class _Words(ProgressColumn):
    """The task's text, or how far it is. On a narrow terminal they are cut, the text first: spinner, bar and
    clock keep their room. Markup is off, because paths may contain brackets."""

    def __init__(self, field: Literal["text", "how_far"]) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._field = field

    def render(self, task: Task) -> Text:
        how_far = str(task.fields["how_far"])
        words = Text(neutral(task.description if self._field == "text" else how_far))
        room = task.fields["width"] - AROUND_WORDS
        words.truncate(
            max(1, room - len(how_far) if self._field == "text" else room - 1), overflow="ellipsis"
        )
        return words


class StartStatus:
    """Writes status.json while a run starts: `doing = StartStatus(path, facts); doing("loading the task")`.

    Imports and the start of Ray may block the process for minutes: the run's lock shows readers that it is
    alive. A resumed run's earlier figures stay in the file until its loop runs; `take_back` restores the old
    file.
    """

    def __init__(self, path: Path, facts: RunFacts) -> None:
        self._path = path
        self._before = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
        metrics = StepMetrics(trigger_parameter_sync_step=facts.trigger_parameter_sync_step, started_s=0.0)
        self._status = fresh = LiveStatus(facts, metrics).picture()
        with contextlib.suppress(ValueError):  # an old status that is malformed is dropped
            self._status = {**parse_status(self._before or ""), **{key: fresh[key] for key in OF_THE_START}}
        self._lock = threading.Lock()
        self._is_over = False
        self._write("")

    def __call__(self, line: str, is_new: bool = True) -> None:
        """`line` goes into the status, at most once a second; a new part of the start is also logged."""
        if is_new:
            log.info("%s", line)
        with self._lock:
            is_due = is_new or time.time() - self._status["updated_at"] >= STATUS_EVERY_S
            if is_due and not self._is_over:  # a thread of the start may go on for a while
                try:
                    self._write(line)
                except OSError as error:
                    log.warning("the status of the start cannot be written: %s", error)

    def take_back(self) -> None:
        """The run has not begun: restore what the file said before, and write no more."""
        with self._lock:
            if self._before is not None:
                replace_text(self._path, self._before)
            self._is_over = True

    def _write(self, doing: str) -> None:
        self._status |= {"doing": doing, "updated_at": time.time()}
        replace_text(self._path, to_json(self._status), durable=False)
