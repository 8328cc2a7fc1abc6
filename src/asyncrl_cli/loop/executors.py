"""The executors of a run, which of them have no process, and what they report: the newest report of each, and
their spans on the driver's clock. `RunState.executors` (run_state.py) is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.ports import RolloutWorker, Scorer, Trainer
from asyncrl_cli.loop.changes import Changes
from asyncrl_cli.loop.progress import RunProgress
from asyncrl_cli.measure.states import WAITS_FOR_RESTART, ExecutorReport, SlotInterval, Span, State

K = TypeVar("K")
RESTARTS_KEY = "rollout.max_restarts"


class Restarts:
    """`rollout.max_restarts`: the restarts of one executor, successful or not."""

    def __init__(self, allowed: int) -> None:
        self.allowed = self.left = allowed

    def use(self) -> str:
        """Use one. Returns its number, such as "1 of 3"."""
        self.left -= 1
        return f"{self.allowed - self.left} of {self.allowed}"


class Executors:
    """The trainer, the rollout workers and the scorers. (The loop's own knowledge of a worker's slots and
    weights is in fleet.py.)"""

    def __init__(
        self,
        trainer: Trainer,
        workers: Sequence[RolloutWorker],
        scorers: Sequence[Scorer],
        changes: Changes,
        progress: RunProgress,
    ) -> None:
        self.trainer, self.workers, self.scorers = trainer, workers, scorers
        self.reports = ReportBook()
        self.num_restarts = 0
        """Of the whole run."""
        self.restarting: dict[str, str] = {}
        """Those without a process, by name, and the number of the restart under way: "1 of 3"."""
        self.away: dict[str, str] = {}
        """Workers that the run continues without, by name, and why."""
        self.trainer_call: tuple[State, str] | None = None
        """What the loop has asked the trainer to do, as a state and its reason; None while it asks for
        nothing."""
        self.trainer_has_resources = False
        """Colocate: the trainer has the resources, or they are being handed over."""
        self.lent: dict[str, float] = {}
        """The workers that have devices of the trainer now (`placement.lend`), and since when."""
        self._changes = changes
        self._progress = progress

    @contextmanager
    def calling_trainer(self, state: State, why: str = "") -> Iterator[None]:
        """While the block runs, the trainer counts as being in `state`, for the reason `why`."""
        self.trainer_call = state, why
        try:
            yield
        finally:
            self.trainer_call = None

    def restart_begins(self, name: str, error: ExecutorFailed, restarts: Restarts) -> None:
        """The executor is lost, and one of its restarts is used."""
        self.num_restarts += 1
        self.restarting[name] = number = restarts.use()
        self._progress.event("lost", worker=name, error=str(error), restarts_left=restarts.left)
        number = number.replace("of", f"of {RESTARTS_KEY} =")
        self._progress.warn(f"{str(error).rstrip('.')}; restarting it ({number})")

    def goes_away(self, name: str, error: ExecutorFailed, why: str) -> None:
        """The run continues without a worker."""
        self.restarting.pop(name, None)
        if name not in self.away:
            self._progress.event("away", worker=name, error=str(error), why=why)
            self._progress.warn(f"{str(error).rstrip('.')}; the run continues without it: {why}")
        self.away[name] = why
        self._changes.notify()

    def returned(self, name: str, now_s: float, began_s: float, restarts: Restarts) -> None:
        """The executor has a new process."""
        self.restarting.pop(name, None)
        self.away.pop(name, None)
        self.reports.returned(name, now_s)
        self._progress.event("restarted", worker=name, restart_s=now_s - began_s, restarts_left=restarts.left)


@dataclass(slots=True, kw_only=True)
class ExecutorHistory:
    """One executor, whatever becomes of its process. `report`: the newest, with the sums of `base` added:
    what earlier processes counted, minus what should not count. `spans` and `slot_intervals` have not been
    taken yet
    and are on the driver's clock, which is `offset_s` ahead of the executor's. Time before `from_s` does not
    count: the run or the present process was starting."""

    report: ExecutorReport
    worker: str
    from_s: float
    base: ExecutorReport
    offset_s: float = float("inf")
    spans: list[Span] = field(default_factory=list)
    slot_intervals: list[SlotInterval] = field(default_factory=list)
    is_new: bool = True
    """Its process has not reported yet."""
    is_lost: bool = False

    def begin(self, report: ExecutorReport, arrived_s: float) -> None:
        """Prepare for the first report of a process. Its sums include the time before `from_s`, which the
        base takes back. An earlier report may be late or lost with its spans, so the states before the first
        span come from the sums, in the order in which they were entered."""
        self.is_new, self.offset_s, self.base = False, arrived_s - report.now_s, self.report
        unseen_s = dict(report.state_s)
        for span in report.spans:
            unseen_s[span.state] -= span.end_s - span.start_s
        seen = [(span.state, span.end_s - span.start_s) for span in report.spans]
        early_s = self.from_s - (arrived_s - sum(report.state_s.values()))
        for state, seconds in [*unseen_s.items(), *seen]:
            spent_s = max(0.0, min(early_s, seconds))
            early_s -= spent_s
            self.base = _longer(self.base, state, -spent_s)

    def update(self, report: ExecutorReport, arrived_s: float) -> None:
        if any(self.base.state_s.values()):
            state_s, sums = _added(self.base.state_s, report.state_s), _added(self.base.sums, report.sums)
            self.report = replace(report, state_s=state_s, sums=sums)
        else:
            self.report = report
        self.offset_s = min(arrived_s - report.now_s, self.offset_s)
        self.note(report)

    def note(self, report: ExecutorReport) -> None:
        """Keep the report's spans and slot intervals. (A later report that has overtaken it includes its
        sums.)"""
        for span in report.spans:
            start_s, end_s = max(span.start_s + self.offset_s, self.from_s), span.end_s + self.offset_s
            if end_s > self.from_s:
                self.spans.append(Span(state=span.state, start_s=start_s, end_s=end_s))
        for interval in report.slot_intervals:
            start_s, end_s = interval.start_s + self.offset_s, interval.end_s + self.offset_s
            self.slot_intervals.append(interval._replace(start_s=start_s, end_s=end_s))


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

    @property
    def covered_s(self) -> dict[str, float]:
        """Up to when `latest` covers each executor, on the driver's clock."""
        return {name: one.report.now_s + one.offset_s for name, one in self._executors.items()}

    def add(self, report: ExecutorReport, arrived_s: float, worker: str = "") -> bool:
        """Record a report of an executor in the process of `worker`, with those of the machines beside it.
        True if it has made tokens since its last report."""
        for machine in report.machines:
            self.add(machine, arrived_s, worker)
        executor = self._executors.get(report.name)
        if executor is None:
            zero = replace(report, state_s={}, sums={"idle_s": 0.0} if "idle_s" in report.sums else {})
            executor = ExecutorHistory(report=zero, base=zero, worker=worker, from_s=self.began_s)
            self._executors[report.name] = executor
        before = executor.report
        if executor.is_new:
            executor.begin(report, arrived_s)
        elif report.now_s < before.now_s:  # a later report has overtaken it
            executor.note(report)
            executor.spans.sort(key=lambda span: span.start_s)
            return False
        executor.update(report, arrived_s)
        if not report.sums:  # of a machine
            return False
        # Only sums of tokens show work: sums of seconds also grow while the executor waits.
        sums = executor.report.sums.items()
        return any([name.endswith("_tokens") and amount != before.sums.get(name) for name, amount in sums])

    def lost(self, worker: str, now_s: float) -> int:
        """The worker's process is gone: its executors count as failed from now on. Returns the tokens of what
        ran there."""
        running_tokens = self.running_tokens(worker)
        for executor in self._in_process(worker):
            # integers, as a timeline counts sequences
            gauges: dict[str, float] = dict.fromkeys(executor.report.gauges, 0)
            if "slots" in gauges:
                gauges["slots"] = executor.report.gauges["slots"]
            executor.report = replace(
                executor.report, state=State.FAILED, waiting_for=WAITS_FOR_RESTART, spans=(), gauges=gauges
            )
            executor.is_lost = True
        self.advance_lost(now_s)
        return running_tokens

    def running_tokens(self, worker: str) -> int:
        """Tokens of the sequences that run in the worker's process, as last reported."""
        reports = [executor.report for executor in self._in_process(worker)]
        return int(sum(report.gauges.get("running_tokens", 0) for report in reports))

    def stopped(self, worker: str) -> None:
        """Nothing runs in the worker's process any more, whatever it has reported."""
        for executor in self._in_process(worker):
            if "running_tokens" in executor.report.gauges:
                gauges = {**executor.report.gauges, "running_tokens": 0}
                executor.report = replace(executor.report, gauges=gauges)

    def advance_lost(self, now_s: float) -> None:
        """Count the time of lost processes up to now as failed."""
        for executor in self._executors.values():
            start_s = executor.report.now_s + executor.offset_s
            if not executor.is_lost or now_s <= start_s:
                continue
            report = _longer(executor.report, State.FAILED, now_s - start_s)
            executor.report = replace(report, now_s=now_s - executor.offset_s)
            if executor.spans and executor.spans[-1].state is State.FAILED:
                start_s = executor.spans.pop().start_s
            executor.spans.append(Span(state=State.FAILED, start_s=start_s, end_s=now_s))

    def returned(self, worker: str, now_s: float) -> None:
        """The worker has a new process, which makes the next reports of its executors."""
        self.advance_lost(now_s)
        for executor in self._in_process(worker):
            executor.is_lost, executor.is_new = False, True
            executor.from_s = executor.report.now_s + executor.offset_s

    def end(self, culprit: str) -> None:
        """The run is over: every executor is done, except `culprit`, whose failure ended it."""
        for name, executor in self._executors.items():
            state = State.FAILED if name == culprit else State.DONE
            executor.report = replace(executor.report, state=state, waiting_for="")

    def take_spans(self) -> dict[str, tuple[Span, ...]]:
        """Spans up to the latest time that the reports of all executors cover. Later ones are kept for the
        next call."""
        executors = self._executors.values()
        until_s = min((one.report.now_s + one.offset_s for one in executors), default=0.0)
        taken: dict[str, tuple[Span, ...]] = {}
        for name, executor in self._executors.items():
            spans = executor.spans
            taken[name] = tuple(
                span if span.end_s <= until_s else replace(span, end_s=until_s)
                for span in spans
                if span.start_s < until_s
            )
            executor.spans = [
                span if span.start_s >= until_s else replace(span, start_s=until_s)
                for span in spans
                if span.end_s > until_s
            ]
        return taken

    def take_slot_intervals(self) -> dict[str, tuple[SlotInterval, ...]]:
        """The intervals reported since the last call, by executor. Executors without any are left out."""
        intervals = {name: tuple(executor.slot_intervals) for name, executor in self._executors.items()}
        taken = {name: ended for name, ended in intervals.items() if ended}
        for name in taken:
            self._executors[name].slot_intervals.clear()
        return taken

    def _in_process(self, worker: str) -> Iterator[ExecutorHistory]:
        return (executor for executor in self._executors.values() if executor.worker == worker)


def _longer(report: ExecutorReport, state: State, seconds: float) -> ExecutorReport:
    """`report` with more time in `state`. Executors that count idle time count it as idle too, unless
    busy."""
    idle = {"idle_s": seconds} if "idle_s" in report.sums and state is not State.BUSY else {}
    return replace(report, state_s=_added(report.state_s, {state: seconds}), sums=_added(report.sums, idle))


def _added(some: Mapping[K, float], more: Mapping[K, float]) -> dict[K, float]:
    return {**some, **{key: some.get(key, 0) + amount for key, amount in more.items()}}
