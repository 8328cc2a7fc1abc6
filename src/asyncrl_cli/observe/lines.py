"""Reads a run's metrics.jsonl, events.jsonl, timeline.jsonl and samples back, derives figures from a line of
metrics, and adds lines up.

Anything may stand in these files. A line is parsed once, as the type of its file (line_types.py); the code
that uses it checks nothing again. A line that does not fit is left out, and counted in a `Damage`, for the
user to be told.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.base.safe_files import UnsafeFile, open_regular, parse_json, read_lines, reason
from asyncrl_cli.observe.format import MOST_SHOWN, is_number
from asyncrl_cli.observe.line_types import Counts, MetricsLine, RecordedSpan, Spans, TimelineLine

Line = Mapping[str, Any]
LISTS = frozenset({"staleness/histogram", "staleness/span_histogram", "response_tokens/quantiles"})
"""The keys of metrics whose values are lists; all others hold single numbers."""

MOST_NOTED = 100_000
"""Limit for the damaged lines of a file that are counted."""
PER_SECOND = ("trainer/", "rollouter/", "overlap_ratio")
"""Figures that are weighted by their step's seconds; all others by its sampled tokens."""


class Damage:
    """Lines that were left out because they are malformed. A line counts once, however often it is read."""

    def __init__(self) -> None:
        self._lines: dict[Path, dict[int, str]] = {}

    def add(self, path: Path, number: int, why: str) -> None:
        lines = self._lines.setdefault(path, {})
        if len(lines) < MOST_NOTED:
            lines[number] = why

    def add_file(self, path: Path, why: str) -> None:
        """A whole file was left out."""
        self._lines[path] = {0: why}

    @property
    def notes(self) -> list[str]:
        """For each file how many lines, and what is wrong with the first one."""
        return [_note(path, lines) for path, lines in self._lines.items()]


def _note(path: Path, lines: Mapping[int, str]) -> str:
    if 0 in lines:
        return f"{path} is left out: {lines[0]}"
    number, more = min(lines), " or more" if len(lines) == MOST_NOTED else ""
    return f"damaged lines of {path} left out: {len(lines):,}{more}; line {number}: {lines[number]}"


def read_metrics(path: Path) -> list[Line]:
    """All lines of metrics.jsonl, for figures that need every line. Raises ConfigError as `lines_of`, and for
    a damaged line."""
    lines = list(metrics_of(path, damage := Damage()))
    for note in damage.notes:
        raise ConfigError(note, hint="use another run")
    return lines


def metrics_of(path: Path, damage: Damage) -> Iterator[Line]:
    """The lines of metrics.jsonl, without values that are not finite."""
    return map(_finite, lines_of(path, MetricsLine, damage))


def lines_of(path: Path, kind: Any, damage: Damage, wanted: Callable[[bytes], bool] = bool) -> Iterator[Any]:
    """The lines that are `wanted`, parsed as `kind`; none if there is no file. Malformed lines are counted in
    `damage`, but not the last one if it is incomplete: its writer was killed, or is writing it.

    Raises ConfigError if the file cannot be read.
    """
    # number and fault of a malformed line, until it is known not to be the last one
    wrong: tuple[int, str] | None = None
    with _readable(path):
        for number, line in enumerate(read_lines(path), start=1):
            if wrong:
                damage.add(path, *wrong)
                wrong = None
            if line and not line.isspace() and wanted(line):
                try:
                    entry = parse_json(line, kind)
                except ValueError as error:
                    wrong = number, str(error)
                    continue
                yield entry
        if wrong and not _ends_amid_a_line(path):
            damage.add(path, *wrong)


def num_lines(path: Path) -> int:
    """How many lines a file has; 0 if there is none. Raises ConfigError if it cannot be read."""
    with _readable(path):
        return sum(1 for _ in read_lines(path))
    return 0


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Leave the block if the file is missing. Raises ConfigError if it cannot be read."""
    try:
        yield
    except FileNotFoundError:
        return
    except (OSError, UnsafeFile) as error:
        hint = "the run's other files may be readable without it"
        raise ConfigError(f"{path} cannot be read: {reason(error)}", hint=hint) from None


def _ends_amid_a_line(path: Path) -> bool:
    with open_regular(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def joined_timeline(lines: Iterable[TimelineLine]) -> tuple[Spans, Counts]:
    """A run's spans and counts of running sequences, by executor, in order of time. A span that was split
    over two lines is joined."""
    spans: Spans = {}
    running: Counts = {}
    for line in lines:
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
    return {
        key: value
        for key, value in line.items()
        if isinstance(value, list) == (key in LISTS) and _is_usable(value)
    }


def _is_usable(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_usable, value))
    return is_number(value) and abs(value) < MOST_SHOWN


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
    """Means (weighted as in docs/metrics.md), maxima, first and last values of `lines` of metrics and of
    those that `of` passes on. `parts_s`: seconds of each `timing/<part>_s`."""

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
