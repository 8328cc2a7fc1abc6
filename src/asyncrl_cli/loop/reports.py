"""The newest report of every executor, and the executors' spans on the driver's clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TypeVar

from asyncrl_cli.measure.states import WAITS_FOR_RESTART, ExecutorReport, Span, State, Stay

K = TypeVar("K")


class _Process(Enum):
    NEW = auto()
    """It has not reported yet."""
    UP = auto()
    LOST = auto()


@dataclass(slots=True, kw_only=True)
class ExecutorHistory:
    """`report` is the newest, with the sums of `base` added: what earlier processes counted, minus what
    should not count. `spans` and `stays` have not been taken yet and are on the driver's clock, which is
    `offset_s` ahead of the executor's. Time before `from_s` does not count: the run or the present process
    was starting."""

    report: ExecutorReport
    worker: str
    from_s: float
    base: ExecutorReport | None = None
    offset_s: float = float("inf")
    spans: list[Span] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)
    process: _Process = _Process.NEW
    is_restarted: bool = False

    def begin(self, report: ExecutorReport, arrived_s: float) -> None:
        """Prepare for the first report of a process. That of the run's first process has all spans so far,
        unless it has overtaken an earlier report. Of a restarted one, reports of the start may be lost, and
        their spans with them; the sums have all."""
        self.process, self.offset_s = _Process.UP, arrived_s - report.now_s
        if self.is_restarted:
            early_s = max(0.0, self.from_s - (arrived_s - sum(report.state_s.values())))
            base = _plus(self.report, report.spans[0].state if report.spans else report.state, -early_s)
        else:
            base = self._without_start(self.report, report)
        self.base = base if base.state_s else None

    def overtaken(self, report: ExecutorReport) -> None:
        """Record a report that a later one has overtaken. The later one includes its sums, but not its spans
        and stays."""
        if not self.is_restarted:
            nothing = replace(
                self.report, state_s={}, sums={"idle_s": 0.0} if "idle_s" in self.report.sums else {}
            )
            base = self._without_start(self.base or nothing, report)
            self.base = base if base.state_s else None
            self.report = self._without_start(self.report, report)
        self.note(report)
        self.spans.sort(key=lambda span: span.start_s)

    def _without_start(self, sums: ExecutorReport, report: ExecutorReport) -> ExecutorReport:
        """`sums` minus the time of the spans of `report` before `from_s`."""
        for span in report.spans:
            early_s = min(span.end_s + self.offset_s, self.from_s) - (span.start_s + self.offset_s)
            if early_s > 0:
                sums = _plus(sums, span.state, -early_s, is_idle=span.state is not State.BUSY)
        return sums

    def update(self, report: ExecutorReport, arrived_s: float) -> None:
        if self.base is not None:
            sums = _sum(self.base.sums, report.sums)
            report = replace(report, state_s=_sum(self.base.state_s, report.state_s), sums=sums)
        self.report = report
        self.offset_s = min(arrived_s - report.now_s, self.offset_s)
        self.note(report)

    def note(self, report: ExecutorReport) -> None:
        """Keep the report's spans and stays."""
        self.spans += _moved(report.spans, self.offset_s, self.from_s)
        self.stays += [
            stay._replace(start_s=stay.start_s + self.offset_s, end_s=stay.end_s + self.offset_s)
            for stay in report.stays
        ]

    def fail_until(self, now_s: float) -> None:
        """Count the time without a process up to now as failed."""
        report, ended_s = self.report, self.report.now_s + self.offset_s
        down_s = now_s - ended_s
        if down_s <= 0:
            return
        start_s = ended_s
        if self.spans and self.spans[-1].state is State.FAILED:
            start_s = self.spans.pop().start_s
        self.spans.append(Span(state=State.FAILED, start_s=start_s, end_s=now_s))
        self.report = replace(_plus(report, State.FAILED, down_s), now_s=report.now_s + down_s)


