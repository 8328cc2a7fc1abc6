"""Shows a comparison's progress: a bar for each run, one for all other work, and one for the total, each with
the elapsed and the remaining time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from asyncrl_cli.observe.format import clock
from asyncrl_cli.observe.terminal import neutral

PLAIN_EVERY_S = 15.0
"""Without a terminal: seconds between two lines about the same part."""
ALL = "all"
NOTE = ""


class Bars(Progress):
    """On a terminal, bars; elsewhere, plain lines at the beginning of each part and every `PLAIN_EVERY_S`.
    For a real run, elapsed and remaining time are the run's own, as in its metrics and in the final table."""

    def __init__(self, console: Console, now: Callable[[], float] | None = None) -> None:
        bar = BarColumn(bar_width=None, table_column=Column(max_width=40))
        text = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))
        options: dict[str, Any] = {} if now is None else {"get_time": now}
        super().__init__(
            text, bar, _HowFar(), _Time(), console=console, disable=not console.is_terminal, **options
        )
        self._ids: dict[str, TaskID] = {}
        self._said: tuple[str, float] = ("", 0.0)

    def run(
        self,
        name: str,
        groups: int,
        total: int,
        *,
        time_s: float | None = None,
        phase: str = "",
        left_s: float | None = None,
    ) -> None:
        """Show that a run has trained `groups` of `total`; the first call has 0. `time_s`, `phase` and
        `left_s`: as a real run reports them."""
        text = f"{name} ({phase})" if phase not in ("", "running", "done") else name
        is_over = groups >= total and phase in ("", "done")
        own = {} if not time_s else {"time_s": time_s}
        self._show(
            name,
            groups,
            total,
            is_started=groups > 0 or bool(phase),
            text=text,
            **own,
            left_s=0.0 if is_over else left_s,
        )
        runs = [self._task(key) for key in self._ids if key not in (ALL, NOTE)]
        if len(runs) > 1:
            over = sum(run.finished for run in runs)
            done, planned = sum(int(run.completed) for run in runs), sum(int(run.total or 0) for run in runs)
            self._show(ALL, done, planned, is_started=True, text=f"{ALL}: {over} of {len(runs)} runs")

    def note(self, text: str, done: int = 0, total: int = 0, figures: str = "") -> None:
        """Show other work, in one bar for everything that is not a run."""
        text = f"{text}  {figures}".rstrip() if figures else text
        if NOTE in self._ids and (self._task(NOTE).total or 0) != total:
            self.remove_task(self._ids.pop(NOTE))  # a new part: its clock starts at 0
        self._show(NOTE, done, total, is_started=True, text=text)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, key: str, done: int, total: int, *, is_started: bool, text: str, **own: Any) -> None:
        text = neutral(text)
        if key not in self._ids:
            self._ids[key] = self.add_task(text, total=total or None, start=is_started)
        if is_started:
            self.start_task(self._ids[key])  # does nothing if the task has started already
        self.update(self._ids[key], completed=done, total=total or None, description=text, **own)
        if self.disable and key != ALL and is_started:
            self._say_plainly(self._task(key))

    def _say_plainly(self, task: Task) -> None:
        said, at_s = self._said
        if task.description == said and self.get_time() - at_s < PLAIN_EVERY_S:
            return
        self._said = task.description, self.get_time()
        self.say(f"{task.description}  {how_far(task)}  {time_of(task)}")

    def _task(self, key: str) -> Task:
        return self._tasks[self._ids[key]]


def how_far(task: Task) -> str:
    return f"{task.completed:.0f}/{task.total:.0f}" if task.total else ""


def time_of(task: Task) -> str:
    """Elapsed and remaining time: from the run's report, else from the mean pace so far."""
    elapsed_s = task.finished_time if task.finished else task.elapsed
    left_s = task.fields.get("left_s")
    if left_s is None and task.completed and task.elapsed and task.remaining:
        left_s = task.elapsed / task.completed * task.remaining
    left = f"  {clock(left_s)} left" if left_s else ""
    return clock(task.fields.get("time_s", elapsed_s)) + left


class _HowFar(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(how_far(task), style="progress.download")


class _Time(ProgressColumn):
    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True, min_width=7))

    def render(self, task: Task) -> Text:
        return Text(time_of(task), style="progress.elapsed")
