"""`plan --tune`: simulates settings in parallel on the virtual clock, recommends the best, and writes it as a profile.

    workload + profile -> Space -> search -> Tuned -> a profile for `train --profile`, or for one side of `bench`
                                     |
                                     +-> one simulated run per setting, each in a process of the pool

All settings get the same groups with the same lengths (both follow from the seed), so that differences come from the settings.
All results are SIMULATED, and whatever prints them says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli import __version__
from asyncrl_cli.bench.children import simulators
from asyncrl_cli.bench.measure import Edges, figures_of, stretch_of
from asyncrl_cli.bench.search import FIGURES, LONG_RUNS, Evaluate, Found, Outcome, Row, front, planned_windows, search
from asyncrl_cli.bench.space import Setting, Space, starting_point
from asyncrl_cli.errors import ConfigError, RefusedError
from asyncrl_cli.plan.cluster import counted, usable_cores
from asyncrl_cli.profile.arithmetic import Schedule, staleness_bound
from asyncrl_cli.profile.keys import PARAMS
from asyncrl_cli.profile.loaded import set_layer
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import is_file_reference, locate, toml_key, toml_value
from asyncrl_cli.simulate.workload import Reference, Workload
from asyncrl_cli.simulate.workload_files import profile_for, reference_sets
from asyncrl_cli.simulate.world import simulate

SCHEMA_VERSION = 1
SEED = 0
TRAJECTORIES = 450_000
"""How many all long runs together simulate of a large workload: some 30 CPU seconds."""
FEWEST_LONG_WINDOWS, MOST_LONG_WINDOWS = 6, 24
LIMITS = (
    "what staleness does to the accuracy of the trained model is not simulated: a faster row is better only if it learns as well",
    "memory is not simulated: slots are at most those the workload was measured with; "
    "`asyncrl plan --profile P` estimates what a split needs",
)
"""What this search does not know, as told to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A finished search from `profile` with the keys in `sets`. Times are seconds per `window_groups` groups, W of the workload's
    own window. `known`: the measured or published time of the current setting, if there is one."""

    workload: Workload
    profile: str
    sets: tuple[str, ...]
    window_groups: int
    n: int
    found: Found
    known: Reference | None

    @property
    def bound(self) -> str:
        """The staleness bound in words."""
        return f"at most {counted(self.found.space.bound, 'version')} of staleness"

    @property
    def recommended_sets(self) -> tuple[str, ...]:
        """All `--set`s of the recommended run: those given to the search, overridden by those it found."""
        entries = (*self.sets, *self.found.best.setting.sets())
        return tuple({entry.partition("=")[0].strip(): entry for entry in entries}.values())

    @property
    def speedup(self) -> float | None:
        current = self.found.current
        return None if current is None else current.window_time_s / self.found.best.window_time_s

    def to_json(self) -> dict[str, Any]:
        found, known = self.found, self.known
        current, same_split, undominated = found.current, found.on_current_split, front(found.rows)
        return {
            "schema_version": SCHEMA_VERSION,
            "simulated": True,
            "workload": self.workload.name,
            "profile": self.profile,
            "max_staleness": found.space.bound,
            "window_groups": self.window_groups,
            "seed": SEED,
            "rows": [row.to_json() | {"is_on_front": row in undominated} for row in found.rows],
            "current": current and current.to_json(),
            "recommended": found.best.to_json() | {"sets": list(self.recommended_sets)},
            "recommended_on_current_split": same_split and same_split.to_json(),
            "speedup": self.speedup,
            "current_known": known and {"window_time_s": known.window_time_s, "source": known.source},
            "num_settings": len(found.outcomes),
            "num_trajectories": found.windows * self.window_groups * self.n,
            "failed": [{"sets": setting.sets(), "reason": reason} for setting, reason in found.failed.items()],
            "notes": self.workload.notes,
            "limits": list(LIMITS),
        }


def tune(
    workload: Workload,
    reference: str,
    sets: Sequence[str],
    *,
    gpus: int | None,
    bound: int | None,
    on_progress: Callable[[int, int], None],
) -> Tuned:
    """Search around the profile `reference` as the workload runs it; `bound` is S, by default the profile's own.
    `on_progress(windows simulated so far, windows planned)`.

    Raises ConfigError if profile, workload and GPUs do not fit together, AsyncrlError if no setting could be simulated.
    """
    base, profile, plan = starting_point(workload, reference, tuple(sets), gpus)
    space = Space.around(profile, plan, bound=staleness_bound(profile) if bound is None else bound)
    window_groups, n = Schedule.of(profile).window_groups, profile.rollout.n
    long_windows = min(max(TRAJECTORIES // (LONG_RUNS * window_groups * n), FEWEST_LONG_WINDOWS), MOST_LONG_WINDOWS)
    planned = planned_windows(space, long_windows)

    def profile_of(setting: Setting, windows: int) -> Profile:
        return profile_for(workload, reference, (*base, *setting.sets()), groups=windows * window_groups).profile

    with simulators(usable_cores()) as pool:
        evaluate = evaluator(pool, workload, window_groups, profile_of, lambda done: on_progress(done, planned))
        found = search(space, evaluate, long_windows)
    known = _known(workload, profile)
    return Tuned(workload=workload, profile=reference, sets=base, window_groups=window_groups, n=n, found=found, known=known)


def _known(workload: Workload, profile: Profile) -> Reference | None:
    """The workload's reference row of this very profile, if it has one."""
    own = profile.model_dump(exclude={"run"})
    for row in workload.references:
        of_row = profile_for(workload, row.profile, reference_sets(row), groups=1).profile
        if of_row.model_dump(exclude={"run"}) == own:
            return row
    return None


