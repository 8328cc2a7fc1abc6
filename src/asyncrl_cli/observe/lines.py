"""Reads a run's metrics.jsonl, events.jsonl and timeline.jsonl back, derives figures from a line of metrics, and adds lines up."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.observe.format import is_number
from asyncrl_cli.observe.status import OPEN, Figure, Seconds
from asyncrl_cli.safe_files import Count, Finite, UnsafeFile, open_regular, parse_json, read_lines, reason

Line = Mapping[str, Any]
RecordedSpan = tuple[str, float, float]
"""State, start_s, end_s."""
Spans = dict[str, list[RecordedSpan]]
Counts = dict[str, list[tuple[float, float]]]
LISTS = frozenset({"staleness/histogram", "staleness/span_histogram", "response_tokens/quantiles"})
"""The keys whose values are lists; all others hold single numbers."""

PER_SECOND = ("trainer/", "rollouter/", "overlap_ratio")
"""Figures that are weighted by their step's seconds; all others by its sampled tokens."""


class MetricsLine(TypedDict, extra_items=Figure | list[Figure]):
    """What every line of metrics.jsonl has. All its other keys are figures."""

    step: int | Finite
    time_s: int | Finite
    groups_trained: int | Finite


@OPEN
class EventLine(TypedDict):
    """The keys of a line of events.jsonl that are read back."""

    event: str
    time_s: NotRequired[Seconds]
    step: NotRequired[Count]
    from_step: NotRequired[Count]
    version: NotRequired[Count]
    group: NotRequired[str]
    workers: NotRequired[dict[str, Count]]
    worker: NotRequired[str]
    reason: NotRequired[str]
    tokens: NotRequired[Count]
    num_bytes: NotRequired[float]
    reward_mean: NotRequired[Figure | None]
    reward_low: NotRequired[Finite]
    reward_high: NotRequired[Finite]
    num_prompts: NotRequired[Count]
    eval_set: NotRequired[str]
    prompts: NotRequired[str]
    rewards: NotRequired[list[Finite | None]]
    publish_s: NotRequired[Seconds]
    send_s: NotRequired[Seconds]
    load_s: NotRequired[Seconds]
    pause_s: NotRequired[Seconds]


@OPEN
class TimelineLine(TypedDict):
    """The keys of a line of timeline.jsonl that are read back."""

    step: NotRequired[Count]
    spans: Spans
    running: NotRequired[Counts]
    waits: NotRequired[dict[str, list[tuple[float, str]]]]
    slots: NotRequired[dict[str, list[tuple[Count, str, float, float]]]]


def read_metrics(path: Path) -> list[Line]:
    """The lines of metrics.jsonl, without values that are not finite. Raises as `lines_of`."""
    return list(metrics_of(path))


def metrics_of(path: Path) -> Iterator[Line]:
    """`read_metrics`, line by line."""
    return map(_finite, lines_of(path, MetricsLine))


def lines_of(path: Path, kind: Any, wanted: Callable[[bytes], bool] = bool) -> Iterator[Any]:
    """The lines that are `wanted`, parsed as `kind`. An incomplete last line is left out: its writer was killed, or is writing it.

    Raises a ConfigError that names a malformed line, or says why the file cannot be read.
    """
    try:
        for number, line in (lines := enumerate(read_lines(path), start=1)):
            if line and not line.isspace() and wanted(line):
                try:
                    entry = parse_json(line, kind)
                except ValueError as wrong:
                    if next(lines, None) is None and _ends_amid_a_line(path):
                        return
                    raise ConfigError(f"{path}:{number}: {wrong}", hint="without that line the file can be read") from None
                yield entry
    except (OSError, UnsafeFile) as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}", hint="give the directory of a run, like runs/NAME") from None


def _ends_amid_a_line(path: Path) -> bool:
    with open_regular(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_timeline(path: Path) -> tuple[Spans, Counts]:
    """A run's spans and counts of running sequences, by executor, in order of time. A span that was split over two lines is joined.

    Raises as `lines_of`.
    """
    spans: Spans = {}
    running: Counts = {}
    for line in lines_of(path, TimelineLine):
        for name, stays in line["spans"].items():
            joined = spans.setdefault(name, [])
            for state, start_s, end_s in stays:
                add_span(joined, state, start_s, end_s)
        for name, samples in line.get("running", {}).items():
            running.setdefault(name, []).extend(samples)
    return spans, running


def add_span(spans: list[RecordedSpan], state: str, start_s: float, end_s: float) -> None:
    """Append a span, or extend the last one if it has the same state and there is no gap."""
    if spans and spans[-1][0] == state and start_s - spans[-1][2] < 1e-3:
        spans[-1] = (state, spans[-1][1], max(end_s, spans[-1][2]))
    else:
        spans.append((state, start_s, end_s))


def _finite(line: Line) -> Line:
    return {key: value for key, value in line.items() if isinstance(value, list) == (key in LISTS) and _is_usable(value)}


def _is_usable(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_usable, value))
    return is_number(value) and abs(value) < 1e15


def spent_s(line: Line, part: str) -> float:
    """Seconds of `timing/<part>_s`, 0 where the line has no such part."""
    return float(line.get(f"timing/{part}_s", 0.0))


def trajectories(line: Line) -> int:
    """Trajectories that the step trained: the staleness histogram counts each once."""
    return sum(line.get("staleness/histogram", ()))


def sampled_tokens(line: Line) -> float:
    """Sampled tokens that the step trained: mean response length times trajectories."""
    return float(line.get("response_tokens/mean", 0.0) * trajectories(line))


class Totals:
    """Means (weighted as in docs/metrics.md), maxima, first and last values of `lines` of metrics and of those that `of` passes on.
    `parts_s`: seconds of each `timing/<part>_s`."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.steps = 0
        self.first: Line = {}
        self.last: Line = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._weights: dict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}
        self.parts_s: dict[str, float] = defaultdict(float)
        for line in lines:
            self._add(line)

    def of(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Pass the lines on and add them up."""
        for line in lines:
            self._add(line)
            yield line

    def _add(self, line: Line) -> None:
        self.steps, self.first, self.last = self.steps + 1, self.first or line, line
        step_s, tokens = spent_s(line, "step"), sampled_tokens(line)
        for key, value in line.items():
            if key.startswith("timing/"):
                self.parts_s[key.removeprefix("timing/").removesuffix("_s")] += value
            elif not isinstance(value, list):
                weight = step_s if key.startswith(PER_SECOND) else tokens
                self._sums[key] += weight * value
                self._weights[key] += weight
                self._maxima[key] = max(value, self._maxima.get(key, value))

    def mean(self, key: str) -> float | None:
        """None if it was never measured."""
        return self._sums[key] / self._weights[key] if self._weights.get(key) else None

    def most(self, key: str) -> float | None:
        return self._maxima.get(key)

    def seconds(self, *parts: str) -> float | None:
        """The time of these parts; None if none was measured."""
        known = [self.parts_s[part] for part in parts if part in self.parts_s]
        return sum(known) if known else None

    def share(self, *parts: str) -> float:
        """The share of these parts in the time of all steps."""
        return (self.seconds(*parts) or 0.0) / max(self.parts_s["step"], 1e-9)
