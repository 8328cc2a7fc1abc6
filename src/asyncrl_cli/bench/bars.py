"""Shows a comparison's progress: a bar for each run and one for all, each with the elapsed and the remaining
time."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from asyncrl_cli.observe.format import clock
from asyncrl_cli.observe.terminal import neutral

PLAIN_EVERY_S = 15.0
"""Without a terminal: seconds between two lines about the same run."""
ALL = "all"


class Bars(Progress):
    """On a terminal, bars; elsewhere, plain lines when a run's phase changes, every `PLAIN_EVERY_S` and at
    its end. For a real run, elapsed and remaining time are its own, as in its metrics and the final table."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
            BarColumn(bar_width=None, table_column=Column(max_width=40)),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", style="progress.download"),
            _Time(Column(no_wrap=True, min_width=7)),
            console=console,
            disable=not console.is_terminal,
            get_time=now,
        )
        self._ids: dict[str, TaskID] = {}
        self._printed_s: dict[tuple[str, bool], float] = {}

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
        run = self._show(name, neutral(text), groups, total, is_started=groups > 0 or bool(phase))
        run.fields["left_s"] = 0.0 if is_over else left_s
        if time_s:
            run.fields["time_s"] = time_s
        runs = [self.tasks[task_id] for key, task_id in self._ids.items() if key != ALL]
        if len(runs) > 1:
            text = f"{ALL}: {sum(one.finished for one in runs)} of {len(runs)} runs"
            self._show(ALL, text, sum(int(one.completed) for one in runs), total * len(runs), is_started=True)
        if self.disable and run.started:
            self._print(run, is_over=is_over)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, key: str, text: str, done: int, total: int, *, is_started: bool) -> Task:
        if key not in self._ids:
            self._ids[key] = self.add_task(text, total=total, start=is_started)
        task_id = self._ids[key]
        if is_started:
            self.start_task(task_id)  # does nothing if the task has started already
        self.update(task_id, completed=done, description=text)
        return self.tasks[task_id]  # none is ever removed

    def _print(self, run: Task, *, is_over: bool) -> None:
        key, now_s = (run.description, is_over), self.get_time()
        if key not in self._printed_s or now_s - self._printed_s[key] >= PLAIN_EVERY_S:
            self._printed_s[key] = now_s
            self.say(f"{run.description}  {run.completed:.0f}/{run.total:.0f}  {time_of(run)}")


def time_of(task: Task) -> str:
    """Elapsed and remaining time: from the run's report, else from the mean pace so far."""
    elapsed_s = task.finished_time if task.finished else task.elapsed
    left_s = task.fields.get("left_s")
    if left_s is None and task.completed and task.elapsed and task.remaining:
        left_s = task.elapsed / task.completed * task.remaining
    left = f"  {clock(left_s)} left" if left_s else ""
    return clock(task.fields.get("time_s", elapsed_s)) + left


class _Time(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(time_of(task), style="progress.elapsed")
