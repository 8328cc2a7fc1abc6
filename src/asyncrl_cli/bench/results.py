"""What a comparison comes to: every profile's figures over its repeats, against the baseline and against the bound.

    run's lines --figures_of--> figures of a run --summarise--> Result: median, minimum and maximum per figure

All runs are measured over the same groups. `speedup` is the median over the repeats of groups_per_s against the baseline's run
of the same seed, which was made next to it; `speedup_per_token` that of tokens_per_s: the same groups are not the same tokens.
A figure that a run did not measure is absent.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrl_cli.bench.measure import Edges, common_edges, figures_of, stretch_of, work_of
from asyncrl_cli.observe.bound import Bound, Capacities, bound_of
from asyncrl_cli.observe.lines import Line

SCHEMA_VERSION = 1
UNEVEN_WORK = 0.03

RunKey = tuple[str, int]
"""Profile and seed."""
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLines:
    """A finished run: its metrics lines. `seed` tells repeats apart; `interrupted`: no other run was to follow."""

    profile: str
    seed: int
    lines: Sequence[Line]
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), min=min(values), max=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One profile of a comparison. `bound` is the ideal of one window of W groups of the baseline; `window_groups` its own W."""

    profile: str
    mode: str
    figures: Mapping[str, Spread]
    seeds: tuple[int, ...]
    capacities: Capacities | None
    bound: Bound | None
    step_groups: int
    window_groups: int

    def median(self, name: str) -> float | None:
        return self.figures[name].median if name in self.figures else None

    def to_json(self) -> dict[str, Any]:
        """Medians under their names; minimum and maximum of the repeats under `spread`."""
        capacities, bound = self.capacities, self.bound
        return {
            "profile": self.profile,
            "mode": self.mode,
            "seeds": list(self.seeds),
            "step_groups": self.step_groups,
            "own_window_groups": self.window_groups,
            **{name: spread.median for name, spread in self.figures.items()},
            "bound_ratio": self.median("bound_ratio"),
            "limited_by": bound.limited_by if bound else None,
            "ideal": None
            if bound is None
            else {
                "window_time_s": bound.ideal_s,
                "generation_s": bound.generation_s,
                "training_s": bound.training_s,
                "at_once_s": bound.at_once_s,
            },
            "capacities": None
            if capacities is None
            else {
                "rollout_tokens_per_s": capacities.rollout_tokens_per_s,
                "trainer_tokens_per_s": capacities.trainer_tokens_per_s,
                "rollout_beside_tokens_per_s": capacities.rollout_beside_tokens_per_s,
                "trainer_beside_tokens_per_s": capacities.trainer_beside_tokens_per_s,
                "colocated": capacities.colocated,
            },
            "spread": {name: [spread.min, spread.max] for name, spread in self.figures.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """What is known of a profile beside its runs."""

    profile: str
    mode: str
    step_groups: int
    window_groups: int


def summarise(
    contestants: Sequence[Contestant],
    runs: Sequence[RunLines],
    capacities: Mapping[RunKey, Capacities],
    *,
    window_groups: int,
) -> list[Result]:
    """Results in the order of `contestants`, the baseline first; without finished runs a profile is left out."""
    if not runs:
        return []
    edges = common_edges([run.lines for run in runs], max(contestant.window_groups for contestant in contestants))
    bounds = {
        (run.profile, run.seed): _window_bound(run, capacities[run.profile, run.seed], window_groups, edges)
        for run in runs
        if (run.profile, run.seed) in capacities
    }
    measured = {(run.profile, run.seed): figures_of(run.lines, window_groups=window_groups, edges=edges) for run in runs}
    for key, bound in bounds.items():
        measured[key]["bound_ratio"] = bound.ideal_s / measured[key]["window_time_s"]
        if bound.at_once_s is not None:
            measured[key]["at_once_ratio"] = bound.at_once_s / measured[key]["window_time_s"]
    base = _of_profile(contestants[0].profile, measured)
    results = (_result(contestant, measured, capacities, bounds, base) for contestant in contestants)
    return [result for result in results if result.seeds]


def _result(
    contestant: Contestant,
    measured: Mapping[RunKey, Mapping[str, float]],
    capacities: Mapping[RunKey, Capacities],
    bounds: Mapping[RunKey, Bound],
    base: Mapping[int, Mapping[str, float]],
) -> Result:
    own = _of_profile(contestant.profile, measured)
    return Result(
        profile=contestant.profile,
        mode=contestant.mode,
        figures=_spreads(list(own.values())) | _speedup(own, base),
        seeds=tuple(own),
        capacities=_median_capacities(list(_of_profile(contestant.profile, capacities).values())) if own else None,
        bound=_median_bound(list(_of_profile(contestant.profile, bounds).values())),
        step_groups=contestant.step_groups,
        window_groups=contestant.window_groups,
    )


def _of_profile(profile: str, values: Mapping[RunKey, Value]) -> dict[int, Value]:
    return {seed: value for (name, seed), value in values.items() if name == profile}


def _window_bound(run: RunLines, capacities: Capacities, window_groups: int, edges: Edges) -> Bound:
    """The ideal of the measured stretch, per W groups of the baseline."""
    stretch = stretch_of(run.lines, edges)
    bound, share = bound_of(work_of(run.lines, stretch), capacities), window_groups / stretch.groups
    return Bound(
        generation_s=bound.generation_s * share,
        training_s=bound.training_s * share,
        colocated=bound.colocated,
        at_once_s=None if bound.at_once_s is None else bound.at_once_s * share,
    )


def _median_bound(bounds: Sequence[Bound]) -> Bound | None:
    if not bounds:
        return None
    return Bound(
        generation_s=statistics.median(bound.generation_s for bound in bounds),
        training_s=statistics.median(bound.training_s for bound in bounds),
        colocated=bounds[0].colocated,
        at_once_s=_median_or_none([bound.at_once_s for bound in bounds]),
    )


def _median_capacities(known: Sequence[Capacities]) -> Capacities | None:
    if not known:
        return None
    return Capacities(
        rollout_tokens_per_s=statistics.median(one.rollout_tokens_per_s for one in known),
        trainer_tokens_per_s=statistics.median(one.trainer_tokens_per_s for one in known),
        colocated=known[0].colocated,
        rollout_beside_tokens_per_s=_median_or_none([one.rollout_beside_tokens_per_s for one in known]),
        trainer_beside_tokens_per_s=_median_or_none([one.trainer_beside_tokens_per_s for one in known]),
    )


def _median_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _spreads(runs: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Of what every run measured."""
    names = [name for name in (runs[0] if runs else ()) if all(name in figures for figures in runs)]
    return {name: Spread.of([figures[name] for figures in runs]) for name in names}


def _speedup(own: Mapping[int, Mapping[str, float]], base: Mapping[int, Mapping[str, float]]) -> dict[str, Spread]:
    """Absent where no seed was run by both."""
    speeds = {"speedup": "groups_per_s", "speedup_per_token": "tokens_per_s"}
    paired = {name: [own[seed][speed] / base[seed][speed] for seed in own if seed in base] for name, speed in speeds.items()}
    return {name: Spread.of(ratios) for name, ratios in paired.items() if ratios}


def unevenness(results: Sequence[Result]) -> float:
    """How many more tokens the measured groups of one profile have than another's: a share of these. Policies learn differently."""
    known = [(result.median("tokens_per_s"), result.median("window_time_s")) for result in results]
    tokens = [rate * seconds for rate, seconds in known if rate is not None and seconds is not None]
    return max(tokens) / min(tokens) - 1 if tokens and min(tokens) > 0 else 0.0


def is_uneven(results: Sequence[Result]) -> bool:
    return unevenness(results) > UNEVEN_WORK


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that is shown, written and drawn. `window_groups` is W of the baseline, the unit of window_time_s."""

    results: Sequence[Result]
    workload: str
    baseline: str
    groups: int
    window_groups: int
    seeds: tuple[int, ...]
    resources: str
    remarks: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def simulated(self) -> bool:
        return bool(self.workload)

    @property
    def title(self) -> str:
        what = f"SIMULATED on the workload {self.workload}" if self.simulated else "measured"
        return f"{what}: {self.groups} groups on {self.resources}, against {self.baseline}"

    def to_json(self) -> dict[str, Any]:
        """results.json, which is also what `--json` prints."""
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
