"""A claim about a run, the cases in which it was checked, and the verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["holds", "fails", "not checked"]
MOST_TEXTS = 5
"""Failures of a claim that are listed; all are counted."""


@dataclass(slots=True)
class Claim:
    """`what`: the claim as a sentence. `limit`: the largest deviation with which it holds. `unchecked`: what
    was left out and why, with the key that would keep what it takes; without any case, the claim was not
    checked."""

    name: str
    what: str
    limit: float | None = None
    cases: int = 0
    worst: float | None = None
    num_wrong: int = 0
    wrong: list[str] = field(default_factory=list)
    unchecked: str = ""

    @property
    def verdict(self) -> Verdict:
        return "fails" if self.num_wrong else "holds" if self.cases else "not checked"

    def check(self, holds: object, text: str) -> None:
        """Count a case. `text`: what is wrong, if it does not hold."""
        self.cases += 1
        if not holds:
            self.num_wrong += 1
            if len(self.wrong) < MOST_TEXTS:
                self.wrong.append(text)

    def near(self, found: Any, expected: float, text: str, known_within: float = 0.0) -> None:
        """Count a case that holds if `found` is a number within `limit` of `expected`, which itself is known
        within `known_within`."""
        assert self.limit is not None
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        deviation = max(abs(found - expected) - known_within, 0.0) if is_number else float("nan")
        if self.worst is None or not deviation <= self.worst:  # also if it is not a number
            self.worst = deviation
        self.check(deviation <= self.limit, f"{text}: {found}, but {expected:.6g} by the audit")

    def figures(self) -> tuple[str, str]:
        """The largest deviation and the limit, for a table."""
        worst, limit = ("" if value is None else f"{value:.3g}" for value in (self.worst, self.limit))
        return worst, limit

    def to_json(self) -> dict[str, Any]:
        names = ("name", "what", "verdict", "cases", "worst", "limit", "num_wrong", "wrong", "unchecked")
        is_number = self.worst is not None and math.isfinite(self.worst)
        return {name: getattr(self, name) for name in names} | {"worst": self.worst if is_number else None}
