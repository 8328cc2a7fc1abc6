"""What a comparison comes to: every profile's figures over its repeats, against the baseline and against the bound.

    Run's lines --figures_of--> figures of a run --summarise--> Result: median, minimum and maximum per figure

All runs are measured over the same groups. `speedup` is the median over the repeats of groups_per_s against the baseline's run
of the same seed, which was made next to it; `speedup_per_token` that of tokens_per_s: the same groups are not the same tokens.
A figure that a run did not measure is absent.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from asyncrl_cli.bench.gantt import Timeline
from asyncrl_cli.bench.measure import Edges, common_edges, figures_of, stretch_of, work_of
from asyncrl_cli.observe.lines import Line
from asyncrl_cli.simulate.bound import Bound, Capacities, Work, bound_of

SCHEMA_VERSION = 1
UNEVEN_WORK = 0.03

Record = TypeVar("Record", Bound, Capacities)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run: its metrics lines, what its phases can do alone, if that is known, and what is drawn of it; once it is
    measured, its figures, and as its bound the ideal of the measured stretch, per W groups of the baseline."""

    profile: str
    seed: int
    lines: Sequence[Line]
    capacities: Capacities | None = None
    timeline: Timeline | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    bound: Bound | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """What is known of a profile beside its runs: `step_groups` is R, `window_groups` W."""

    name: str
    mode: str
    step_groups: int
    window_groups: int


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
    """One profile of a comparison. `bound` is the ideal of one window of W groups of the baseline."""

    contestant: Contestant
    figures: Mapping[str, Spread]
    seeds: tuple[int, ...]
    capacities: Capacities | None
    bound: Bound | None

    @property
    def profile(self) -> str:
        return self.contestant.name

    def median(self, name: str) -> float | None:
        return self.figures[name].median if name in self.figures else None

    def to_json(self) -> dict[str, Any]:
        """Medians under their names; minimum and maximum of the repeats under `spread`."""
        bound = self.bound
        return {
            "profile": self.profile,
            "mode": self.contestant.mode,
            "seeds": list(self.seeds),
            "step_groups": self.contestant.step_groups,
            "own_window_groups": self.contestant.window_groups,
            **{name: spread.median for name, spread in self.figures.items()},
            "bound_ratio": self.median("bound_ratio"),
            "limited_by": bound and bound.limited_by,
            "ideal": bound
            and {
                "window_time_s": bound.ideal_s,
                "generation_s": bound.generation_s,
                "training_s": bound.training_s,
                "at_once_s": bound.at_once_s,
            },
            "capacities": self.capacities and asdict(self.capacities),
            "spread": {name: [spread.min, spread.max] for name, spread in self.figures.items()},
        }


def summarise(contestants: Sequence[Contestant], runs: Sequence[Run], *, window_groups: int) -> list[Result]:
    """Results in the order of `contestants`, the baseline first; without finished runs a profile is left out."""
    if not runs:
        return []
    edges = common_edges([run.lines for run in runs], max(contestant.window_groups for contestant in contestants))
    measured = [_measured(run, window_groups, edges) for run in runs]
    base = {one.seed: one.figures for one in measured if one.profile == contestants[0].name}
    own = [(contestant, [one for one in measured if one.profile == contestant.name]) for contestant in contestants]
    return [_result(contestant, runs, base) for contestant, runs in own if runs]


def _measured(run: Run, window_groups: int, edges: Edges) -> Run:
    figures = figures_of(run.lines, window_groups=window_groups, edges=edges)
    if run.capacities is None:
        return replace(run, figures=figures)
    stretch = stretch_of(run.lines, edges)
    work, share = work_of(run.lines, stretch), window_groups / stretch.groups
    of_window = Work(sampled_tokens=work.sampled_tokens * share, trained_tokens=work.trained_tokens * share)
    bound = bound_of(of_window, run.capacities)
    ideals_s = {"bound_ratio": bound.ideal_s, "at_once_ratio": bound.at_once_s}
    ratios = {name: ideal_s / figures["window_time_s"] for name, ideal_s in ideals_s.items() if ideal_s is not None}
    return replace(run, figures=figures | ratios, bound=bound)


def _result(contestant: Contestant, own: Sequence[Run], base: Mapping[int, Mapping[str, float]]) -> Result:
    """With the figures that every run measured."""
    names = [name for name in own[0].figures if all(name in one.figures for one in own)]
    return Result(
        contestant=contestant,
        figures={name: Spread.of([one.figures[name] for one in own]) for name in names} | _speedups(own, base),
        seeds=tuple(one.seed for one in own),
        capacities=_median([one.capacities for one in own if one.capacities]),
        bound=_median([one.bound for one in own if one.bound]),
    )


def _speedups(own: Sequence[Run], base: Mapping[int, Mapping[str, float]]) -> dict[str, Spread]:
    """Absent where no seed was run by both."""
    paired = [(one.figures, base[one.seed]) for one in own if one.seed in base]
    speeds = {"speedup": "groups_per_s", "speedup_per_token": "tokens_per_s"}
    return {name: Spread.of([ours[speed] / theirs[speed] for ours, theirs in paired]) for name, speed in speeds.items() if paired}


def _median(records: Sequence[Record]) -> Record | None:
    """Number by number; None is where any of them has None."""
    if not records:
        return None
    values = {each.name: [getattr(record, each.name) for record in records] for each in fields(records[0])}
    medians: dict[str, Any] = {
        name: None if None in found else statistics.median(found)
        for name, found in values.items()
        if not isinstance(found[0], bool)
    }
    return replace(records[0], **medians)


def unevenness(results: Sequence[Result]) -> float:
    """How many more tokens the measured groups of one profile have than another's: a share of these. Policies learn differently."""
    known = [(result.median("tokens_per_s"), result.median("window_time_s")) for result in results]
    tokens = [rate * seconds for rate, seconds in known if rate is not None and seconds is not None]
    return max(tokens) / min(tokens) - 1 if tokens and min(tokens) > 0 else 0.0


def is_uneven(results: Sequence[Result]) -> bool:
    return unevenness(results) > UNEVEN_WORK


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that is shown, written and drawn. `window_groups` is W of the baseline, the unit of window_time_s; real runs have no
    `workload`."""

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
