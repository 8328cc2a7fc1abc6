"""The results of a comparison: each profile's figures over its repeats, relative to the baseline and to the
bound.

    Run's lines --figures_of--> figures of a run --summarise--> Result: median, minimum and maximum per figure

All runs are measured over the same groups. `speedup` is the median over the repeats of groups_per_s against
the baseline's run of the same seed; `speedup_per_token` is the same for tokens_per_s, because the same groups
may have different numbers of tokens. Figures that a run did not measure are absent.

A `DrawnRun` holds the data to draw a run, from its timeline.jsonl and events.jsonl.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.base.errors import AsyncrlError, RefusedError
from asyncrl_cli.base.safe_files import load_json
from asyncrl_cli.bench.measure import figures_of, stretch_of, stretches
from asyncrl_cli.observe.format import evenly
from asyncrl_cli.observe.lines import Line, joined_timeline
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER
from asyncrl_cli.simulate.capacities import Capacities

SCHEMA_VERSION = 1
UNEVEN_WORK = 0.03
MAX_SHOWN_WORKERS = 8
SPEEDS = {"speedup": "groups_per_s", "speedup_per_token": "tokens_per_s"}
IDEAL = {
    "window_time_s": "ideal_s",
    "generation_s": "generation_s",
    "training_s": "training_s",
    "at_once_s": "at_once_s",
}
"""The bound's figures, by their names in results.json."""
CAPACITIES = (
    "rollout_tokens_per_s",
    "trainer_tokens_per_s",
    "rollout_beside_tokens_per_s",
    "trainer_beside_tokens_per_s",
)

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRun:
    """The data to draw one run. Times are seconds since its start. `workers` are those shown, `num_workers`
    counts all."""

    profile: str
    trainers: tuple[str, ...]
    workers: tuple[str, ...]
    num_workers: int
    spans: Mapping[str, Sequence[tuple[str, float, float]]]
    running: Mapping[str, Sequence[tuple[float, float]]]
    publishes_s: tuple[float, ...]
    window_ends_s: tuple[float, ...]

    def middle_s(self, length_s: float) -> float:
        """Where a view of `length_s` in the middle of the run begins, rounded to the nearest end of a
        window."""
        ends = self.window_ends_s
        wanted_s = max(0.0, (ends[0] + ends[-1] - length_s) / 2)
        return min(ends, key=lambda end_s: abs(end_s - wanted_s))

    @property
    def window_s(self) -> float:
        """Mean length of a window."""
        ends = self.window_ends_s
        return (ends[-1] - ends[0]) / (len(ends) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A finished run: its metrics lines, the speed of each phase alone (if measured), and its timeline (if it
    is drawn)."""

    profile: str
    seed: int
    lines: Sequence[Line]
    capacities: Capacities | None = None
    timeline: DrawnRun | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A profile that takes part. `step_groups` is R, `window_groups` W."""

    name: str
    mode: str
    step_groups: int
    window_groups: int

    @property
    def window_steps(self) -> int:
        """K"""
        return self.window_groups // self.step_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(median=statistics.median(values), min=min(values), max=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One profile of a comparison, with the figures that all of its runs measured."""

    contestant: Contestant
    figures: Mapping[str, Range]
    seeds: tuple[int, ...]

    @property
    def profile(self) -> str:
        return self.contestant.name

    @property
    def limited_by(self) -> str | None:
        """The phase that takes longer alone; None if that was not measured."""
        generation_s, training_s = self.median("generation_s"), self.median("training_s")
        if generation_s is None or training_s is None:
            return None
        return "generation" if generation_s >= training_s else "training"

    def median(self, name: str) -> float | None:
        return self.figures[name].median if name in self.figures else None

    def to_json(self) -> dict[str, Any]:
        """Medians under their names; minimum and maximum of the repeats under `spread`."""
        has_bound, own = self.limited_by is not None, {*IDEAL.values(), *CAPACITIES}
        colocated = {"colocated": self.contestant.mode == "colocate"}
        return {
            "profile": self.profile,
            "mode": self.contestant.mode,
            "seeds": list(self.seeds),
            "step_groups": self.contestant.step_groups,
            "own_window_groups": self.contestant.window_groups,
            **{name: spread.median for name, spread in self.figures.items() if name not in own},
            "bound_ratio": self.median("bound_ratio"),
            "limited_by": self.limited_by,
            "ideal": {key: self.median(name) for key, name in IDEAL.items()} if has_bound else None,
            "capacities": colocated | {name: self.median(name) for name in CAPACITIES} if has_bound else None,
            "spread": {name: [spread.min, spread.max] for name, spread in self.figures.items()},
        }


def read_results(path: Path) -> Comparison:
    """The comparison in a results.json, without its timelines. Raises RefusedError if the file is not one."""
    found = load_json(path, dict[str, Any], hint="give the directory of a bench")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise RefusedError(f"{path} is not a result of this version's bench", hint="run the comparison again")
    try:
        return Comparison(
            **{key: found[key] for key in ("baseline", "groups", "window_groups", "resources")},
            **{key: tuple(found[key]) for key in ("seeds", "remarks", "missing")},
            workload=found["workload"] or "",
            results=[_result_of(result) for result in found["results"]],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(
            f"{path} is malformed: {type(error).__name__}: {error}", hint="run the comparison again"
        ) from None


def _result_of(found: Mapping[str, Any]) -> Result:
    """The inverse of `Result.to_json`."""
    ideal = {name: (found["ideal"] or {}).get(key) for key, name in IDEAL.items()}
    medians = {**found, **ideal, **(found["capacities"] or {})}
    spreads = {
        name: Range(median=medians[name], min=low, max=high) for name, (low, high) in found["spread"].items()
    }
    return Result(
        contestant=Contestant(
            name=found["profile"],
            mode=found["mode"],
            step_groups=found["step_groups"],
            window_groups=found["own_window_groups"],
        ),
        figures={name: spread for name, spread in spreads.items() if spread.median is not None},
        seeds=tuple(found["seeds"]),
    )


def summarise(contestants: Sequence[Contestant], runs: Sequence[FinishedRun]) -> list[Result]:
    """Results in the order of `contestants`, the baseline first. Profiles without a finished run are left
    out."""
    baseline = contestants[0]
    measured = stretches(
        [run.lines for run in runs], max(contestant.window_groups for contestant in contestants)
    )
    own: dict[str, dict[int, Figures]] = {contestant.name: {} for contestant in contestants}
    for run, stretch in zip(runs, measured, strict=True):
        own[run.profile][run.seed] = figures_of(stretch, baseline.window_groups, run.capacities)
    return [
        _result(contestant, own[contestant.name], own[baseline.name])
        for contestant in contestants
        if own[contestant.name]
    ]


def _result(contestant: Contestant, own: Mapping[int, Figures], base: Mapping[int, Figures]) -> Result:
    """`own` and `base`: figures of the profile and the baseline, by seed. Without a common seed there is no
    speedup."""
    common = set.intersection(*(set(figures) for figures in own.values()))
    names = [name for name in next(iter(own.values())) if name in common]
    values = {name: [figures[name] for figures in own.values()] for name in names}
    if paired := [seed for seed in own if seed in base]:
        values |= {
            name: [own[seed][speed] / base[seed][speed] for seed in paired] for name, speed in SPEEDS.items()
        }
    return Result(
        contestant=contestant,
        figures={name: Range.of(found) for name, found in values.items()},
        seeds=tuple(own),
    )


def differences(baseline: Result, other: Result) -> list[str]:
    """Where the two differ in more than their schedule: train steps (K) or groups (W) between two syncs,
    lengths of responses."""
    ours, theirs = baseline.contestant, other.contestant
    found = [
        ("K", ours.window_steps != theirs.window_steps),
        ("W", ours.window_groups != theirs.window_groups),
    ]
    return [
        *(name for name, differs in found if differs),
        *(["length"] if is_uneven([baseline, other]) else []),
    ]


def unevenness(results: Sequence[Result]) -> float:
    """How much the profiles' tokens differ in the measured groups: most over fewest, minus 1. (Policies learn
    differently.)"""
    known = [(result.median("tokens_per_s"), result.median("window_time_s")) for result in results]
    tokens = [rate * seconds for rate, seconds in known if rate is not None and seconds is not None]
    return max(tokens) / min(tokens) - 1 if tokens and min(tokens) > 0 else 0.0


def is_uneven(results: Sequence[Result]) -> bool:
    return unevenness(results) > UNEVEN_WORK


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that is shown, written and drawn. `window_groups` is W of the baseline, the unit of
    window_time_s. `workload` is empty for real runs. `error`: the error that ended the comparison early;
    `missing`: unfinished runs."""

    results: Sequence[Result]
    workload: str
    baseline: str
    groups: int
    window_groups: int
    seeds: tuple[int, ...]
    resources: str
    remarks: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    timelines: tuple[DrawnRun, ...] = ()
    error: AsyncrlError | None = None

    @property
    def simulated(self) -> bool:
        return bool(self.workload)

    @property
    def has_bound(self) -> bool:
        return any(result.limited_by for result in self.results)

    @property
    def title(self) -> str:
        what = f"SIMULATED on the workload {self.workload}" if self.simulated else "measured"
        return f"{what}: {self.groups} groups on {self.resources}, against {self.baseline}"

    def to_json(self) -> dict[str, Any]:
        """The content of results.json, which `--json` also prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "simulated": self.simulated,
            "workload": self.workload or None,
            "baseline": self.baseline,
            "groups": self.groups,
            "window_groups": self.window_groups,
            "seeds": list(self.seeds),
            "resources": self.resources,
            "remarks": list(self.remarks),
            "missing": list(self.missing),
            "results": [result.to_json() for result in self.results],
        }


def timeline_of_run(profile: str, run_dir: Path, lines: Sequence[Line]) -> DrawnRun | None:
    """The timeline of a run; None if it recorded none."""
    run = Recorded(run_dir)
    if not run.files.timeline.is_file():
        return None
    roles, publishes_s = run.roles, [event["time_s"] for event in run.events("published")]
    (spans, running), stretch = joined_timeline(run.timeline()), stretch_of(lines)
    ends = {line["window"]: line["time_s"] for line in stretch.lines}
    return DrawnRun(
        profile=profile,
        trainers=tuple(_of_role(roles, TRAINER)),
        workers=shown_workers(roles),
        num_workers=len(_of_role(roles, ROLLOUT)),
        spans=spans,
        running=running,
        publishes_s=tuple(publishes_s),
        window_ends_s=(stretch.before["time_s"], *ends.values()),
    )


def shown_workers(roles: Mapping[str, str]) -> tuple[str, ...]:
    """Names of all rollout workers, or of `MAX_SHOWN_WORKERS` spread evenly from the first to the last."""
    return tuple(evenly(_of_role(roles, ROLLOUT), MAX_SHOWN_WORKERS))


def _of_role(roles: Mapping[str, str], role: str) -> list[str]:
    """Executors of a role, ordered by number: rollout-2 before rollout-10."""
    return sorted(
        (name for name, found in roles.items() if found == role), key=lambda name: (len(name), name)
    )
