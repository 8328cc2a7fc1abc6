"""The newest report of every executor, and their spans on the driver's clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from asyncrl_cli.loop.states import ExecutorReport, Span, State

K = TypeVar("K")
WAITS_FOR_RESTART = "a restart"
"""What an executor waits for whose process is gone."""


class ReportBook:
    """Collects reports and hands out spans that everybody has reported up to.

    Executors have clocks of their own. A report made at `now_s` arrives later, so `arrival - now_s` bounds the difference of the
    clocks from above; the least of them seen so far is the best estimate (Cristian's algorithm, one way).

    Executors are started before the loop begins, and wait for each other: their time before `began_s` counts for nothing.

    A worker that is restarted begins its integrals anew. Here they go on: what its process had counted, the time without one
    (state `failed`, idle), and what the next one counts are one sum, that never falls.
    """

    def __init__(self, began_s: float = float("-inf")) -> None:
        self.began_s = began_s
        self.latest: dict[str, ExecutorReport] = {}
        self._offset_s: dict[str, float] = {}
        self._spans: dict[str, list[Span]] = {}
        self._workers: dict[str, str] = {}
        self._lost: dict[str, None] = {}
        self._awaited: dict[str, None] = {}
        self._bases: dict[str, ExecutorReport] = {}

    def add(self, report: ExecutorReport, arrived_s: float, worker: str = "") -> bool:
        """Take a report in; true if the executor has made tokens since the last one. `worker`: in whose process it is."""
        name = report.name
        self._workers[name] = worker
        previous = self.latest.get(name)
        if previous is None:
            self._leave_out_the_start(report, arrived_s)
        elif name not in self._awaited and report.now_s < previous.now_s:
            # A later report has arrived first. Its sums include those of this one, its spans do not.
            self._spans[name] += _moved(report.spans, self._offset_s[name], self.began_s)
            self._spans[name].sort(key=lambda span: span.start_s)
            return False
        from_s = self._begin_anew(report, arrived_s) if name in self._awaited else self.began_s
        self.latest[name] = _on_top(self._bases[name], report) if name in self._bases else report
        offset_s = min(arrived_s - report.now_s, self._offset_s.get(name, float("inf")))
        self._offset_s[name] = offset_s
        self._spans.setdefault(name, []).extend(_moved(report.spans, offset_s, from_s))
        return previous is None or _has_made_tokens(previous, self.latest[name])

    def lost(self, worker: str, now_s: float) -> int:
        """The worker's process is gone: its executors are failed from now on. Returns the tokens of what ran there."""
        running_tokens = 0.0
        for name in [name for name, owner in self._workers.items() if owner == worker]:
            report = self.latest[name]
            running_tokens += report.gauges.get("running_tokens", 0)
            gauges = {gauge: amount if gauge == "slots" else 0.0 for gauge, amount in report.gauges.items()}
            self.latest[name] = replace(report, state=State.FAILED, waiting_for=WAITS_FOR_RESTART, spans=(), gauges=gauges)
            self._awaited.pop(name, None)
            self._lost[name] = None
        self.advance_lost(now_s)
        return int(running_tokens)

    def advance_lost(self, now_s: float) -> None:
        """The time of executors without a process goes on, too."""
        for name in self._lost:
            self._fail_until(name, now_s)

    def returned(self, worker: str, now_s: float) -> None:
        """The worker has a process again; its executors' next reports are that one's."""
        self.advance_lost(now_s)
        for name in [name for name in self._lost if self._workers[name] == worker]:
            del self._lost[name]
            self._awaited[name] = None

    def _fail_until(self, name: str, now_s: float) -> None:
        report = self.latest[name]
        ended_s = report.now_s + self._offset_s[name]
        down_s = now_s - ended_s
        if down_s <= 0:
            return
        spans, start_s = self._spans[name], ended_s
        if spans and spans[-1].state is State.FAILED:
            start_s = spans.pop().start_s
        spans.append(Span(state=State.FAILED, start_s=start_s, end_s=now_s))
        state_s = report.state_s | {State.FAILED: report.state_s.get(State.FAILED, 0.0) + down_s}
        sums = report.sums | ({"idle_s": report.sums["idle_s"] + down_s} if "idle_s" in report.sums else {})
        self.latest[name] = replace(report, now_s=report.now_s + down_s, state_s=state_s, sums=sums)

    def _leave_out_the_start(self, report: ExecutorReport, arrived_s: float) -> None:
        """Of an executor's first report, which has the spans of all its life."""
        offset_s = arrived_s - report.now_s
        state_s: dict[State, float] = {}
        for span in report.spans:
            early_s = min(span.end_s + offset_s, self.began_s) - (span.start_s + offset_s)
            if early_s > 0:
                state_s[span.state] = state_s.get(span.state, 0.0) - early_s
        if state_s:
            idle_s = sum(seconds for state, seconds in state_s.items() if state is not State.BUSY)
            sums = {"idle_s": idle_s} if "idle_s" in report.sums else {}
            self._bases[report.name] = replace(report, state_s=state_s, sums=sums)

    def _begin_anew(self, report: ExecutorReport, arrived_s: float) -> float:
        """The first report of the next process. While that started it was idle, and failed in these books: that counts once.

        Returns from when on (by the driver's clock) its spans count.
        """
        name, base = report.name, self.latest[report.name]
        del self._awaited[name]
        ended_s = base.now_s + self._offset_s.pop(name)
        counted_s = max(0.0, ended_s - (arrived_s - sum(report.state_s.values())))
        first = report.spans[0].state if report.spans else report.state
        state_s = base.state_s | {first: base.state_s.get(first, 0.0) - counted_s}
        sums = base.sums | ({"idle_s": base.sums["idle_s"] - counted_s} if "idle_s" in base.sums else {})
        self._bases[name] = replace(base, state_s=state_s, sums=sums)
        return ended_s

    def take_spans(self) -> dict[str, tuple[Span, ...]]:
        """Spans up to the moment that every executor has reported; what came later is kept for the next call."""
        if not self.latest:
            return {}
        until_s = min(report.now_s + self._offset_s[name] for name, report in self.latest.items())
        taken: dict[str, tuple[Span, ...]] = {}
        for name, spans in self._spans.items():
            taken[name] = tuple(
                Span(state=span.state, start_s=span.start_s, end_s=min(span.end_s, until_s))
                for span in spans
                if span.start_s < until_s
            )
            self._spans[name] = [
                Span(state=span.state, start_s=max(span.start_s, until_s), end_s=span.end_s)
                for span in spans
                if span.end_s > until_s
            ]
        return taken


def _moved(spans: Iterable[Span], offset_s: float, from_s: float) -> list[Span]:
    """On the driver's clock, from `from_s` on."""
    return [
        Span(state=span.state, start_s=max(span.start_s + offset_s, from_s), end_s=span.end_s + offset_s)
        for span in spans
        if span.end_s + offset_s > from_s
    ]


def _on_top(base: ExecutorReport, report: ExecutorReport) -> ExecutorReport:
    """The sums of `report` continue those of `base`."""
    return replace(report, state_s=_sum(base.state_s, report.state_s), sums=_sum(base.sums, report.sums))


def _sum(left: Mapping[K, float], right: Mapping[K, float]) -> dict[K, float]:
    return {key: left.get(key, 0.0) + right.get(key, 0.0) for key in [*left, *(key for key in right if key not in left)]}


def _has_made_tokens(previous: ExecutorReport, report: ExecutorReport) -> bool:
    """Only sums of tokens tell work from waiting: sums of seconds always grow."""
    return any(amount != previous.sums.get(name) for name, amount in report.sums.items() if name.endswith("_tokens"))
