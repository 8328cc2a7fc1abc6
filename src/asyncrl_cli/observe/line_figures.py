"""The figures of metrics.jsonl: what each means (meanings.toml, as docs/metrics.md and reports show it), and
how they add up over steps."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files

from asyncrl_cli.observe.line_types import Line

PER_SECOND = ("trainer/", "rollouter/", "overlap_ratio")
"""Figures that are weighted by their step's seconds; all others by its sampled tokens."""


@cache
def meanings() -> Mapping[str, str]:
    """Names of metrics (several with blanks between them, patterns as in the file) -> what they mean, in the
    file's order."""
    return tomllib.loads(files("asyncrl_cli.observe").joinpath("meanings.toml").read_text(encoding="utf-8"))


def meaning_of(metric: str) -> str | None:
    """None for an unknown metric."""
    return next((meaning for pattern, meaning in _patterns() if pattern.fullmatch(metric)), None)


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """`{a,b}` in a name stands for each of them, `<name>` for anything but a slash."""
    compiled = []
    for names, meaning in meanings().items():
        pattern = re.sub(
            r"\{(.*?)\}", lambda found: f"(?:{found[1].replace(',', '|')})", "|".join(names.split())
        )
        compiled.append((re.compile(re.sub(r"<\w+>", "[^/]+", pattern)), meaning))
    return compiled


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
