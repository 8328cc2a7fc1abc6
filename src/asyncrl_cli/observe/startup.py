"""A run's start, before its loop runs: which part is under way and how far it is, on stderr and in
status.json."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from asyncrl_cli.base.storage import replace_text
from asyncrl_cli.contracts.status import RunFacts, parse_status
from asyncrl_cli.observe.format import clock
from asyncrl_cli.observe.live_status import LiveStatus
from asyncrl_cli.observe.metrics import StepMetrics
from asyncrl_cli.observe.sinks import to_json
from asyncrl_cli.observe.terminal import SafeConsole, neutral

log = logging.getLogger("asyncrl")

PLAIN_EVERY_S = 5.0
AROUND_WORDS = 1 + 1 + 7 + 4
"""Cells of spinner, shortest bar and clock, and of the four gaps between the columns."""
PACE_OVER_S = 15.0
"""The time left is estimated from the pace over this many last seconds: long enough to smooth out one slow
step."""
STATUS_EVERY_S = 1.0


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
            bar.add_task(text, how_far="", width=self._console.width)
        (stage,) = bar.tasks
        bar.update(stage.id, completed=done, total=total or None, width=self._console.width)
        # "120/300 40% loss 0.61 0:00:25 left", as far as it is known: no count before the first item is done.
        counted, left = "", ""
        if stage.completed and stage.total:
            counted = f"{stage.completed:.0f}/{stage.total:.0f}  {stage.percentage:.0f}%"
            # When a new stage began is not known.
            pace = stage.speed or (not is_new and stage.elapsed and stage.completed / stage.elapsed)
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
        with suppress(ValueError):  # there was no status, or it is malformed: the fresh one counts
            self._status = replace(
                parse_status(self._before or ""),
                phase=fresh.phase,
                executors=fresh.executors,
                admission=fresh.admission,
                error=fresh.error,
                pid=fresh.pid,
                host=fresh.host,
                started_at=fresh.started_at,
            )
        self._lock = threading.Lock()
        self._is_over = False
        self._write("")

    def __call__(self, line: str, is_new: bool = True) -> None:
        """`line` goes into the status, at most once a second; a new stage of the start is also logged."""
        if is_new:
            log.info("%s", line)
        with self._lock:
            is_due = is_new or time.time() - self._status.updated_at >= STATUS_EVERY_S
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
        self._status = replace(self._status, doing=doing, updated_at=time.time())
        replace_text(self._path, to_json(self._status.to_json()), durable=False)
