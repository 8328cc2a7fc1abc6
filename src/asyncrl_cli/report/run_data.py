"""A recorded run as a page shows it: its facts as words, and what its charts draw (figures of train steps as
columns, evals, marks, and where the executors' time went) as JSON.

A long run has several train steps per point: their mean, between minimum and maximum. metrics.jsonl does not
say how a figure is added up (docs/metrics.md does), so all figures are treated alike: a joined point is the
mean of its steps, and `lows` and `highs` keep what a mean hides.

A long run also has more spans than a page can hold. They are merged: time is cut into cells of equal length,
and within a cell each state comes once, for as long as the executor was in it. Times in states stay right;
the order within a cell is lost.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from statistics import fmean

from asyncrl_cli.base.errors import AsyncrlError, RefusedError, counted
from asyncrl_cli.base.paths import as_typed
from asyncrl_cli.contracts.events import ENDED
from asyncrl_cli.measure.machines import MACHINES, machine_of, shown_name
from asyncrl_cli.observe.format import clock, count, evenly, event_text, is_number, scored
from asyncrl_cli.observe.recorded import Recorded, add_span
from asyncrl_cli.observe.run_lines import EventLine, Line, RecordedSpan, Spans, TimelineLine, Totals
from asyncrl_cli.observe.run_status import read_status
from asyncrl_cli.observe.step_values import FLOW
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.loaded import Loaded
from asyncrl_cli.report.verdict import Remark, learned, verdict_of, warned

MARKS = {
    "eval": "eval",
    "checkpointed": "checkpoint",
    "resumed": "resume",
    "restarted": "restart",
    "lost": "worker lost",
    "failed": "failure",
    "warning": "warning",
}
"""Event -> its name on the page."""
PUBLISHED = "published"
EVAL_KEYS = ("version", "reward_mean", "reward_low", "reward_high", "eval_set")
MOST_MARKS = 100
"""Limit for each kind of mark."""
MOST_STEPS = 2000
"""The steps of a longer run are joined to at most `JOINED_POINTS` points."""
JOINED_POINTS = 1000
DIGITS = 7
"""Significant digits of numbers that are not whole: a float32 has no more."""
MOST_SPANS = 24_000
"""Limit of spans in one drawn timeline; a browser draws this many without a delay."""
STATES_PER_CELL = 3
"""The most spans that a cell has on average: most states are rare."""
DECIMALS = 3
VARIES = re.compile(r" \(.*|; .*|: \d.*")
"""What changes from one second to the next in the text of a wait."""

Sums = defaultdict[str, defaultdict[str, float]]
Measured = float | list[float]
"""A figure of metrics.jsonl: a number, or a list of them (a histogram, quantiles)."""
Point = Mapping[str, Measured]
Values = dict[str, list[Measured | None]]
"""Metric -> a value per point, None where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """`facts`: (label, text). `machines`: those that the run has. `charts`: what page.js draws, as JSON,
    `columns` among it."""

    name: str
    loaded: Loaded
    facts: list[tuple[str, str]]
    findings: list[Remark]
    machines: list[MachineTime]
    columns: Columns
    charts: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTime:
    """One of the eight machines (measure/machines.py). `state_s`: seconds in each state, of all its executors
    together. `waits_s`: the same for what they waited for, as sampled once a second."""

    name: str
    executors: list[str]
    state_s: Mapping[str, float]
    waits_s: Mapping[str, float]


