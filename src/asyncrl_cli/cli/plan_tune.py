"""`asyncrl plan --tune`: runs the search on the virtual clock, shows its progress and prints its results, all SIMULATED."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from asyncrl_cli.bench.search import SAME_TIME, Row, front
from asyncrl_cli.bench.space import DEFAULT_PROFILE
from asyncrl_cli.bench.tune import LIMITS, Tuned, check_new, tune, write_profile
from asyncrl_cli.cli.console import RUNS_DIR, print_json, print_prose, print_text, say, stderr, stdout, warn
from asyncrl_cli.errors import ConfigError
from asyncrl_cli.observe.starting import Starting
from asyncrl_cli.plan.cluster import counted
from asyncrl_cli.safe_files import expand
from asyncrl_cli.simulate.calibrate import calibrate
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import WINDOW, Residual, load_workload, residuals

SHORTER = "where windows are shorter, versions follow faster: the same age of a token counts as more versions"
HEADERS = ("split", "K", "batches", "eta", "slots", "bound", "stale", "seconds", "idle", "")
LEGEND = """
split: trainer:rollout; K: train steps per window; batches: require_batches
eta: staleness_threshold; bound: max_staleness; stale: mean versions per token
idle: of trainer and rollout; ~: of a short run, a rough figure
*: no other is both faster and less stale; best: recommended
now: the current setting; > S: beyond the bound

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A search as its user asked for it. `reference` is a workload, or a run that has been measured here."""

    reference: str
    profile: str | None
    sets: tuple[str, ...]
    gpus: int | None
    bound: int | None
    runs_dir: Path
    out: Path | None

    @property
    def command(self) -> str:
        """The command that repeats this search, without `--out`."""
        options: list[str] = []
        for flag, value in (("--profile", self.profile), ("--gpus", self.gpus), ("--max-staleness", self.bound)):
            options += [] if value is None else [flag, str(value)]
        for entry in self.sets:
            options += ["--set", entry]
        if self.runs_dir != RUNS_DIR:
            options += ["--runs-dir", str(self.runs_dir)]
        return shlex.join(["asyncrl", "plan", "--tune", self.reference, *options])


def print_tuned(asked: Asked, *, as_json: bool) -> None:
    """Search, and print the results on stdout, the progress on stderr."""
    if asked.out is not None:
        check_new(asked.out)
    workload, own_profile = workload_of(asked.reference, asked.runs_dir)
    is_run = own_profile is not None
    with Starting("auto", stderr()) as progress:
        fit = residuals(workload) if is_run else []  # how well the simulation reproduces the run itself
        tuned = tune(
            workload,
            asked.profile or own_profile or DEFAULT_PROFILE,
            asked.sets,
            gpus=asked.gpus,
            bound=asked.bound,
            on_progress=lambda done, planned: progress("SIMULATED: windows, at most", done, planned),
        )
        progress(f"SIMULATED: {len(tuned.found.outcomes)} settings tried in {tuned.found.windows} windows")
    for setting, reason in tuned.found.failed.items():
        warn(f"the simulated run of {setting.split} failed and is left out: {reason} ({' '.join(setting.sets())})")
    if asked.out is not None:
        write_profile(tuned, asked.out, asked.command, is_run=is_run)
        say(f"wrote {asked.out}")
    if as_json:
        written = None if asked.out is None else str(asked.out)
        print_json(tuned.to_json() | {"residuals": [asdict(residual) for residual in fit], "profile_file": written})
        return
    for one in fit:
        found = f"{one.part} {one.measured_s:.4g} s {one.evidence}, {one.predicted_s:.4g} s simulated ({one.ratio - 1:+.1%})"
        print_prose(f"SIMULATED, the calibrated run itself: {found}")
    _print_table(tuned)
    _print_recommendation(tuned, fit)
    _print_how_to_try(tuned, asked, is_run=is_run)
    _print_limits(tuned)


def workload_of(reference: str, runs_dir: Path) -> tuple[Workload, str | None]:
    """The workload that WORKLOAD|RUN names. For a run (a name or a directory) it is calibrated; the second value is its profile."""
    for directory in (expand(reference), runs_dir / reference):
        if (directory / "profile.toml").is_file() and (directory / "metrics.jsonl").is_file():
            say(f"calibrating a workload from {directory}")
            return calibrate(directory), str(directory / "profile.toml")
    try:
        return load_workload(reference), None
    except ConfigError as error:
        raise ConfigError(f"{error}; nor is there a finished run of that name in {runs_dir}", hint=error.hint) from None


def _print_table(tuned: Tuned) -> None:
    print_prose(f"SIMULATED: {tuned.workload.name}, seconds per {tuned.window_groups} groups (W), {tuned.bound}")
    print_prose(f"{len(tuned.found.outcomes)} settings tried; these had long runs, or are on the front.\n")
    table = Table(box=None, pad_edge=False)
    for header in HEADERS:
        table.add_column(header, justify="left" if header in ("split", "") else "right", no_wrap=True)
    allowed, best, current = tuned.found.rows, tuned.found.best, tuned.found.current
    undominated = front(allowed)
    rows = {row.setting: row for row in (*allowed, *([current] if current else ())) if row.is_long or row in undominated}
    for row in sorted(rows.values(), key=lambda row: row.rank):
        marks = {
            "*": row in undominated,
            "best": row == best,
            "now": row == current,
            "> S": row not in allowed,
            "~": not row.is_long,
        }
        table.add_row(*_cells(row), " ".join(mark for mark, holds in marks.items() if holds))
    stdout().print(table)
    print_text(LEGEND)


def _cells(row: Row) -> tuple[str, ...]:
    setting = row.setting
    return (
        setting.split,
        str(setting.window_steps),
        str(setting.require_batches),
        str(setting.eta),
        str(setting.slots),
        str(setting.max_staleness),
        f"{row.staleness_mean:.2f}",
        f"{row.window_time_s:.5g}",
        f"{row.trainer_idle_ratio:.0%} {row.rollouter_idle_ratio:.0%}",
    )


def _print_recommendation(tuned: Tuned, fit: Sequence[Residual]) -> None:
    """Print the best setting. Each `--set` is on a line of its own, so that all can be copied from a narrow terminal."""
    best = tuned.found.best
    print_prose(
        f"recommended (SIMULATED): {best.setting.split} trainer:rollout, predicted {best.window_time_s:.2f} s "
        f"per {tuned.window_groups} groups"
    )
    for line in (_against_current(tuned), _of_split(tuned), _against_known(tuned), _doubt(tuned.speedup, fit)):
        if line:
            print_prose(line)
    print_text("\n" + " \\\n".join(f"  --set {shlex.quote(entry)}" for entry in tuned.recommended_sets))


def _against_current(tuned: Tuned) -> str:
    """How the recommended setting compares with the current one, or what the bound costs."""
    best, current, speedup = tuned.found.best, tuned.found.current, tuned.speedup
    if current is None or speedup is None:
        return "the current setting could not be simulated: the recommendation cannot be compared with it"
    if best.setting == current.setting:
        return "the current setting is the recommended one"
    cells = zip(HEADERS[:6], _cells(current), _cells(best), strict=False)
    differences = ", ".join(f"{name} {now}" for name, now, then in cells if now != then)
    text = f"the current setting, {current} ({speedup:.2f}x), has {differences}"
    if tuned.found.space.allows(current.setting):
        return text
    text += f"; it is beyond the bound: at most {counted(current.setting.max_staleness, 'version')} of staleness."
    return f"{text} The price of the bound: {1 / speedup:.2f} times its time" if speedup < 1 else text


def _of_split(tuned: Tuned) -> str:
    """How much of the speedup is due to the split, and how much to the other keys."""
    best, current, same_split = tuned.found.best, tuned.found.current, tuned.found.on_current_split
    if current is not None and current.setting.split == best.setting.split:
        others = (row for row in tuned.found.rows if row.is_long and row.setting.split != current.setting.split)
        fastest = next(others, None)
        return f"the split stays: the fastest other one, {fastest}" if fastest else ""
    if same_split is None or current is None:
        return ""
    rest, split = current.window_time_s / same_split.window_time_s, same_split.window_time_s / best.window_time_s
    text = f"its K, batches, eta and slots on the current split, {same_split}: they make {rest:.2f}x, the split {split:.2f}x"
    return f"{text}, which is less than a simulation can tell" if abs(split - 1) <= SAME_TIME else text


def _against_known(tuned: Tuned) -> str:
    """The known time of the current setting, against the predicted best. This factor includes the simulation's own error."""
    if tuned.known is None:
        return ""
    known_s, best_s = tuned.known.window_time_s, tuned.found.best.window_time_s
    return f"{tuned.known.evidence} for the current setting: {known_s:.2f} s ({known_s / best_s:.2f}x)"


