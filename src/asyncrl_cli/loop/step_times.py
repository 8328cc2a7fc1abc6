"""Where the time of a train step goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PARTS = ("wait_data", "old_logprob", "train", "gather", "checkpoint", "eval")


class StepTimes:
    """`eval_s()`: seconds during which an eval ran, so far."""

    def __init__(self, now: Callable[[], float], eval_s: Callable[[], float]) -> None:
        self._now = now
        self._eval_s = eval_s
        self._began_s = now()
        self._spent_s: defaultdict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """The first step begins now; what was spent before is part of it."""
        self._began_s = self._now()

    def add(self, part: str, seconds: float) -> None:
        self._spent_s[part] += seconds

    @contextmanager
    def spending(self, part: str) -> Iterator[None]:
        began_s = self._now()
        try:
            yield
        finally:
            self.add(part, self._now() - began_s)

    @contextmanager
    def waiting(self, part: str) -> Iterator[None]:
        """As `spending`, without the time in which an eval ran: that is its own part."""
        eval_began_s, began_s = self._eval_s(), self._now()
        try:
            yield
        finally:
            eval_s = self._eval_s() - eval_began_s
            self.add("eval", eval_s)
            self.add(part, self._now() - began_s - eval_s)

    def close(self) -> dict[str, float]:
        """The parts of the step that ends now, by name; the next one begins."""
        now_s = self._now()
        step_s = now_s - self._began_s
        timing_s = {part: self._spent_s[part] for part in _PARTS}
        timing_s |= {"other": step_s - sum(timing_s.values()), "step": step_s}
        self._began_s = now_s
        self._spent_s.clear()
        return timing_s
