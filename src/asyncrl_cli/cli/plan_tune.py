"""`asyncrl plan --tune`: the search on the virtual clock, its progress and what it found. All of it is SIMULATED."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl_cli.cli.console import print_json, print_text, say, stderr, stdout, warn
from asyncrl_cli.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl_cli.bench.pareto import Row
    from asyncrl_cli.bench.tune import Tuned
    from asyncrl_cli.simulate.references import Residual
    from asyncrl_cli.simulate.workload import Workload

SHORTER = "where windows are shorter, versions follow faster: the same age of a token counts as more versions"
HEADERS = ("split", "K", "batches", "eta", "slots", "bound", "stale", "seconds", "idle", "")
LEGEND = (
    "* no other is both faster and less stale; best: recommended; now: the current setting; > S: beyond the bound. "
    "~: of a short run, a rough figure. batches: async_training.require_batches; stale: mean versions per token; "
    "idle: of trainer and rollout"
)


def print_tuned(
    reference: str,
    profile: str | None,
    sets: list[str] | None,
    *,
    gpus: int | None,
    bound: int | None,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """Search and print; stdout has the data, stderr the progress."""
    from dataclasses import asdict

    from asyncrl_cli.bench.tune import DEFAULT_PROFILE, tune
    from asyncrl_cli.observe.starting import Starting
    from asyncrl_cli.simulate.references import residuals

    workload, own_profile = workload_of(reference, runs_dir)
    with Starting("auto", stderr()) as progress:
        fit = residuals(workload) if own_profile else []
        tuned = tune(
            workload,
            profile or own_profile or DEFAULT_PROFILE,
            sets or [],
            gpus=gpus,
            bound=bound,
            on_progress=lambda done, planned: progress("SIMULATED: windows", done, planned),
        )
    for setting, reason in tuned.found.failed:
        warn(f"the simulated run of {setting.split} failed and is left out: {reason} ({' '.join(setting.sets())})")
    if as_json:
        print_json(tuned.to_json() | {"residuals": [asdict(residual) for residual in fit]})
    else:
        _print_fit(fit)
        _print_table(tuned)
        _print_recommendation(tuned)
        _print_limits(tuned)


def workload_of(reference: str, runs_dir: Path) -> tuple[Workload, str | None]:
    """WORKLOAD|RUN: a run's directory or its name is calibrated and comes with its own profile."""
    from asyncrl_cli.simulate.workloads import load_workload

    for directory in (Path(reference).expanduser(), runs_dir / reference):
        if (directory / "profile.toml").is_file() and (directory / "metrics.jsonl").is_file():
            from asyncrl_cli.simulate.calibrate import calibrate

            say(f"calibrating a workload from {directory}")
            return calibrate(directory), str(directory / "profile.toml")
    try:
        return load_workload(reference), None
    except ConfigError as error:
        raise ConfigError(f"{error}; nor is there a finished run of that name in {runs_dir}", hint=error.hint) from None


def _print_table(tuned: Tuned) -> None:
    from rich.table import Table

    bound = f"at most {tuned.bound} version{'' if tuned.bound == 1 else 's'} of staleness"
    stdout().print(f"SIMULATED: {tuned.workload.name}, seconds per {tuned.window_groups} groups (W), {bound}", soft_wrap=True)
    stdout().print(
        f"{tuned.found.num_settings} settings tried; these had long runs or are on the front. {LEGEND}\n", soft_wrap=True
    )
    table = Table(box=None, pad_edge=False)
    for header in HEADERS:
        table.add_column(header, justify="left" if header in ("split", "") else "right", no_wrap=True)
    undominated, current = tuned.front, tuned.found.current
    rows = [row for row in tuned.found.rows if row.is_long or row in undominated]
    if current is not None and current not in rows:
        rows.append(current)
    for row in sorted(rows, key=lambda row: row.measured.window_time_s):
        marks = {
            "*": row in undominated,
            "best": row == tuned.best,
            "now": row == current,
            "> S": row not in tuned.found.rows,
            "~": not row.is_long,
        }
        table.add_row(*_cells(row), " ".join(mark for mark, holds in marks.items() if holds))
    stdout().print(table)


def _cells(row: Row) -> tuple[str, ...]:
    setting, measured = row.setting, row.measured
    return (
        setting.split,
        str(setting.window_steps),
        str(setting.require_batches),
        str(setting.eta),
        str(setting.slots),
        str(setting.max_staleness),
        f"{measured.staleness_mean:.2f}",
        f"{measured.window_time_s:.5g}",
        f"{measured.trainer_idle_ratio:.0%} {measured.rollouter_idle_ratio:.0%}",
    )


def _print_recommendation(tuned: Tuned) -> None:
    best, current = tuned.best, tuned.found.current
    text = f"\nrecommended (SIMULATED): {best.setting.split} trainer:rollout, predicted {best.measured.window_time_s:.2f} s"
    text += f" per {tuned.window_groups} prompts"
    if current is not None:
        text += f"; the current setting, {current.setting.split}, {current.measured.window_time_s:.2f} s ({tuned.speedup:.2f}x)"
    stdout().print(text, soft_wrap=True)
    print_text(" ".join(f"--set {entry}" for entry in tuned.recommended_sets))


def _print_limits(tuned: Tuned) -> None:
    from asyncrl_cli.bench.tune import LIMITS

    stdout().print("\nwhat this search cannot know")
    for limit in LIMITS:
        stdout().print(f"- {limit}", soft_wrap=True)
    if len({row.setting.window_batches for row in tuned.found.rows}) > 1:
        stdout().print(f"- {SHORTER}", soft_wrap=True)
    if notes := tuned.workload.notes.strip():
        stdout().print(f"\nnotes of the workload {tuned.workload.name}")
        print_text(notes)


def _print_fit(fit: Sequence[Residual]) -> None:
    """How well the run that a workload was calibrated on comes out of its own simulation."""
    for one in fit:
        found = f"{one.measured_s:.4g} s measured, {one.predicted_s:.4g} s simulated ({one.ratio - 1:+.1%})"
        print_text(f"SIMULATED, the calibrated run itself: {one.part} {found}")
