"""Where the time went, added up again: executors' states and the parts of every train step."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from asyncrl_cli.contracts.events import StepRecord
from asyncrl_cli.measure.states import ExecutorReport
from tests.loop.proof.ledger_watch import Check

_ROUNDING_S = 1e-6


class Timesheets:
    """`slots` by rollout worker. All executors are made at `began_s`, and made again when `restarted` says
    so."""

    def __init__(self, slots: Mapping[str, int], began_s: float, check: Check) -> None:
        self.check = check
        self._slots = slots
        self._began_s = dict.fromkeys(slots, began_s)
        self._run_began_s = began_s
        self._last_reports: dict[str, ExecutorReport] = {}
        self._process: dict[str, str] = {}
        """Machine -> the executor whose process it is in."""
        self._unseen_s: dict[str, float] = {}
        self._last_recorded: Mapping[str, ExecutorReport] = {}
        self._step_ended_s: float | None = None

    def restarted(self, name: str) -> None:
        self._began_s[name] = asyncio.get_running_loop().time()
        for one in [one for one in self._last_reports if self._process.get(one, one) == name]:
            del self._last_reports[one]

    def _made_s(self, name: str) -> float:
        return self._began_s.get(self._process.get(name, name), self._run_began_s)

    def check_report(self, report: ExecutorReport) -> None:
        """The states of an executor, and of each machine beside it, sum to the time since it was made;
        nothing it counts ever falls; no second is left out."""
        for machine in report.machines:
            self._process[machine.name] = report.name
            self.check_report(machine)
        began_s = self._made_s(report.name)
        elapsed_s, states_s, name = report.now_s - began_s, sum(report.state_s.values()), report.name
        self._same(states_s, elapsed_s, f"{name}: states sum to {states_s} s of {elapsed_s} s")
        before = self._last_reports.get(name)
        self._last_reports[name] = report
        since_s = before.now_s if before else began_s
        for span in report.spans:
            self._same(span.start_s, since_s, f"{name}: nothing between {since_s} and {span}")
            self.check(span.end_s > span.start_s, "time", f"{name}: an empty {span}")
            since_s = span.end_s
        self._same(since_s, report.now_s, f"{name}: nothing from {since_s} s on")
        self._check_no_fall(name, before.sums if before else {}, report.sums)
        if report.role == "rollout":
            running_s, idle_s = report.sums.get("running_sequence_s", 0.0), report.sums.get("idle_s", 0.0)
            most_s = self._slots[name] * (elapsed_s - idle_s)
            is_possible = idle_s <= elapsed_s + _ROUNDING_S and running_s <= most_s + _ROUNDING_S
            message = f"{name}: idle {idle_s} s, {running_s} sequence seconds, {elapsed_s} s in all"
            self.check(is_possible, "time", message)

    def check_record(self, record: StepRecord) -> None:
        """The parts of a step sum to the step, and steps follow each other without a gap."""
        parts_s = {part: seconds for part, seconds in record.timing_s.items() if part != "step"}
        step_s = record.timing_s["step"]
        self._same(sum(parts_s.values()), step_s, f"{parts_s} do not sum to {step_s}")
        self.check(min(parts_s.values()) > -_ROUNDING_S, "time", f"a negative part of a step: {parts_s}")
        if self._step_ended_s is not None:
            elapsed_s = record.ended_s - self._step_ended_s
            self._same(elapsed_s, step_s, f"step {record.step}: {step_s} s of {elapsed_s} s")
        self._step_ended_s = record.ended_s
        for name, report in record.reports.items():
            self._check_goes_on(report, self._last_recorded.get(name))
        self._last_recorded = dict(record.reports)
        for name, spans in record.spans.items():
            for one, following in itertools.pairwise(spans):
                gap = f"{name}: a gap in the timeline of step {record.step}: {one}, {following}"
                self._same(one.end_s, following.start_s, gap)

    def _check_goes_on(self, report: ExecutorReport, before: ExecutorReport | None) -> None:
        """Whatever becomes of its process, its sums in the loop's books cover all time since its first
        report, and never fall."""
        unseen_s = report.now_s - self._run_began_s - sum(report.state_s.values())
        was_lost = self._made_s(report.name) > self._run_began_s
        first_s = self._unseen_s.setdefault(report.name, unseen_s if was_lost else 0.0)
        message = f"{report.name}: {unseen_s} s of the run are in no state, before it were {first_s} s"
        self.check(first_s > -_ROUNDING_S, "time", message)
        self._same(unseen_s, first_s, message)
        if before is not None:
            self._check_no_fall(report.name, before.sums, report.sums)
            self._check_no_fall(report.name, before.state_s, report.state_s)

    def _check_no_fall(self, name: str, before: Mapping[Any, float], now: Mapping[Any, float]) -> None:
        fallen = [key for key, amount in before.items() if now.get(key, 0.0) < amount - _ROUNDING_S]
        self.check(not fallen, "time", f"{name}: {fallen} fell from {before} to {now}")

    def _same(self, one_s: float, other_s: float, message: str) -> None:
        self.check(abs(one_s - other_s) < _ROUNDING_S, "time", message)
