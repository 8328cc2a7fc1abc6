"""`asyncrl plan --tune`: shows the search's progress, prints its results, all SIMULATED, and writes them as a
profile."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from rich.table import Table

from asyncrl_cli import __version__
from asyncrl_cli.base.errors import ConfigError, RefusedError, counted
from asyncrl_cli.bench.recommendation import LIMITS, Asked, Tuned, tune
from asyncrl_cli.bench.search import SAME_TIME, Found, front
from asyncrl_cli.bench.space import HEADINGS, Setting
from asyncrl_cli.cli.console import RUNS_DIR, print_json, print_prose, print_text, say, stderr, stdout, warn
from asyncrl_cli.cli.submit import set_words
from asyncrl_cli.observe.starting import Starting
from asyncrl_cli.profile.loaded import set_layer
from asyncrl_cli.profile.toml_files import is_file_reference, locate, toml_key, toml_value
from asyncrl_cli.simulate.workload_files import WINDOW, Residual

SHORTER = "where windows are shorter, versions follow faster: the same age of a token counts as more versions"
DOUBTFUL = 0.05
"""A part that is simulated wrong by more than this share of a window is named."""
LEGEND = """
split: trainer:rollout; K: train steps per window; batches: require_batches
eta: staleness_threshold; bound: max_staleness; stale: mean versions per token
placement: of a group's responses, one by one or all on one worker
idle: of trainer and rollout; ~: of a short run, a rough figure
*: no other is both faster and less stale; best: recommended
now: the current setting; > S: beyond the bound

