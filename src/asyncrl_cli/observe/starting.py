"""What a person sees before the first step: which part of the start-up runs, and how far it is."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from asyncrl_cli.observe.terminal import SafeConsole, neutral

_PLAIN_EVERY_S = 2.0


class Starting:
    """`with Starting(ui) as say: say("loading the task")`; `say(text, done, total)` draws a bar.

    On a terminal one line that moves and disappears; else a plain line per part, and every two seconds of a long one.
    """

    def __init__(self, ui: str, console: Console | None = None) -> None:
        self._console = console or SafeConsole(stderr=True)
        self._silent = ui == "none"
        live = ui == "live" or (ui == "auto" and self._console.is_terminal)
        self._progress = self._make_progress() if live and not self._silent else None
        self._task: TaskID | None = None
        self._text = ""
        self._said_s = 0.0

    def __enter__(self) -> Starting:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, text: str, done: int = 0, total: int = 0) -> None:
        if self._progress is not None:
            self._draw(self._progress, text, done, total)
        elif not self._silent:
            self._print(text, done, total)

    def _draw(self, progress: Progress, text: str, done: int, total: int) -> None:
        if self._task is None or text != self._text:
            if self._task is not None:
                progress.remove_task(self._task)
            self._task, self._text = progress.add_task(text, total=total or None), text
        progress.update(self._task, completed=done, total=total or None)

    def _print(self, text: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if text == self._text and now_s - self._said_s < _PLAIN_EVERY_S:
            return
        self._text, self._said_s = text, now_s
        figures = f" {done}/{total}" if done and total else ""  # no more may be said of a short one, and 0 of 3 is not its end
        print(neutral(f"{text}{figures}"), file=self._console.file, flush=True)

    def _make_progress(self) -> Progress:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console, transient=True)
