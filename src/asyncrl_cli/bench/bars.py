"""Progress bars, one per run. A real run's time is its own, as in its metrics: the table's wall time in the end."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from asyncrl_cli.observe.format import clock


class Bars(Progress):
    """How far a comparison is."""

    def __init__(self, console: Console) -> None:
        super().__init__(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Time(), console=console)
        self._ids: dict[str, TaskID] = {}

    def run(self, name: str, groups: int, total: int, *, time_s: float | None = None, phase: str = "") -> None:
        """A run has trained so many of its groups; called first with 0. `time_s` and `phase`: what a real one says of itself."""
        text = f"{name} ({phase})" if phase not in ("", "running", "done") else name
        own_time = {} if time_s is None else {"time_s": time_s}
        self._show(name, groups, total, is_started=groups > 0, text=text, **own_time)

    def note(self, text: str, done: int = 0, total: int = 0, figures: str = "") -> None:
        """One bar for all that is not a run."""
        self._show("", done, total, is_started=True, text=text)

    def say(self, text: str) -> None:
        """A line above the bars."""
        self.console.print(text, markup=False, highlight=False)

    def _show(self, key: str, done: int, total: int, *, is_started: bool, text: str, **own_time: Any) -> None:
        if key not in self._ids:
            self._ids[key] = self.add_task(text, total=total or None, start=is_started)
        if is_started:
            self.start_task(self._ids[key])  # does nothing to one that has started
        self.update(self._ids[key], completed=done, total=total or None, description=text, **own_time)


class _Time(ProgressColumn):
    def render(self, task: Task) -> Text:
        elapsed_s = task.finished_time if task.finished else task.elapsed
        left = "" if task.finished or task.time_remaining is None else f"  {clock(task.time_remaining)} left"
        return Text(clock(task.fields.get("time_s", elapsed_s)) + left, style="progress.elapsed")
