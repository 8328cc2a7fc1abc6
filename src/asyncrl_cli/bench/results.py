"""The results of a comparison: each profile's figures over its repeats, relative to the baseline and to the
bound.

    a run's lines --figures_of, bound--> figures of a run --summarise--> Result: median, min, max per figure

All runs are measured over the same groups. `speedup` is the median over the repeats of groups_per_s against
the baseline's run of the same seed; `speedup_per_token` is the same for tokens_per_s, because the same groups
may have different numbers of tokens. Figures that a run did not measure are absent.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from asyncrl_cli.base.errors import AsyncrlError, RefusedError
from asyncrl_cli.base.safe_files import load_json
from asyncrl_cli.bench.effects import Scaling
from asyncrl_cli.bench.figures import bound_of_costs, bound_of_states, figures_of, stretches
from asyncrl_cli.observe.run_lines import Line
from asyncrl_cli.simulate.costs import Costs

SCHEMA_VERSION = 1
UNEVEN_WORK = 0.03
SPEEDS = {"speedup": "groups_per_s", "speedup_per_token": "tokens_per_s"}
IDEAL = {"window_time_s": "ideal_s", "generation_s": "generation_s", "training_s": "training_s"}
"""The bound's figures, by their names in results.json."""
CAPACITIES = ("rollout_tokens_per_s", "trainer_tokens_per_s")

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A finished run: its metrics lines and, if it was simulated, what its work cost. `fingerprints`: of
    each version's weights, if the run was real and deterministic."""

    profile: str
    seed: int
    lines: Sequence[Line]
    costs: Costs | None = None
    fingerprints: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A profile that takes part. `step_groups` is R, `window_groups` W."""

    name: str
    mode: str
    step_groups: int
    window_groups: int

    @property
    def window_steps(self) -> int:
        """K, the train steps between two syncs."""
        return self.window_groups // self.step_groups

    @property
    def is_colocated(self) -> bool:
        return self.mode == "colocate"


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
        """The phase that takes longer without any waits; None if that was not measured."""
        generation_s, training_s = self.median("generation_s"), self.median("training_s")
        if generation_s is None or training_s is None:
            return None
        return "generation" if generation_s >= training_s else "training"

    def median(self, name: str) -> float | None:
        return self.figures[name].median if name in self.figures else None

    def to_json(self) -> dict[str, object]:
        """Medians under their names; minimum and maximum of the repeats under `spread`."""
        nested = {*IDEAL.values(), *CAPACITIES}
        capacities = {name: self.median(name) for name in CAPACITIES if name in self.figures}
        return {
            "profile": self.profile,
            "mode": self.contestant.mode,
            "seeds": list(self.seeds),
            "step_groups": self.contestant.step_groups,
            "own_window_groups": self.contestant.window_groups,
            **{name: spread.median for name, spread in self.figures.items() if name not in nested},
            "bound_ratio": self.median("bound_ratio"),
            "limited_by": self.limited_by,
            "ideal": {key: self.median(name) for key, name in IDEAL.items()} if self.limited_by else None,
            "capacities": {"colocated": self.contestant.is_colocated, **capacities} if capacities else None,
            "spread": {name: [spread.min, spread.max] for name, spread in self.figures.items()},
        }


def summarise(contestants: Sequence[Contestant], runs: Sequence[FinishedRun]) -> list[Result]:
    """Results in the order of `contestants`, the baseline first. Profiles without a finished run are left
    out."""
    window_groups, by_name = contestants[0].window_groups, {one.name: one for one in contestants}
    prints = {run.seed: run.fingerprints for run in runs if run.profile == contestants[0].name}
    longest = max(contestant.window_groups for contestant in contestants)
    figures: dict[str, dict[int, Figures]] = {contestant.name: {} for contestant in contestants}
    for run, stretch in zip(runs, stretches([run.lines for run in runs], longest), strict=True):
        windows, is_colocated = stretch.groups / window_groups, by_name[run.profile].is_colocated
        bound = bound_of_states(stretch, windows, is_colocated=is_colocated)
        if run.costs is not None:
            capacities = run.costs.capacities(stretch.begin_groups, stretch.end_groups)
            bound = bound_of_costs(stretch, windows, capacities)
        equal = _equal_weights(run.fingerprints, prints.get(run.seed, {}))
        figures[run.profile][run.seed] = figures_of(stretch, window_groups) | bound | equal
    baseline = figures[contestants[0].name]
    return [_result(one, figures[one.name], baseline) for one in contestants if figures[one.name]]


def _equal_weights(prints: Mapping[int, str], baselines: Mapping[int, str]) -> dict[str, float]:
    """The share of the versions that both runs have whose weights are the same, bit for bit."""
    both = prints.keys() & baselines.keys()
    equal = sum(prints[version] == baselines[version] for version in both)
    return {"equal_weights": equal / len(both)} if both else {}


def _result(
    contestant: Contestant, by_seed: Mapping[int, Figures], baseline: Mapping[int, Figures]
) -> Result:
    """Without a seed that the baseline has, too, there is no speedup."""
    first, *others = by_seed.values()
    measured = [name for name in first if all(name in figures for figures in others)]
    values = {name: [figures[name] for figures in by_seed.values()] for name in measured}
    if paired := [seed for seed in by_seed if seed in baseline]:
        for name, speed in SPEEDS.items():
            values[name] = [by_seed[seed][speed] / baseline[seed][speed] for seed in paired]
    figures = {name: Range.of(found) for name, found in values.items()}
    return Result(contestant=contestant, figures=figures, seeds=tuple(by_seed))


def differences(baseline: Result, other: Result) -> list[str]:
    """Where the two differ in more than their schedule: train steps (K) or groups (W) between two syncs,
    lengths of responses."""
    ours, theirs = baseline.contestant, other.contestant
    differs = {
        "K": ours.window_steps != theirs.window_steps,
        "W": ours.window_groups != theirs.window_groups,
        "length": unevenness([baseline, other]) > UNEVEN_WORK,
    }
    return [name for name, is_so in differs.items() if is_so]


def unevenness(results: Sequence[Result]) -> float:
    """How much the profiles' tokens differ in the measured groups: most over fewest, minus 1. (Policies learn
    differently.)"""
    known = [(result.median("tokens_per_s"), result.median("window_time_s")) for result in results]
    tokens = [rate * seconds for rate, seconds in known if rate is not None and seconds is not None]
    return max(tokens) / min(tokens) - 1 if tokens and min(tokens) > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that is shown and written. `window_groups` is W of the baseline, the unit of window_time_s.
    `workload` is empty for real runs. `outlooks`: of each simulated profile, what limits it and whether more
    GPUs pay; `scalings`: its speed over GPUs. `error`: the error that ended the comparison early; `missing`:
    unfinished runs."""

    results: Sequence[Result]
    workload: str
    baseline: str
    groups: int
    window_groups: int
    seeds: tuple[int, ...]
    resources: str
    remarks: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    outlooks: Mapping[str, str] = field(default_factory=dict)
    scalings: Sequence[Scaling] = ()
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

    def to_json(self) -> dict[str, object]:
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
            "outlooks": dict(self.outlooks),
            "scalings": [scaling.to_json() for scaling in self.scalings],
            "results": [result.to_json() for result in self.results],
        }