def run_data(recorded: Recorded) -> RunData:
    """Raises RefusedError if no train step of the run has ended yet, and what reading its files raises."""
    profile = recorded.loaded.profile
    settings = LoopSettings.of(profile)
    totals = Totals()
    length_s = recorded.status.progress.time_s if recorded.status else 0.0
    timeline = Timeline(roles=recorded.roles, length_s=length_s).read(recorded.timeline())
    lines = (
        line | {"samples": line["groups_trained"] * profile.rollout.n} | timeline.shares.get(line["step"], {})
        for line in map(dict, totals.counting(recorded.metrics()))
    )
    columns = columns_of(lines, recorded.num_steps())
    if not totals.steps:
        why = f"run '{recorded.name}' has nothing to report: its metrics.jsonl has no train step"
        raise RefusedError(why, hint=f"`asyncrl status {as_typed(recorded.files.path)}` says how far it is")
    recorded_events = list(recorded.events(*MARKS, PUBLISHED))
    events = [_event(event, settings.schedule.step_groups * profile.rollout.n) for event in recorded_events]
    by_name = {name: [event for event in events if event["event"] == name] for name in (*MARKS, PUBLISHED)}
    with_score = [event for event in by_name["eval"] if is_number(event["reward_mean"])]
    # A resume may repeat one.
    evals = list({(event["version"], event["eval_set"]): event for event in with_score}.values())
    charts = {
        "name": recorded.name,
        "steps_per_point": columns.steps_per_point,
        "columns": columns.values,
        "lows": columns.lows,
        "highs": columns.highs,
        "evals": evals,
        "marks": [mark for name in MARKS for mark in evenly(by_name[name], MOST_MARKS)],
        "published_s": [event["time_s"] for event in by_name[PUBLISHED]],
        "timeline": timeline.to_json(),
        "limits": {"staleness": settings.schedule.max_staleness, "logprob_diff": settings.max_logprob_diff},
    }
    verdict = verdict_of(totals, settings, is_divisible=max(_processes(recorded)) > 1)
    damage = [Remark("damaged files", "bad", note) for note in recorded.damage.notes]
    return RunData(
        name=recorded.name,
        loaded=recorded.loaded,
        facts=_facts(recorded, settings, totals),
        findings=[*_outcome(recorded, totals, recorded_events), *damage, *verdict],
        machines=timeline.machines(),
        columns=columns,
        charts=charts,
    )


def _event(event: EventLine, samples_per_step: int) -> dict[str, object]:
    """What a page shows of an event."""
    name, step = event["event"], event.get("step", 0)
    scores = {key: event.get(key) for key in EVAL_KEYS} if name == "eval" else {}
    text = event_text(event) or f"{name}: {event.get('worker', '')}"
    place = {"step": step, "time_s": rounded(event.get("time_s", 0.0)), "samples": step * samples_per_step}
    return {"event": name, "kind": MARKS.get(name, name), "text": text, **scores, **place}


def _facts(recorded: Recorded, settings: LoopSettings, totals: Totals) -> list[tuple[str, str]]:
    profile, schedule = settings.profile, settings.schedule
    rollouts = "partial" if profile.async_training.partial_rollout else "whole"
    window = f"{counted(schedule.window_steps, 'train step')} per version (K)"
    kinds = {"environment": profile.task.environment, "reward": profile.task.reward}
    task = [profile.task.source, *(f"{kind} {name}" for kind, name in kinds.items() if name != "auto")]
    groups = f"{schedule.step_groups} groups of {profile.rollout.n} responses per train step, "
    groups += f"{schedule.window_groups} per version"
    if profile.async_training.on_stale != "accept":
        groups += f"; no token older than {counted(schedule.max_staleness, 'version')}"
    steps = f"{count(totals.steps)} of {count(schedule.train_steps)} steps"
    attempts = counted(max(len(recorded.attempts), 1), "attempt")
    ranks, workers = _processes(recorded)
    trainer = counted(ranks, "trainer rank") if ranks else "trainer"
    where = "in turns on the same resources" if profile.placement.colocate else "apart"
    device = f", {profile.placement.device}" if profile.placement.device != "auto" else ""
    return [
        ("state", _state(recorded)),
        ("mode", f"{schedule.mode}: {window}, eta {schedule.eta}, {rollouts} rollouts"),
        ("profile", recorded.status.profile if recorded.status else profile.name),
        ("model", f"{profile.model.path}, {profile.model.dtype}"),
        ("task", ", ".join(task)),
        ("engine", profile.rollout.engine),
        ("placement", f"{trainer} and {counted(workers, 'rollout worker')}, {where}{device}"),
        ("schedule", groups),
        ("trained", f"{steps}, {count(totals.last.get('tokens_trained'))} tokens"),
        ("time", f"{clock(totals.last.get('time_s'))} of training, {attempts}"),
    ]


def _processes(recorded: Recorded) -> tuple[int, int]:
    """Numbers of trainer ranks and rollout workers. All ranks are one executor, so their logs are counted. A
    simulated run has none."""
    ranks = sum(1 for attempt in recorded.attempts[-1:] for _ in attempt.glob("trainer-*.log"))
    return ranks, list(recorded.roles.values()).count("rollout")


