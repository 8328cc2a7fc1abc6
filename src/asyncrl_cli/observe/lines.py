"""Reads a run's metrics.jsonl, events.jsonl and timeline.jsonl back, and derives figures from a line of metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.observe.format import is_number
from asyncrl_cli.observe.status import OPEN, Figure, Seconds
from asyncrl_cli.safe_files import Count, UnsafeFile, open_regular, parse_json, read_lines, reason

Line = Mapping[str, Any]
RecordedSpan = tuple[str, float, float]
"""State, start_s, end_s."""
Spans = dict[str, list[RecordedSpan]]
Counts = dict[str, list[tuple[float, float]]]
LISTS = frozenset({"staleness/histogram", "staleness/span_histogram", "response_tokens/quantiles"})
"""The keys whose values are lists; all others hold single numbers."""

PLACE = ("step", "time_s", "groups_trained")
"""What every line has."""


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
    return map(_finite, lines_of(path, Annotated[dict[str, Figure | list[Figure]], AfterValidator(_with_its_place)]))


def _with_its_place(line: dict[str, Any]) -> dict[str, Any]:
    """The line, if it says where in the run it belongs: all that is made of lines needs that."""
    if missing := [key for key in PLACE if not is_number(line.get(key))]:
        raise ValueError(f"a line of metrics without {', '.join(missing)}")
    return line


def lines_of(path: Path, kind: Any, wanted: Callable[[bytes], bool] = bool) -> Iterator[Any]:
    """The lines that are `wanted`, parsed as `kind`. A last line that is cut short is left out: its writer was killed, or is at it.

    Raises ConfigError that names a malformed line, or says why the file cannot be read.
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
        raise ConfigError(f"{path} cannot be read: {reason(error)}", hint="give the directory of a run, as runs/NAME") from None


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
