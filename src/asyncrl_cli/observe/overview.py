"""The runs of a directory, one row each: state, figures, and the command that comes next. `asyncrl status`
prints it."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.base.paths import ADDRESS_VARIABLE, as_typed
from asyncrl_cli.base.safe_files import UnsafeFile, open_regular
from asyncrl_cli.checkpoint.find import run_names
from asyncrl_cli.checkpoint.run_directory import never_began
from asyncrl_cli.checkpoint.sealed import checkpoints_in
from asyncrl_cli.observe.format import NOTHING, number, share
from asyncrl_cli.observe.render import PHASE_STYLES
from asyncrl_cli.observe.status import RunStatus, StillStarting, UnreadableStatus, no_runs, read_status

MOST_ROWS = 20
"""Rows of the table; `--json` has all."""
LOG_TAIL_BYTES = 2**16
ERROR_LINE = re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL) [\w.]+: (.+)")
NEXT = {
    "done": "report",
    "stopped": "resume",
    "failed": "resume",
    "killed": "resume",
    "silent": "logs",
    "damaged": "logs",
}
"""State -> the next subcommand. A run in any other state is under way: `status`."""
STYLES = {
    **PHASE_STYLES,
    "killed": "bold red",
    "damaged": "bold red",
    "silent": "bold yellow",
    "stopped": "yellow",
}


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
    reward: Any = None
    trainer_idle_ratio: Any = None
    rollouter_idle_ratio: Any = None
    staleness_mean: Any = None
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
        return _bare(directory, "starting")
    except UnreadableStatus as damaged:
        return _bare(directory, "damaged", damaged.message)
    except (RefusedError, ConfigError) as ended:  # ... while it started, or it has been removed meanwhile
        return _bare(directory, "killed", ended.message)
    status, state = found.status, state_of(found)
    return RunRow(
        name=found.name,
        state=state,
        age_s=round(found.age_s, 1),
        next=next_command(directory, state),
        profile=status["profile"],
        mode=status.get("mode", ""),
        step=status["progress"]["step"],
        train_steps=status["progress"]["train_steps"],
        reward=status["reward"].get("mean"),
        trainer_idle_ratio=status["utilization"].get("trainer_idle_ratio"),
        rollouter_idle_ratio=status["utilization"].get("rollouter_idle_ratio"),
        staleness_mean=status["staleness"].get("mean"),
        error=last_error(directory, status) if state in ("failed", "killed") else "",
    )


def _bare(directory: Path, state: str, error: str = "") -> RunRow:
    """The row of a run without a status that can be read."""
    try:
        age_s = max(0.0, time.time() - directory.stat().st_mtime)
    except OSError:
        age_s = 0.0
    return RunRow(
        name=directory.name,
        state=state,
        age_s=round(age_s, 1),
        next=next_command(directory, state),
        error=error,
    )


def state_of(found: RunStatus) -> str:
    """The phase in the run's status or, if the run no longer writes it, what is seen from outside: killed,
    silent or starting."""
    if found.liveness in ("dead", "silent"):
        return "killed" if found.liveness == "dead" else "silent"
    return "starting" if found.is_resuming else str(found.status["phase"])


def next_command(directory: Path, state: str) -> str:
    """The next command for this run, as it is typed here. A job server has no `report`, but its files may be
    shared."""
    verb, run = NEXT.get(state, "status"), as_typed(directory)
    if verb == "resume" and not checkpoints_in(directory / "checkpoints"):
        replaces = state == "killed" and never_began(directory)
        verb = "train --name" if replaces else "logs"
    elif verb == "report" and ADDRESS_VARIABLE in os.environ:
        run = shlex.quote(str(directory))
    return f"asyncrl {verb} {run}"


def last_error(directory: Path, status: Mapping[str, Any]) -> str:
    """The first line of the error that ended the run: its own, else the last one in the driver's log of its
    newest attempt."""
    if status["error"]:
        return str(status["error"]).splitlines()[0]
    try:
        with open_regular(directory / "logs" / "latest" / "driver.log") as log:
            log.seek(max(0, log.seek(0, 2) - LOG_TAIL_BYTES))
            lines = log.read(LOG_TAIL_BYTES).decode(errors="replace").splitlines()
    except (OSError, UnsafeFile):
        return ""
    errors = deque((match[1] for line in lines if (match := ERROR_LINE.match(line))), maxlen=1)
    return errors.pop() if errors else ""


def table_of(rows: Sequence[RunRow]) -> Group:
    """The newest runs for a terminal, and below them the errors of those that did not end well."""
    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold", min_width=8)
    table.add_column("state", no_wrap=True)
    table.add_column("profile", overflow="fold", min_width=8)
    for heading in ("step", "reward", "idle", "stale", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("next", no_wrap=True)
    for row in rows[:MOST_ROWS]:
        idle = f"{share(row.trainer_idle_ratio)} {share(row.rollouter_idle_ratio)}"
        table.add_row(
            row.name,
            Text(row.state, STYLES.get(row.state, "")),
            row.profile or NOTHING,
            NOTHING if row.step is None else f"{row.step}/{row.train_steps}",
            number(row.reward, 3),
            NOTHING if row.step is None else idle,
            number(row.staleness_mean),
            since(row.age_s),
            row.next.split()[1],
        )
    told = [
        Text.assemble((f"{row.name}: ", "bold red"), f"{row.error}\n  {row.next}")
        for row in rows[:MOST_ROWS]
        if row.error
    ]
    older = (
        [Text(f"... and {len(rows) - MOST_ROWS} older runs: --json lists all", "dim")]
        if len(rows) > MOST_ROWS
        else []
    )
    legend = (
        "idle: trainer, rollouter; stale: versions per token; age: time since its last report; next: "
        "asyncrl NEXT RUN"
    )
    return Group(table, *older, *told, Text(legend, "dim"))


def since(seconds: float) -> str:
    """`12 s`, `5 min`, `3 h`, `2 d`."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
