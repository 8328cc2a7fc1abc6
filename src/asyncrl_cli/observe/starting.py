"""What a person sees before the first step: which part of the start-up runs, and how far it is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from asyncrl_cli.observe.format import clock
from asyncrl_cli.observe.terminal import SafeConsole, neutral

_PLAIN_EVERY_S = 5.0
_PACE_OVER_S = 15.0
"""How far back the pace is looked at from which the time left is told: a busy neighbour shows soon, one slow step does not."""


class Starting:
    """`with Starting(ui) as say: say("loading the task")`; `say(text, done, total, figures)` draws a bar and the time left.

    On a terminal one line that moves and disappears; else a plain line per part, and every five seconds of a long one.
    """

    def __init__(self, ui: str, console: Console | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console or SafeConsole(stderr=True)
        self._now = now
        self._silent = ui == "none"
        live = ui == "live" or (ui == "auto" and self._console.is_terminal)
        self._progress = _bar(self._console) if live else None
        self._task: TaskID | None = None
        self._text = ""
        self._said_s = 0.0
        self._pace: deque[tuple[float, int]] = deque()  # when how much was done, over the last seconds
        self.line = ""

    def __enter__(self) -> Starting:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, text: str, done: int = 0, total: int = 0, figures: str = "") -> None:
        is_new, self._text = text != self._text, text
        if is_new:
            self._pace.clear()
        how_far = self._how_far(done, total, figures)
        self.line = "  ".join(part for part in (text, how_far) if part)
        if self._progress is not None:
            self._draw(self._progress, is_new, done, total, how_far)
        elif not self._silent and (is_new or self._now() - self._said_s >= _PLAIN_EVERY_S):
            self._said_s = self._now()
            print(neutral(self.line), file=self._console.file, flush=True)

    def _how_far(self, done: int, total: int, figures: str) -> str:
        """ "120/300  40%  loss 0.61  0:00:25 left", as far as it is known; nothing is counted before the first of them is done."""
        left_s = self._left_s(done, total)
        left = "" if left_s is None or done == total else f"{clock(left_s)} left"
        counted = (f"{done}/{total}", f"{done / total:.0%}") if done and total else ()
        return "  ".join(part for part in (*counted, figures, left) if part)

    def _left_s(self, done: int, total: int) -> float | None:
        """None where nobody can tell yet."""
        now_s = self._now()
        self._pace.append((now_s, done))
        while len(self._pace) > 2 and now_s - self._pace[1][0] >= _PACE_OVER_S:
            self._pace.popleft()
        began_s, begun = self._pace[0]
        return (total - done) * (now_s - began_s) / (done - begun) if done > begun and total else None

    def _draw(self, progress: Progress, is_new: bool, done: int, total: int, how_far: str) -> None:
        if is_new and self._task is not None:
            progress.remove_task(self._task)
        if is_new or self._task is None:
            self._task = progress.add_task(self._text, how_far="")
        progress.update(self._task, completed=done, total=total or None, how_far=how_far)


def _bar(console: Console) -> Progress:
    bar = BarColumn(bar_width=None, table_column=Column(max_width=40))
    columns = (SpinnerColumn(), _words("task.description"), bar, _words("task.fields[how_far]"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _words(what: str) -> TextColumn:
    """On one line: where the terminal is narrow, the bar gets shorter. A path may have what looks like markup in it."""
    return TextColumn(f"{{{what}}}", markup=False, table_column=Column(no_wrap=True))
