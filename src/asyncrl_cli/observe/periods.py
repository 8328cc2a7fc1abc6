"""What time a figure covers. Every figure of the screen, of `asyncrl status` and of a run's summary is one of these periods':

recent   the train steps that ended last, a minute of them: the very values of their lines in metrics.jsonl, joined
step     the train step under way, once it has taken longer than those (or while there are none)
run      all train steps, over resumes too: of a run that has ended
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.loop.values import Value, merge_into, shown
from asyncrl_cli.observe.format import duration

RECENT_S = 60.0
RECENT_STEPS = 120
"""Of very short steps these many are recent: joining them costs time, once a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Joined figures of `steps` whole train steps (0: of a part of one), from `from_s` to `to_s` of the run's time."""

    words: str
    from_s: float
    to_s: float
    steps: int
    figures: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"words": self.words, "from_s": self.from_s, "to_s": self.to_s, "steps": self.steps}


class RecentSteps:
    """The last steps' values, as many as ended within `RECENT_S` before the last one did."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, Mapping[str, Value]]] = deque(maxlen=RECENT_STEPS)
        self._joined: Period | None = None

    def add(self, from_s: float, to_s: float, values: Mapping[str, Value]) -> None:
        """A step begins where the line before it ends, whatever a clock's second reading says."""
        self._steps.append((self._steps[-1][1] if self._steps else from_s, to_s, values))
        while self._steps[0][1] <= to_s - RECENT_S:
            self._steps.popleft()
        self._joined = None

    def period(self) -> Period | None:
        """Joined once per step: a status is made every second, and there are values of every executor."""
        if self._joined is None and self._steps:
            joined: dict[str, Value] = {}
            for _, _, values in self._steps:
                merge_into(joined, values)
            from_s, to_s, steps = self._steps[0][0], self._steps[-1][1], len(self._steps)
            words = f"{'last step' if steps == 1 else f'last {steps} steps'}, {lasted(to_s - from_s)}"
            self._joined = Period(words=words, from_s=from_s, to_s=to_s, steps=steps, figures=shown(joined))
        return self._joined


def lasted(seconds: float) -> str:
    """About a minute is told in seconds."""
    return f"{seconds:.0f} s" if 60 <= seconds < 180 else duration(seconds)
