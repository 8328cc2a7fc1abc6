"""`asyncrl tune`: searches for faster settings on a virtual clock, prints what it found, all SIMULATED, and
writes it as a profile."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.base.errors import counted
from asyncrl_cli.cli.console import (
    figures_table,
    print_json,
    print_prose,
    print_text,
    print_whole,
    say,
    stderr,
    warn,
)
from asyncrl_cli.cli.options import (
    MOST_DEVICES,
    RUNS_DIR,
    JsonOption,
    RunsDirOption,
    SetOption,
    number_option,
    profile_option,
    text_argument,
    text_option,
    workload_names,
)
from asyncrl_cli.cli.tune_answers import answer, check_new

if TYPE_CHECKING:
    from asyncrl_cli.bench.recommendation import TuneRequest, TuneResult
    from asyncrl_cli.bench.search import SearchResult

EXAMPLES = """
  asyncrl tune verl-7b-math-128 --max-staleness 1 --out my.toml
  asyncrl tune runs/NAME

Searches split, K, eta and slots. It takes a minute or two and needs no GPU."""
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


def tune(
    reference: Annotated[
        str,
        text_argument("WORKLOAD|RUN", "A workload by name or file, or a recorded run.", workload_names),
    ],
    profile: Annotated[
        str | None, profile_option("The profile to begin with. Default: the run's own, or partial-rollout.")
    ] = None,
    sets: SetOption = None,
    gpus: Annotated[
        int | None, number_option("--gpus", "GPUs of all nodes together.", least=0, most=MOST_DEVICES)
    ] = None,
    max_staleness: Annotated[
        int | None,
        number_option(
            "--max-staleness", "The strict bound in versions. Default: the profile's.", least=0, metavar="S"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        text_option("--out", "FILE", "Write the recommended settings to a new profile."),
    ] = None,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if",
            help="No search: what single changes to the setting would do, and which resource limits it.",
        ),
    ] = False,
    scale: Annotated[
        str | None,
        text_option(
            "--scale",
            "GPUS",
            "No search: how the speed grows with GPUs, such as 32,64,128,256,512, for the profile or for all "
            "modes. With --out FILE.html also as a chart.",
        ),
    ] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Search, by simulation, for the settings with which a workload, or a run of yours, would be fastest."""
    from asyncrl_cli.bench.recommendation import TuneRequest
    from asyncrl_cli.bench.recommendation import tune as search
    from asyncrl_cli.observe.screen import ProgressLine

    given = tuple(sets or ())
    asked = TuneRequest(
        reference=reference, runs_dir=runs_dir, profile=profile, sets=given, gpus=gpus, bound=max_staleness
    )
    if what_if or scale is not None:
        answer(asked, scale, out, what_if=what_if, as_json=as_json)
        return
    if out is not None:
        check_new(out, ".toml")  # now: a search would be wasted
    with ProgressLine("auto", stderr()) as progress:
        tuned = search(asked, progress)
    for setting, reason in tuned.found.failed.items():
        its_sets = " ".join(setting.sets)
        warn(f"the simulated run of {setting.split} failed and is left out: {reason} ({its_sets})")
    if out is not None:
        _write_profile(tuned, asked, out)
        say(f"wrote {out}")
    if as_json:
        print_json(tuned.to_json() | {"profile_file": out and str(out)})
    else:
        _print(tuned, reference, out)


def _print(tuned: TuneResult, reference: str, out: Path | None) -> None:
    from asyncrl_cli.bench.recommendation import LIMITS

    best = tuned.found.best
    figure = f"seconds per {tuned.window_groups} groups (W)"
    print_prose(f"SIMULATED: {tuned.workload.name}, {figure}, {tuned.bound}")
    print_prose(f"{len(tuned.found.outcomes)} settings tried; these had long runs, or are on the front.\n")
    _print_table(tuned.found)
    print_text(LEGEND)
    predicted = f"predicted {best.window_time_s:.2f} s per {tuned.window_groups} groups"
    print_prose(f"recommended (SIMULATED): {best.setting.split} {best.setting.split_names}, {predicted}")
    for line in remarks(tuned):
        print_prose(line)
    # Each `--set` on a line of its own, so that all can be copied from a narrow terminal.
    print_text("\n" + " \\\n".join(f"  --set {shlex.quote(entry)}" for entry in tuned.recommended_sets))
    if out is None:
        writes = "the same search with --out my.toml writes a profile for `bench` and `train`"
        print_prose(f"\nto try it: {writes}")
    else:
        # `bench --set` would change the baseline, too. A run's profile may have that run's name.
        written, baseline = f"--profile {shlex.quote(str(out))}", shlex.quote(tuned.profile)
        simulated = "" if tuned.fit else f" \\\n    --simulate {shlex.quote(reference)}"
        print_text(f"\n{out} is a profile with these keys; to try it:")
        print_text(f"  asyncrl bench --compare {baseline} {written}{simulated}")
        print_text(f"  asyncrl train {written} --name {shlex.quote(out.stem)}")
    print_prose("\nwhat this search cannot know")
    for limit in LIMITS:
        print_prose(f"- {limit}")
    if notes := tuned.workload.notes.strip():
        print_prose(f"\nnotes of the workload {tuned.workload.name}\n{notes}")