def _state(recorded: Recorded) -> str:
    try:
        found = read_status(str(recorded.files.path), recorded.files.path.parent)
    except AsyncrlError as error:
        return error.message
    phase = found.status.phase
    if error_text := found.status.error:
        return f"{phase}: {error_text}"
    return found.remark or (phase if phase in ENDED else f"{phase}, {found.liveness}")


def _outcome(recorded: Recorded, totals: Totals, events: list[EventLine]) -> Iterator[Remark]:
    if recorded.status and (error := recorded.status.error):
        yield Remark("outcome", "bad", f"The run ended in an error: {error}", f"asyncrl logs {recorded.name}")
    resumes = 0 if recorded.replay_of else sum(event["event"] == "resumed" for event in events)
    again = f", resumed {counted(resumes, 'time')}" if resumes else ""
    text = f"{count(totals.steps)} train steps in {clock(totals.last.get('time_s'))}{again}. "
    evals = [event for event in events if is_number(event.get("reward_mean")) and not event.get("eval_set")]
    learns = not (recorded.status and recorded.status.profile.startswith("SIMULATED"))
    if recorded.replay_of:
        text += f"A replay of {recorded.replay_of}, whose trajectories and rewards these are."
        own = f" An eval of the replayed weights gave {scored(evals[-1])}." if evals else ""
        yield Remark("learning", "note", f"{text}{own}")
    elif learns:
        yield learned(evals, totals, text)
    else:
        text += "SIMULATED: nothing is learned, and rewards are drawn."
        yield Remark("learning", "note", text)
    yield from warned([event for event in events if event["event"] == "warning"], recorded.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """`values` are numbers, or lists of numbers as in metrics.jsonl. `lows` and `highs` of the numbers are
    empty unless steps are joined."""

    steps_per_point: int
    values: Values
    lows: Values
    highs: Values


def columns_of(lines: Iterable[Line], num_steps: int) -> Columns:
    """`num_steps`: how many lines there are."""
    steps_per_point = 1 if num_steps <= MOST_STEPS else -(-num_steps // JOINED_POINTS)
    means, lows, highs, remaining = list[Point](), list[Point](), list[Point](), iter(lines)
    while steps := list(islice(remaining, steps_per_point)):
        found = {key: [line[key] for line in steps if key in line] for line in steps for key in line}
        means.append({key: _mean(values) for key, values in found.items()})
        if steps_per_point > 1:
            numbers = {key: values for key, values in found.items() if not isinstance(values[0], list)}
            lows.append({key: rounded(min(values)) for key, values in numbers.items()})
            highs.append({key: rounded(max(values)) for key, values in numbers.items()})
    columns = [_columns(points) for points in (means, lows, highs)]
    return Columns(steps_per_point=steps_per_point, values=columns[0], lows=columns[1], highs=columns[2])


def _columns(points: Sequence[Point]) -> Values:
    return {key: [point.get(key) for point in points] for key in dict.fromkeys(chain.from_iterable(points))}


def _mean(values: Sequence[Measured]) -> Measured:
    """Of lists: item by item, where a shorter one has zeros (histograms are as long as their highest
    count)."""
    if lists := [value for value in values if isinstance(value, list)]:
        return [rounded(fmean(items)) for items in zip_longest(*lists, fillvalue=0)]
    numbers = [value for value in values if not isinstance(value, list)]
    return rounded(fmean(numbers) if len(numbers) > 1 else numbers[0])


def rounded(value: float) -> float:
    """With `DIGITS` significant digits; whole numbers unchanged."""
    if isinstance(value, int):
        return value
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 10**DIGITS else short


def _sums() -> Sums:
    return defaultdict(lambda: defaultdict(float))


@dataclass(slots=True)
class Timeline:
    """Reads timeline.jsonl line by line. `length_s`: the run's time; `merged_s`: length of the cells, 0 if
    every span is there. `shares`: step -> shares of states in its time, by machine; of scorers that are none
    together. `state_s`, `waits_s`: seconds in each state, and in each wait, in the same way."""

    roles: Mapping[str, str]
    length_s: float
    most_spans: int = MOST_SPANS
    spans: Spans = field(default_factory=dict)
    shares: dict[int, dict[str, float]] = field(default_factory=dict)
    merged_s: float = 0.0
    state_s: Sums = field(default_factory=_sums)
    waits_s: Sums = field(default_factory=_sums)

    def read(self, lines: Iterable[TimelineLine]) -> Timeline:
        waits = dict[str, tuple[float, str]]()
        for line in lines:
            spent_s = _sums()
            for name, added in line["spans"].items():
                whose = self._machine_or_role(name)
                spans, states = self.spans.setdefault(name, []), spent_s[whose]
                for state, start_s, end_s in added:
                    add_span(spans, state, start_s, end_s)
                    states[state] += end_s - start_s
                    self.state_s[whose][state] += end_s - start_s
            for name, samples in line.get("waits", {}).items():
                for at_s, text in samples:
                    since_s, before = waits.get(name, (at_s, ""))
                    self.waits_s[self._machine_or_role(name)][before] += max(0.0, at_s - since_s)
                    waits[name] = at_s, VARIES.sub("", text)
            self.shares[line.get("step", 0)] = {
                f"states/{machine}/{state}": seconds / sum(states.values())
                for machine, states in spent_s.items()
                if sum(states.values()) > 0
                for state, seconds in states.items()
            }
            if self._num_spans > 4 * self.most_spans:
                self._merge()
        ended_s = max((spans[-1][2] for spans in self.spans.values() if spans), default=0.0)
        for name, (since_s, text) in waits.items():
            self.waits_s[self._machine_or_role(name)][text] += max(0.0, ended_s - since_s)
        if self._num_spans > self.most_spans or self.merged_s:
            self._merge()
        return self

    @property
    def _num_spans(self) -> int:
        return sum(map(len, self.spans.values()))

    def _merge(self) -> None:
        # `length_s` is 0 if the run's status is lost.
        ended_s = max(end_s for spans in self.spans.values() for _, _, end_s in spans)
        num_cells = self.most_spans / (max(len(self.spans), 1) * STATES_PER_CELL)
        self.merged_s = max(self.length_s, ended_s, 1e-9) / num_cells
        for name, spans in self.spans.items():
            cells: dict[int, dict[str, float]] = {}
            for state, start_s, end_s in spans:
                for cell in range(int(start_s / self.merged_s), int(end_s / self.merged_s) + 1):
                    inside_s = min(end_s, (cell + 1) * self.merged_s) - max(start_s, cell * self.merged_s)
                    if inside_s > 1e-9:
                        states = cells.setdefault(cell, {})
                        states[state] = states.get(state, 0.0) + inside_s
            merged = self.spans[name] = list[RecordedSpan]()
            for cell, states in cells.items():
                at_s = cell * self.merged_s
                for state in sorted(states):
                    add_span(merged, state, at_s, at_s + states[state])
                    at_s += states[state]

    def machines(self) -> list[MachineTime]:
        whose = {one: self._machine_or_role(one) for one in self.spans}
        executors = {name: [one for one in whose if whose[one] == name] for name in MACHINES}
        return [
            MachineTime(name=name, executors=names, state_s=self.state_s[name], waits_s=self.waits_s[name])
            for name, names in executors.items()
            if names
        ]

    def _machine_or_role(self, name: str) -> str:
        """The executor's machine, or its role if it is none."""
        role = self.roles.get(name, name)
        return machine_of(name, role) or role

    def to_json(self) -> dict[str, object]:
        """Executor -> state -> start and length of each span, one after the other."""

        def place(name: str) -> tuple[int, int, str]:
            role = self.roles.get(name, name)
            return (FLOW.index(role) if role in FLOW else len(FLOW), len(name), name)

        executors: dict[str, dict[str, list[float]]] = {}
        for name in sorted(self.spans, key=place):
            states = executors[shown_name(name, self.roles.get(name, name))] = {}
            for state, start_s, end_s in self.spans[name]:
                times_s = round(start_s, DECIMALS), round(end_s - start_s, DECIMALS)
                states.setdefault(state, []).extend(times_s)
        return {"merged_s": round(self.merged_s, DECIMALS), "executors": executors}
