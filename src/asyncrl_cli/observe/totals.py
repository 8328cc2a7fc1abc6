"""Figures of lines of metrics: means with the weights of docs/metrics.md, maxima, first and last values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from asyncrl_cli.observe.lines import Line, sampled_tokens, spent_s

PER_SECOND = ("trainer/", "rollouter/", "overlap_ratio")
"""Figures that are weighed by their step's seconds; all others by its sampled tokens."""


class Totals:
    """Of these lines, and of all that `of` passes on. `parts_s`: seconds of each `timing/<part>_s`."""

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