def _print_table(found: SearchResult) -> None:
    """The rows with long runs or on the front, and what is recommended."""
    from asyncrl_cli.bench.search import front
    from asyncrl_cli.bench.space import HEADINGS

    headings = ("", *HEADINGS, "stale", "seconds", "idle")
    table = figures_table(headings, texts=2, gap=1)  # it fits into 80 columns
    undominated = front(found.rows)
    shown = [row for row in found.rows if row.is_long or row in undominated]
    shown += [found.current] if found.current and found.current not in shown else []
    for row in sorted(shown, key=lambda row: row.rank):
        marks = {
            "*": row in undominated,
            "best": row == found.best,
            "now": row == found.current,
            "> S": row not in found.rows,
            "~": not row.is_long,
        }
        table.add_row(
            " ".join(mark for mark, holds in marks.items() if holds),
            *(str(getattr(row.setting, name)) for name in HEADINGS.values()),
            f"{row.staleness_mean:.2f}",
            f"{row.window_time_s:.5g}",
            f"{row.trainer_idle_ratio:.0%} {row.rollouter_idle_ratio:.0%}",
        )
    print_whole(table)


def remarks(tuned: TuneResult) -> Iterator[str]:
    """How the recommended setting compares with the current one, with itself on the current split or without
    a bound, and with a measured time; and reasons to doubt the gain."""
    from asyncrl_cli.simulate.workload_files import WINDOW

    found, best_s, known = tuned.found, tuned.found.best.window_time_s, tuned.known
    current, speedup, there, free = found.current, found.speedup, found.on_current_split, found.without_bound
    if current is None or speedup is None:
        yield "the current setting could not be simulated: the recommendation cannot be compared with it"
    elif found.best == current:
        yield "the current setting is the recommended one"
    else:
        beyond = "" if found.space.allows(current.setting) else "; it is beyond the bound"
        yield f"the current setting: {current} ({speedup:.2f}x){beyond}"
        if there is not None:
            yield f"the recommended keys on the current split: {there} ({there.window_time_s / best_s:.2f}x)"
    if free is not None:
        oldest = f"tokens up to {counted(round(free.staleness_max), 'version')} old"
        yield f"without the strict bound: {free.window_time_s:.2f} s, {oldest}"
    if known is not None and known.window_time_s is not None:
        gain = known.window_time_s / best_s  # includes the simulation's own error
        yield f"{known.evidence} for the current setting: {known.window_time_s:.2f} s ({gain:.2f}x)"
    if speedup is not None and speedup > 1 and tuned.error is None:
        yield f"nothing measured tells whether the gain, {speedup - 1:.0%}, is real: only a run can"
    elif speedup is not None and speedup > 1 and tuned.error is not None:
        verb = "exceeds" if speedup - 1 > tuned.error else "is within"
        error = f"the error of the simulation, {tuned.error:.0%} of a window"
        yield f"the gain, {speedup - 1:.0%}, {verb} {error}"
    window_s = next((one.measured_s for one in tuned.fit if one.part == WINDOW), 0.0)
    for one in tuned.fit:
        off = f"{one.measured_s:.4g} s {one.evidence}, {one.predicted_s:.4g} s simulated"
        if one.part == WINDOW:
            yield f"SIMULATED, the calibrated run itself: a window {off}"
        elif abs(one.predicted_s - one.measured_s) > DOUBTFUL * window_s:
            yield f"do not trust what follows from {one.part}: {off}"


def _write_profile(tuned: TuneResult, asked: TuneRequest, path: Path) -> None:
    """Write the recommended setting as a profile that extends the one that was tuned.

    Raises RefusedError if the file exists by now, OSError if it cannot be written.
    """
    from asyncrl_cli import __version__
    from asyncrl_cli.checkpoint.run_directory import stem_of
    from asyncrl_cli.cli.submit import set_words
    from asyncrl_cli.profile.loaded import load, set_layer
    from asyncrl_cli.profile.toml_files import is_file_reference, locate, toml_key, toml_value

    check_new(path, ".toml")
    best, name = tuned.found.best, tuned.workload.name
    options = {"--profile": asked.profile, "--gpus": asked.gpus, "--max-staleness": asked.bound}
    options["--runs-dir"] = None if asked.runs_dir == RUNS_DIR else str(asked.runs_dir)
    words = [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
    command = shlex.join(["asyncrl", "tune", asked.reference, *words, *set_words(asked.sets)])
    extended = tuned.profile
    if is_file_reference(extended):
        # Relative if the file lies below the new one's directory, so that both can be moved together.
        above, here = locate(extended, relative_to=Path.cwd()), path.parent.resolve()
        extended = f"./{above.relative_to(here)}" if above.is_relative_to(here) else str(above)
    lines = [
        f"# Recommended by a SIMULATED search (asyncrl {__version__}):",
        f"#   {command}",
        f"# {best.setting.split} {best.setting.split_names}, {best.window_time_s:.4g} s per "
        f"{tuned.window_groups} groups.",
        *([] if tuned.fit else [f"# What {name} itself sets ([profile]: model, sizes) is not in this file."]),
        f"extends = {toml_value(extended)}",
        f"purpose = {toml_value(f'Tuned for {name} by a simulated search: {tuned.bound}.')}",
        "",
    ]
    values = set_layer(tuned.recommended_sets).values
    if load(tuned.profile).profile.run.name:  # a run's profile has its name, which is taken
        values = {"run.name": stem_of(path.stem), **values}
    for key, value in values.items():
        lines.append(f"{'.'.join(map(toml_key, key.split('.')))} = {toml_value(value)}")
    with path.open("x", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
