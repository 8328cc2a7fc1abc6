"""Makes the `Status` of the run that this driver runs: lines, events and overviews go in, `picture` comes
out."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import NotRequired, TypeVar, cast

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.contracts.events import ENDED, Overview
from asyncrl_cli.contracts.status import (
    AdmissionStatus,
    EvalPoint,
    EvalStatus,
    ExecutorStatus,
    Note,
    Periods,
    Progress,
    RunFacts,
    Status,
)
from asyncrl_cli.measure.values import Scalar
from asyncrl_cli.observe.format import LEADING, event_text
from asyncrl_cli.observe.metrics import Period, StepMetrics
from asyncrl_cli.observe.run_lines import Line
from asyncrl_cli.observe.step_values import FLOW, PARTIAL, SCORER, STATES
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import Profile

T = TypeVar("T")
HISTORY = 60
"""Number of points in the curves of reward, slot use and each eval set."""
RATE_STEPS = 30
SCORER_FIGURES = ("idle_ratio", "tokens_per_s")
NOTES = 8
WARNINGS = 20


def facts_of(profile: Profile, run_dir: Path, attempt: int) -> RunFacts:
    schedule, training = Schedule.of(profile), profile.async_training
    return RunFacts(
        name=run_dir.name,
        profile=profile.name,
        mode=schedule.mode,
        run_dir=str(run_dir),
        train_steps=schedule.train_steps,
        step_groups=schedule.step_groups,
        window_groups=schedule.window_groups,
        trigger_parameter_sync_step=training.trigger_parameter_sync_step,
        max_staleness=schedule.max_staleness,
        on_stale=training.on_stale,
        attempt=attempt,
    )


class LiveState(TypedDict):
    """What a checkpoint keeps of the status."""

    rewards: list[float]
    slots: list[float]
    evals: list[EvalPoint]
    eval_s: NotRequired[float | None]


class LiveStatus:
    def __init__(self, facts: RunFacts, metrics: StepMetrics) -> None:
        self._facts = facts
        self._metrics = metrics
        self._started_at = time.time()
        self._phase = "starting"
        self._error = ""
        self._line: Line = {}
        self._overview: Overview | None = None
        self._began_s = 0.0
        self._pace: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS)
        self._state: LiveState = {"rewards": [], "slots": [], "evals": [], "eval_s": None}
        self._notes: deque[Note] = deque(maxlen=NOTES)
        self._warnings: deque[Note] = deque(maxlen=WARNINGS)
        self._num_warnings = 0

    def line(self, line: Line) -> None:
        """A train step has ended. `StepMetrics` must have been updated with it before."""
        self._line = line
        self._pace.append((line["time_s"], line["step"]))
        curves = {"reward/mean": self._state["rewards"], "rollouter/slot_utilization": self._state["slots"]}
        for key, curve in curves.items():
            if key in line:
                curve.append(line[key])
                del curve[:-HISTORY]

    def event(self, event: Line) -> None:
        """Note events that people want to read: evals, checkpoints, restarts, resumes, warnings, failures."""
        name, time_s, text = event["event"], event["time_s"], event_text(event)
        if name == "eval":
            self._add_eval(event)
        if text is not None:
            self._notes.append(Note(time_s=time_s, event=name, text=text))
        if name == "warning":
            self._add_warning(event)

    def _add_warning(self, event: Line) -> None:
        self._num_warnings += 1
        self._warnings.append(Note(time_s=event.get("time_s", 0.0), text=str(event_text(event))))

    def _add_eval(self, event: Line) -> None:
        """Append it to the curve of its set. It replaces an earlier eval of the same version, else the oldest
        one of a full curve."""
        if event.get("reward_mean") is None or "version" not in event:
            return
        evals = self._state["evals"]
        self._state["eval_s"] = event.get("eval_s")
        point = cast(EvalPoint, {key: event[key] for key in EvalPoint.__annotations__ if key in event})
        same = [one for one in evals if one.get("eval_set") == point.get("eval_set")]
        again = [one for one in same if one["version"] == point["version"]]
        for one in again or same[: max(0, len(same) + 1 - HISTORY)]:
            evals.remove(one)
        evals.append(point)

    def recall(self, events: Iterable[Line]) -> None:
        """After a resume: all warnings, and all evals of the run that still hold. The checkpoint lacks those
        that ended after it."""
        self._state["evals"] = []
        for event in events:
            if event["event"] == "eval":
                self._add_eval(event)
            else:
                self._add_warning(event)

    def overview(self, overview: Overview) -> None:
        if self._overview is None:
            self._began_s = overview.time_s
        self._overview, self._phase = overview, overview.phase

    def phase(self, phase: str, error: str = "") -> None:
        self._phase, self._error = phase, error

    def state(self) -> LiveState:
        return deepcopy(self._state)

    def restore(self, state: LiveState) -> None:
        self._state = state

    def picture(self) -> Status:
        overview, state = self._overview, deepcopy(self._state)
        # Figures of whole steps cover the recent ones or, once the run has ended, all of them.
        steps = self._metrics.whole_run() if self._phase in ENDED else self._metrics.recent()
        current = self._utilization_period(steps)
        figures = steps.figures if steps else {}
        timing_s = _under("timing/", figures)
        data, fetched = overview.data if overview else None, figures.get("data/bytes_fetched")
        if data and steps and isinstance(fetched, int | float):
            data = replace(data, bytes_fetched_per_step=fetched / steps.time.steps)
        slot_history = [round(share, 4) for share in state["slots"]]
        versions = overview.worker_versions if overview else {}
        return Status(
            **asdict(self._facts),
            pid=os.getpid(),
            host=socket.gethostname(),
            started_at=self._started_at,
            updated_at=time.time(),
            phase=self._phase,
            error=self._error,
            progress=self._progress(),
            admission=_admission(overview) if overview else None,
            periods=Periods(
                utilization=current.time if current else None, steps=steps.time if steps else None
            ),
            executors=_executors(overview, current) if overview else [],
            utilization={**self._utilization(current), "slot_history": slot_history},
            staleness={**_under("staleness/", figures), "bound": self._facts.max_staleness},
            partial=_under(PARTIAL, figures),
            env=_under("env/", figures) or None,
            prompts={**_under("prompts/", self._line), **_under("curriculum/", self._line)} or None,
            filtered_ratio=figures.get("trainer/filtered_ratio"),
            versions={name: version for name, version in versions.items() if version >= 0},
            restarting=dict(overview.restarting) if overview else {},
            reward={**_under("reward/", self._line), "history": [round(one, 4) for one in state["rewards"]]},
            eval=EvalStatus(running=overview.eval_running if overview else "", history=state["evals"]),
            sync=_under("sync/", self._line),
            timing={part: seconds / steps.time.steps for part, seconds in timing_s.items()} if steps else {},
            ledger=dict(overview.ledger) if overview else _under("ledger/", self._line),
            tokens_discarded=self._line.get("waste/tokens_discarded"),
            data=data,
            checkpoint=overview.checkpoint if overview else "",
            notes=list(self._notes),
            warnings=list(self._warnings),
            num_warnings=self._num_warnings,
            totals=self._metrics.totals(),
        )

    def _progress(self) -> Progress:
        facts = self._facts
        # `step` is that of the newest line, whose figures stand beside it. The loop counts a step earlier: as
        # soon as the trainer is done with it, before a weight sync or the last eval.
        ended_s, step = self._pace[-1] if self._pace else (0.0, self._overview.step if self._overview else 0)
        time_s, version, groups_trained, trained = ended_s, self._line.get("version", 0), 0, step
        if (overview := self._overview) is not None:
            trained, time_s = max(step, overview.step), max(time_s, overview.time_s)
            version, groups_trained = max(version, overview.version), overview.ledger["trained"]
        step_s, eta_s = self._step_s(), None
        if step_s is not None and self._phase not in ENDED:  # the remaining steps, and the last eval
            left, since_s = facts.train_steps - trained, time_s - ended_s
            eval_s = self._state.get("eval_s") or 0.0
            # Count at most one mean step of the current one: a step that takes longer (a restart) must not
            # reduce the time left.
            steps_s = max(0.0, left * step_s - min(since_s, step_s))
            eta_s = steps_s + eval_s if left else max(0.0, eval_s - since_s)
        return Progress(
            step=step,
            train_steps=facts.train_steps,
            version=version,
            groups_trained=max(groups_trained, trained * facts.step_groups),
            groups_total=facts.train_steps * facts.step_groups,
            time_s=time_s,
            fraction=step / facts.train_steps,
            tokens_trained=self._line.get("tokens_trained"),
            step_s=step_s,
            eta_s=eta_s,
        )

    def _step_s(self) -> float | None:
        """Recent seconds per step, from the second on: the first one waits for an eval and for kernels.
        Counts this attempt only: a resumed run may be on another machine."""
        if len(self._pace) < 2:
            return None
        (first_s, first), (last_s, last) = self._pace[0], self._pace[-1]
        return (last_s - first_s) / (last - first)

    def _utilization_period(self, steps: Period | None) -> Period | None:
        """`steps`, or the current step once it has taken longer than these together."""
        overview = self._overview
        if overview is None or self._phase in ENDED:
            return steps
        from_s = steps.time.to_s if steps else self._began_s
        if steps is not None and overview.time_s - from_s <= steps.time.to_s - steps.time.from_s:
            return steps
        return self._metrics.step_so_far(overview.reports, from_s, overview.time_s) or steps

    def _utilization(self, period: Period | None) -> dict[str, Scalar]:
        reports = list(self._overview.reports.values()) if self._overview else []
        scorers = [report.name for report in reports if report.role == SCORER]
        names = [*LEADING, *(f"{scorer}/{figure}" for scorer in scorers for figure in SCORER_FIGURES)]
        figures = period.figures if period else {}
        known = {name.replace("/", "_"): figures[name] for name in names if name in figures}
        for gauge in ("running_sequences", "slots"):
            if amounts := [report.gauges[gauge] for report in reports if gauge in report.gauges]:
                known[gauge] = sum(amounts)
        return known


def _under(prefix: str, figures: Mapping[str, T]) -> dict[str, T]:
    """The figures whose keys begin with `prefix`, which is removed."""
    return {key.removeprefix(prefix): value for key, value in figures.items() if key.startswith(prefix)}


def _executors(overview: Overview, period: Period | None) -> list[ExecutorStatus]:
    """In the order in which data flows through them."""
    figures = period.figures if period else {}
    reports = sorted(overview.reports.values(), key=lambda report: (FLOW.index(report.role), report.name))
    return [
        ExecutorStatus(
            name=report.name,
            role=report.role,
            state=report.state.value,
            waiting_for=report.waiting_for,
            # After a restart, time counted for both processes is subtracted again: at least 0.
            state_s={
                state: max(0.0, round(seconds, 3))
                for state, seconds in _under(f"{STATES}{report.name}/", figures).items()
            },
            gauges=dict(report.gauges),
        )
        for report in reports
    ]


def _admission(overview: Overview) -> AdmissionStatus:
    return AdmissionStatus(
        closed_by=overview.admission,
        cause=overview.admission_cause,
        window_taken=overview.window_taken,
        window_groups=overview.window_groups,
        window_budget=overview.window_budget,
        governor=overview.governor,
        lending=overview.lending,
    )