"""


def print_tuned(asked: Asked, out: Path | None, *, as_json: bool) -> None:
    """Search, print the results on stdout and the progress on stderr, and write what is recommended to the
    profile file `out`."""
    if out is not None:
        _check_new(out)
    with Starting("auto", stderr()) as progress:
        tuned = tune(asked, progress)
    for setting, reason in tuned.found.failed.items():
        warn(
            f"the simulated run of {setting.split} failed and is left out: {reason} "
            f"({' '.join(setting.sets)})"
        )
    if out is not None:
        write_profile(tuned, asked, out)
        say(f"wrote {out}")
    if as_json:
        return print_json(tuned.to_json() | {"profile_file": out and str(out)})
    _print_table(tuned)
    for line in (*_against_current(tuned.found), *_against_others(tuned)):
        print_prose(line)
    for one in tuned.fit:
        found = (
            f"{one.part} {one.measured_s:.4g} s {one.evidence}, {one.predicted_s:.4g} s simulated "
            f"({one.ratio - 1:+.1%})"
        )
        print_prose(f"SIMULATED, the calibrated run itself: {found}")
    # Each `--set` on a line of its own, so that all can be copied from a narrow terminal.
    print_text("\n" + " \\\n".join(f"  --set {shlex.quote(entry)}" for entry in tuned.recommended_sets))
    _print_how_to_try(tuned, asked.reference, out)
    print_prose("\nwhat this search cannot know")
    windows = {row.setting.window_steps * row.setting.require_batches for row in tuned.found.rows}
    for limit in (*LIMITS, *([SHORTER] if len(windows) > 1 else ())):
        print_prose(f"- {limit}")
    if notes := tuned.workload.notes.strip():
        print_prose(f"\nnotes of the workload {tuned.workload.name}\n{notes}")


def _print_table(tuned: Tuned) -> None:
    """The rows with long runs or on the front, and what is recommended."""
    allowed, best, current = tuned.found.rows, tuned.found.best, tuned.found.current
    print_prose(
        f"SIMULATED: {tuned.workload.name}, seconds per {tuned.window_groups} groups (W), {tuned.bound}"
    )
    print_prose(f"{len(tuned.found.outcomes)} settings tried; these had long runs, or are on the front.\n")
    table = Table(box=None, pad_edge=False)
    for heading in ("", *HEADINGS, "stale", "seconds", "idle"):
        table.add_column(heading, justify="left" if heading in ("split", "") else "right", no_wrap=True)
    undominated = front(allowed)
    rows = {
        row.setting: row
        for row in (*allowed, *([current] if current else ()))
        if row.is_long or row in undominated
    }
    for row in sorted(rows.values(), key=lambda row: row.rank):
        marks = {
            "*": row in undominated,
            "best": row == best,
            "now": row == current,
            "> S": row not in allowed,
            "~": not row.is_long,
        }
        idle = f"{row.trainer_idle_ratio:.0%} {row.rollouter_idle_ratio:.0%}"
        figures = (f"{row.staleness_mean:.2f}", f"{row.window_time_s:.5g}", idle)
        table.add_row(
            " ".join(mark for mark, holds in marks.items() if holds), *_shown(row.setting).values(), *figures
        )
    stdout().print(table)
    print_text(LEGEND)
    predicted = f"predicted {best.window_time_s:.2f} s per {tuned.window_groups} groups"
    print_prose(f"recommended (SIMULATED): {best.setting.split} {best.setting.split_names}, {predicted}")


def _shown(setting: Setting) -> dict[str, str]:
    return {heading: str(getattr(setting, name)) for heading, name in HEADINGS.items()}


def _against_current(found: Found) -> Iterator[str]:
    """How the recommended setting compares with the current one: in all, what the bound costs, and what the
    split does."""
    best, current, speedup, there = found.best, found.current, found.speedup, found.on_current_split
    if current is None or speedup is None:
        yield "the current setting could not be simulated: the recommendation cannot be compared with it"
        return
    if best == current:
        yield "the current setting is the recommended one"
    else:
        then = _shown(best.setting)
        differences = ", ".join(
            f"{heading} {now}" for heading, now in _shown(current.setting).items() if now != then[heading]
        )
        text = f"the current setting, {current} ({speedup:.2f}x), has {differences}"
        if not found.space.allows(current.setting):
            text += (
                f"; it is beyond the bound: at most {counted(current.setting.max_staleness, 'version')} "
                "of staleness."
            )
            text += f" The price of the bound: {1 / speedup:.2f} times its time" if speedup < 1 else ""
        yield text
    if current.setting.split == best.setting.split:
        others = [row for row in found.rows if row.is_long and row.setting.split != current.setting.split]
        if others:
            yield f"the split stays: the fastest other one, {others[0]}"
    elif there is not None:
        rest, split = current.window_time_s / there.window_time_s, there.window_time_s / best.window_time_s
        small = ", which is less than a simulation can tell" if abs(split - 1) <= SAME_TIME else ""
        yield (
            f"its K, batches, eta and slots on the current split, {there}: they make {rest:.2f}x, the "
            f"split {split:.2f}x{small}"
        )


def _against_others(tuned: Tuned) -> Iterator[str]:
    """How the recommended setting compares with itself without a bound and with a measured time, and reasons
    to doubt the gain."""
    best_s, free, known, speedup = (
        tuned.found.best.window_time_s,
        tuned.found.without_bound,
        tuned.known,
        tuned.found.speedup,
    )
    if free is not None:
        cost, stalest = best_s / free.window_time_s - 1, counted(round(free.staleness_max), "version")
        told = "no more than a simulation can tell" if abs(cost) <= SAME_TIME else f"{cost:.1%}"
        without = f'without one (on_stale = "accept") {free.window_time_s:.2f} s, tokens up to {stalest} old'
        yield f"the strict bound costs {told}: {without}"
    if known is not None:  # the factor includes the simulation's own error
        yield (
            f"{known.evidence} for the current setting: {known.window_time_s:.2f} s "
            f"({known.window_time_s / best_s:.2f}x)"
        )
    if speedup is not None and speedup > 1:
        yield _gain_against_error(speedup - 1, tuned.error)
    yield from _doubtful_parts(tuned.fit)


def _gain_against_error(gain: float, error: float | None) -> str:
    if error is None:
        return (
            "nothing measured tells how far the simulation is off: only a run can tell whether the gain, "
            f"{gain:.0%}, is real"
        )
    size = f"the error of the simulation, {error:.0%} of a window of the current setting"
    return (
        (f"the gain, {gain:.0%}, exceeds {size}")
        if gain > error
        else f"the gain, {gain:.0%}, is within {size}: it may be nothing"
    )


def _doubtful_parts(fit: Sequence[Residual]) -> Iterator[str]:
    """The parts of the calibrated run that the simulation does not reproduce, if they matter."""
    window_s = next((one.measured_s for one in fit if one.part == WINDOW), 0.0)
    for one in fit:
        off_s = abs(one.predicted_s - one.measured_s)
        if one.part != WINDOW and off_s > DOUBTFUL * window_s:
            off = (
                f"{one.measured_s:.4g} s {one.evidence}, {one.predicted_s:.4g} s simulated, "
                f"{off_s / window_s:.0%} of a window"
            )
            yield f"do not trust what follows from {one.part}: {off} apart"


def _print_how_to_try(tuned: Tuned, workload: str, out: Path | None) -> None:
    """Print the commands that try the setting. They need a profile file: `bench --set` would change the
    baseline, too."""
    if out is None:
        print_prose(
            "\nto try it: the same search with --out my.toml writes a profile for `bench --profile` "
            "and `train --profile`"
        )
        return
    own, simulated = f"--profile {shlex.quote(str(out))}", f" \\\n    --simulate {shlex.quote(workload)}"
    print_text(f"\n{out} is a profile with these keys; to try it:")
    print_text(
        f"  asyncrl bench --compare {shlex.quote(tuned.profile)} {own}{'' if tuned.fit else simulated}"
    )
    # a run's profile may have that run's name
    print_text(f"  asyncrl train {own} --name {shlex.quote(out.stem)}")


def _check_new(path: Path) -> None:
    """Raises ConfigError or RefusedError unless `path` can be written. Called before the search, which would
    else be wasted."""
    if path.suffix != ".toml":
        raise ConfigError(
            f"--out {path}: a profile's file ends in .toml", hint=f"--out {path.with_suffix('.toml')}"
        )
    if path.exists():
        others = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
        raise RefusedError(
            f"{path} exists and is not overwritten",
            hint=f"--out {next(other for other in others if not other.exists())}",
        )
    if not path.parent.is_dir():
        raise RefusedError(f"there is no directory {path.parent}", hint=f"--out {path.name}")


def write_profile(tuned: Tuned, asked: Asked, path: Path) -> None:
    """Write the recommended setting as a profile that extends the one that was tuned.

    Raises RefusedError if the file exists by now, OSError if it cannot be written.
    """
    _check_new(path)
    best, current = tuned.found.best, tuned.found.current
    before = f" (before: {current.setting.split}, {current.window_time_s:.4g} s)" if current else ""
    values = set_layer(tuned.recommended_sets).values
    lines = [
        f"# Recommended by a SIMULATED search (asyncrl {__version__}):",
        f"#   {_command(asked)}",
        f"# {best.setting.split} {best.setting.split_names}, {best.window_time_s:.4g} s per "
        f"{tuned.window_groups} groups{before}.",
        *(
            []
            if tuned.fit
            else [f"# What {tuned.workload.name} itself sets ([profile]: model, sizes) is not in this file."]
        ),
        f"extends = {toml_value(_extended(tuned.profile, path))}",
        f"purpose = {toml_value(f'Tuned for {tuned.workload.name} by a simulated search: {tuned.bound}.')}",
        "",
        *(
            f"{'.'.join(map(toml_key, key.split('.')))} = {toml_value(value)}"
            for key, value in values.items()
        ),
    ]
    with path.open("x", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def _command(asked: Asked) -> str:
    """The command that repeats this search, without `--out`."""
    runs_dir = None if asked.runs_dir == RUNS_DIR else asked.runs_dir
    options = {
        "--profile": asked.profile,
        "--gpus": asked.gpus,
        "--max-staleness": asked.bound,
        "--runs-dir": runs_dir,
    }
    words = [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
    return shlex.join(["asyncrl", "plan", "--tune", asked.reference, *words, *set_words(asked.sets)])


def _extended(reference: str, path: Path) -> str:
    """What to extend: a profile's name, or a file; a relative path if the file lies below the new one's
    directory, so that both can be moved together."""
    if not is_file_reference(reference):
        return reference
    above, here = locate(reference, relative_to=Path.cwd(), asked_by="--profile"), path.parent.resolve()
    return f"./{above.relative_to(here)}" if above.is_relative_to(here) else str(above)