def _doubt(speedup: float | None, fit: Sequence[Residual]) -> str:
    """A caveat, if the simulation is off on the calibrated run itself by more than the gain that it predicts."""
    off = max((abs(one.ratio - 1) for one in fit if one.part == WINDOW), default=0.0)
    if speedup is None or not 0 < speedup - 1 < off:
        return ""
    return f"that gain, {speedup - 1:.0%}, is within the {off:.0%} that the simulation of the calibrated run itself is off by"


def _print_how_to_try(tuned: Tuned, asked: Asked, *, is_run: bool) -> None:
    """Print the commands that try the setting. They need a profile file: `bench --set` would change the baseline, too."""
    if asked.out is None:
        print_prose("\nto try it: the same search with --out my.toml writes a profile for `bench --profile` and `train --profile`")
        return
    compared = f"asyncrl bench --compare {shlex.quote(tuned.profile)}"
    simulated = "" if is_run else f" \\\n    --simulate {shlex.quote(asked.reference)}"
    own = f"--profile {shlex.quote(str(asked.out))}"
    named = f"--name {shlex.quote(asked.out.stem)}"  # a run's profile may have that run's name
    print_text(f"\n{asked.out} is a profile with these keys; to try it:")
    print_text(f"  {compared} {own}{simulated}\n  asyncrl train {own} {named}")


def _print_limits(tuned: Tuned) -> None:
    print_prose("\nwhat this search cannot know")
    windows = {row.setting.window_steps * row.setting.require_batches for row in tuned.found.rows}
    for limit in (*LIMITS, *([SHORTER] if len(windows) > 1 else ())):
        print_prose(f"- {limit}")
    if notes := tuned.workload.notes.strip():
        print_prose(f"\nnotes of the workload {tuned.workload.name}\n{notes}")