class ReportBook:
    """Collects reports, and hands out spans up to the latest time that the reports of all executors cover.

    Executors have their own clocks. A report made at `now_s` arrives later, so `arrival - now_s` bounds the
    difference of the clocks from above; the smallest one seen so far is the best estimate (Cristian's
    algorithm, one way).

    Executors start before the loop and wait for each other, so their time before `began_s` does not count.

    A restarted process counts from zero. Here an executor's sums continue and never fall: what the old
    process counted, plus the time without a process (state `failed`, idle), plus what the new one counts.
    """

    def __init__(self, began_s: float = float("-inf")) -> None:
        self.began_s = began_s
        self._executors: dict[str, ExecutorHistory] = {}

    @property
    def latest(self) -> dict[str, ExecutorReport]:
        return {name: executor.report for name, executor in self._executors.items()}

    def add(self, report: ExecutorReport, arrived_s: float, worker: str = "") -> bool:
        """Record a report of an executor in the process of `worker`. True if it has made tokens since its
        last report."""
        executor = self._executors.get(report.name)
        if executor is None:
            nothing = replace(report, state_s={}, sums={"idle_s": 0.0} if "idle_s" in report.sums else {})
            executor = self._executors[report.name] = ExecutorHistory(
                report=nothing, worker=worker, from_s=self.began_s
            )
        previous = executor.report
        if executor.process is _Process.NEW:
            executor.begin(report, arrived_s)
        elif report.now_s < previous.now_s:
            executor.overtaken(report)
            return False
        executor.update(report, arrived_s)
        return _has_made_tokens(previous, executor.report)

    def lost(self, worker: str, now_s: float) -> int:
        """The worker's process is gone: its executors count as failed from now on. Returns the tokens of what
        ran there."""
        running_tokens = self.running_tokens(worker)
        for executor in self._of(worker):
            report = executor.report
            gauges = {gauge: amount if gauge == "slots" else 0.0 for gauge, amount in report.gauges.items()}
            executor.report = replace(
                report, state=State.FAILED, waiting_for=WAITS_FOR_RESTART, spans=(), gauges=gauges
            )
            executor.process = _Process.LOST
        self.advance_lost(now_s)
        return running_tokens

    def running_tokens(self, worker: str) -> int:
        """Tokens of the sequences that run in the worker's process, as last reported."""
        return int(sum(executor.report.gauges.get("running_tokens", 0) for executor in self._of(worker)))

    def advance_lost(self, now_s: float) -> None:
        for executor in self._executors.values():
            if executor.process is _Process.LOST:
                executor.fail_until(now_s)

    def returned(self, worker: str, now_s: float) -> None:
        """The worker has a new process, which makes the next reports of its executors."""
        self.advance_lost(now_s)
        for executor in self._of(worker):
            executor.process, executor.is_restarted = _Process.NEW, True
            executor.from_s = executor.report.now_s + executor.offset_s

    def end(self, culprit: str) -> None:
        """The run is over: every executor is done, except `culprit`, whose failure ended it."""
        for name, executor in self._executors.items():
            state = State.FAILED if name == culprit else State.DONE
            executor.report = replace(executor.report, state=state, waiting_for="")

    def take_spans(self) -> dict[str, tuple[Span, ...]]:
        """Spans up to the latest time that the reports of all executors cover. Later ones are kept for the
        next call."""
        if not self._executors:
            return {}
        until_s = min(executor.report.now_s + executor.offset_s for executor in self._executors.values())
        taken: dict[str, tuple[Span, ...]] = {}
        for name, executor in self._executors.items():
            early = [span for span in executor.spans if span.start_s < until_s]
            taken[name] = tuple(
                span if span.end_s <= until_s else replace(span, end_s=until_s) for span in early
            )
            late = [span for span in executor.spans if span.end_s > until_s]
            executor.spans = [
                span if span.start_s >= until_s else replace(span, start_s=until_s) for span in late
            ]
        return taken

    def take_stays(self) -> dict[str, tuple[Stay, ...]]:
        """The stays reported since the last call, by executor. Executors without any are left out."""
        taken = {name: tuple(executor.stays) for name, executor in self._executors.items() if executor.stays}
        for name in taken:
            self._executors[name].stays.clear()
        return taken

    def _of(self, worker: str) -> list[ExecutorHistory]:
        return [executor for executor in self._executors.values() if executor.worker == worker]


def _plus(report: ExecutorReport, state: State, seconds: float, *, is_idle: bool = True) -> ExecutorReport:
    """`report` with more time in `state`. Executors that count idle time count it as idle too, if
    `is_idle`."""
    sums = _sum({"idle_s": seconds}, report.sums) if is_idle and "idle_s" in report.sums else report.sums
    return replace(report, state_s=_sum({state: seconds}, report.state_s), sums=sums)


def _moved(spans: Iterable[Span], offset_s: float, from_s: float) -> list[Span]:
    """The spans on the driver's clock, without the time before `from_s`."""
    return [
        Span(state=span.state, start_s=max(span.start_s + offset_s, from_s), end_s=span.end_s + offset_s)
        for span in spans
        if span.end_s + offset_s > from_s
    ]


def _sum(few: Mapping[K, float], many: Mapping[K, float]) -> dict[K, float]:
    total = dict(many)
    for key, amount in few.items():
        total[key] = total.get(key, 0.0) + amount
    return total


def _has_made_tokens(previous: ExecutorReport, report: ExecutorReport) -> bool:
    """Only sums of tokens are compared: sums of seconds also grow while the executor waits."""
    return any(
        amount != previous.sums.get(name) for name, amount in report.sums.items() if name.endswith("_tokens")
    )