def evaluator(
    pool: Executor,
    workload: Workload,
    window_groups: int,
    profile_of: Callable[[Setting, int], Profile],
    on_windows: Callable[[int], None],
) -> Evaluate:
    """The search's `Evaluate`: simulates settings in parallel and keeps their order. `on_windows(windows simulated so far)`."""
    done_windows = 0

    def evaluate(settings: Sequence[Setting], windows: int) -> list[Outcome]:
        nonlocal done_windows
        profiles = [profile_of(setting, windows) for setting in settings]
        running = [pool.submit(_figures, profile, workload, window_groups) for profile in profiles]
        for _ in as_completed(running):
            done_windows += windows
            on_windows(done_windows)
        made = zip(settings, (future.result() for future in running), strict=True)
        return [found if isinstance(found, str) else Row(setting=setting, windows=windows, **found) for setting, found in made]

    return evaluate


def _figures(profile: Profile, workload: Workload, window_groups: int) -> dict[str, float] | str:
    """Figures of one simulated run, or why it failed. The same groups are measured whatever the setting's own windows are."""
    run = simulate(profile, workload, seed=SEED)
    if run.error is not None:
        return str(run.error)
    groups = int(run.lines[-1]["groups_trained"])
    figures = figures_of(stretch_of(run.lines, Edges(window_groups, groups - window_groups)), window_groups)
    return {name: figures.get(name, 0.0) for name in FIGURES}


def check_new(path: Path) -> None:
    """Raises ConfigError or RefusedError unless `path` can be written. Called before the search, which would else be wasted."""
    if path.suffix != ".toml":
        raise ConfigError(f"--out {path}: a profile's file ends in .toml", hint=f"--out {path.with_suffix('.toml')}")
    if path.exists():
        raise RefusedError(f"{path} exists and is not overwritten", hint=f"--out {_free(path)}")
    if not path.parent.is_dir():
        raise RefusedError(f"there is no directory {path.parent}", hint=f"--out {path.name}")


def write_profile(tuned: Tuned, path: Path, command: str, *, is_run: bool) -> None:
    """Write the recommended setting as a profile. `command`: the search as it was typed; `is_run`: the workload was calibrated on
    a run, whose profile the new one extends.

    Raises RefusedError if the file exists by now, OSError if it cannot be written.
    """
    best, current = tuned.found.best, tuned.found.current
    before = "" if current is None else f" (before: {current.setting.split}, {current.window_time_s:.4g} s)"
    lines = [
        f"# Recommended by a SIMULATED search (asyncrl {__version__}):",
        f"#   {command}",
        f"# {best.setting.split} trainer:rollout, {best.window_time_s:.4g} s per {tuned.window_groups} groups{before}.",
        *([] if is_run else [f"# What {tuned.workload.name} itself sets ([profile]: model, sizes) is not in this file."]),
        f"extends = {toml_value(_extended(tuned.profile, path))}",
        f"purpose = {toml_value(f'Tuned for {tuned.workload.name} by a simulated search: {tuned.bound}.')}",
    ]
    tables: dict[str, list[str]] = {}
    for key, value in set_layer(tuned.recommended_sets).values.items():
        section, _, name = key.partition(".")
        if key.startswith(f"{PARAMS}."):
            name = f"params.{toml_key(key.removeprefix(f'{PARAMS}.'))}"
        tables.setdefault(section, []).append(f"{name} = {toml_value(value)}")
    for section, entries in tables.items():
        lines += ["", f"[{section}]", *entries]
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except FileExistsError:
        raise RefusedError(f"{path} exists and is not overwritten", hint=f"--out {_free(path)}") from None


def _extended(reference: str, path: Path) -> str:
    """What to extend: a profile's name, or a file; a relative path if the file lies below the new one's directory, so that both
    can be moved together."""
    if not is_file_reference(reference):
        return reference
    above, here = locate(reference, relative_to=Path.cwd(), asked_by="--profile"), path.parent.resolve()
    return f"./{above.relative_to(here)}" if above.is_relative_to(here) else str(above)


def _free(path: Path) -> Path:
    """The first free name like it: `my.toml` -> `my-2.toml`."""
    number = 2
    while (free := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return free