def read_results(path: Path) -> Comparison:
    """The comparison in a results.json. Raises RefusedError if the file is not one."""
    found = load_json(path, dict[str, Any], hint="give the directory of a bench")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise RefusedError(f"{path} is not a result of this version's bench", hint="run the comparison again")
    try:
        return Comparison(
            results=[_read_result(result) for result in found["results"]],
            workload=found["workload"] or "",
            baseline=found["baseline"],
            groups=found["groups"],
            window_groups=found["window_groups"],
            seeds=tuple(found["seeds"]),
            resources=found["resources"],
            remarks=tuple(found["remarks"]),
            missing=tuple(found["missing"]),
            outlooks=found.get("outlooks", {}),  # earlier versions had none
            scalings=TypeAdapter(list[Scaling]).validate_python(found.get("scalings", [])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{path} is malformed: {type(error).__name__}: {error}"
        raise RefusedError(what, hint="run the comparison again") from None


def _read_result(found: Mapping[str, Any]) -> Result:
    """The inverse of `Result.to_json`."""
    ideal = {name: (found["ideal"] or {}).get(key) for key, name in IDEAL.items()}
    medians = {**found, **ideal, **(found["capacities"] or {})}
    return Result(
        contestant=Contestant(
            name=found["profile"],
            mode=found["mode"],
            step_groups=found["step_groups"],
            window_groups=found["own_window_groups"],
        ),
        # what an earlier version measured and this one does not know is left out
        figures={
            name: Range(median=medians[name], min=low, max=high)
            for name, (low, high) in found["spread"].items()
            if medians.get(name) is not None
        },
        seeds=tuple(found["seeds"]),
    )
