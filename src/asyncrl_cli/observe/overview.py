"""The runs of a directory, one row each: state, figures, and the command that comes next. `asyncrl status`
prints it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.checkpoint.lookup import run_names
from asyncrl_cli.observe.format import NOTHING, number, share
from asyncrl_cli.observe.render import PHASE_STYLES
from asyncrl_cli.observe.run_status import StillStarting, UnreadableStatus, next_command, no_runs, read_status

MOST_ROWS = 20
"""Rows of the table; `--json` has all."""
STYLES = {
    **PHASE_STYLES,
    "killed": "bold red",
    "damaged": "bold red",
    "silent": "bold yellow",
    "stopped": "yellow",
}
LEGEND = (
    "idle: trainer, rollouter; stale: versions per token; age: time since its last report; "
    "next: asyncrl NEXT RUN"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """`state`: the run's phase, or killed, silent, damaged. `age_s`: of its last status. `next`: the next
    command for it. `error`: the last error of a run that failed, was killed or cannot be read. Figures that
    are not known are None."""

    name: str
    state: str
    age_s: float
    next: str
    profile: str = ""
    mode: str = ""
    step: int | None = None
    train_steps: int | None = None
    reward: object = None
    trainer_idle_ratio: object = None
    rollouter_idle_ratio: object = None
    staleness_mean: object = None
    error: str = ""


def overview(runs_dir: Path) -> list[RunRow]:
    """A row for each run, the newest first. Raises ConfigError if there are none."""
    rows = [_row(runs_dir / name, runs_dir) for name in run_names(runs_dir)]
    if not rows:
        raise no_runs(runs_dir)
    return rows


def _row(directory: Path, runs_dir: Path) -> RunRow:
    try:
        found = read_status(str(directory.absolute()), runs_dir)
    except StillStarting:
        return _row_without_status(directory, "starting")
    except UnreadableStatus as damaged:
        return _row_without_status(directory, "damaged", damaged.message)
    except (RefusedError, ConfigError) as ended:  # ... while it started, or it has been removed meanwhile
        return _row_without_status(directory, "killed", ended.message)
    status, state = found.status, found.state
    return RunRow(
        name=found.name,
        state=state,
        age_s=round(found.age_s, 1),
        next=found.next_command,
        profile=status.profile,
        mode=status.mode,
        step=status.progress.step,
        train_steps=status.progress.train_steps,
        reward=status.reward.get("mean"),
        trainer_idle_ratio=status.utilization.get("trainer_idle_ratio"),
        rollouter_idle_ratio=status.utilization.get("rollouter_idle_ratio"),
        staleness_mean=status.staleness.get("mean"),
        error=found.last_error if state in ("failed", "killed") else "",
    )


def _row_without_status(directory: Path, state: str, error: str = "") -> RunRow:
    try:
        age_s = max(0.0, time.time() - directory.stat().st_mtime)
    except OSError:
        age_s = 0.0
    following = next_command(directory, state)
    return RunRow(name=directory.name, state=state, age_s=round(age_s, 1), next=following, error=error)


def table_of(rows: Sequence[RunRow]) -> Group:
    """The newest runs for a terminal, and below them the errors of those that did not end well."""
    table = Table(box=None, pad_edge=False)
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
    return Group(table, *below, Text(LEGEND, "dim"))


def since(seconds: float) -> str:
    """`12 s`, `5 min`, `3 h`, `2 d`."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
