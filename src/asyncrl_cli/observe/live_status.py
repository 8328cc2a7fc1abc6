"""The run at a glance, as one JSON object: what `status.json`, the screen and `asyncrl status` show.

Lines, events and snapshots go in; `picture` comes out. What is counted over time says over which (periods.py):
`periods.utilization` is that of `utilization` and of the executors' `state_s`, `periods.steps` that of `staleness`, `partial` and
`timing` (means per step). States, waits, gauges, admission and the ledger are of the moment; `reward` and `sync` are the last.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NotRequired, cast

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.loop.board import ENDED
from asyncrl_cli.loop.ports import Snapshot
from asyncrl_cli.loop.states import ExecutorReport
from asyncrl_cli.loop.values import Scalar
from asyncrl_cli.observe.executors import STATES
from asyncrl_cli.observe.format import duration, number
from asyncrl_cli.observe.metrics import PARTIAL, StepMetrics
from asyncrl_cli.observe.periods import Period
from asyncrl_cli.observe.status_file import EvalPoint
from asyncrl_cli.safe_files import Count

SCHEMA_VERSION = 2
HISTORY_STEPS = 60
HISTORY_EVALS = 60
RATE_STEPS = 30
NOTES = 8
WARNINGS = 20
UTILIZATION = (
    "rollouter/slot_utilization",
    "rollouter/idle_ratio",
    "trainer/idle_ratio",
    "rollouter/tokens_per_s",
    "trainer/tokens_per_s",
    "overlap_ratio",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What does not change during an attempt. Group counts as in docs/admission.md: R, W = K * R."""

    name: str
    profile: str
    mode: str
    run_dir: str
    train_steps: int
    step_groups: int
    window_groups: int
    trigger_parameter_sync_step: int
    max_staleness: int
    on_stale: str = "wait"
    attempt: int = 1


class LiveState(TypedDict):
    """As a checkpoint has it."""

    rewards: list[float]
    slots: list[float]
    evals: list[EvalPoint]
    num_warnings: Count
    eval_s: NotRequired[float | None]


class LiveStatus:
    def __init__(self, facts: RunFacts, metrics: StepMetrics, *, wall_s: Callable[[], float] = time.time) -> None:
        self._facts = facts
        self._metrics = metrics
        self._wall_s = wall_s
        self._started_at = wall_s()
        self._phase = "starting"
        self._error = ""
        self._line: Mapping[str, Scalar] = {}
        self._snapshot: Snapshot | None = None
        self._began_s: float | None = None
        self._eval_s: float | None = None
        self._pace: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS)
        self._rewards: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._slots: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._evals: list[EvalPoint] = []
        self._notes: deque[dict[str, Any]] = deque(maxlen=NOTES)
        self._warnings: deque[dict[str, Any]] = deque(maxlen=WARNINGS)
        self._num_warnings = 0

    def line(self, line: Mapping[str, Scalar]) -> None:
        """A train step ended, and `metrics` knows it."""
        self._line = line
        self._pace.append((_number(line["time_s"]), int(_number(line["step"]))))
        if "reward/mean" in line:
            self._rewards.append(_number(line["reward/mean"]))
        if "rollouter/slot_utilization" in line:
            self._slots.append(_number(line["rollouter/slot_utilization"]))

    def event(self, event: Mapping[str, Any]) -> None:
        """Keep what people want to read: evals, checkpoints, resumes, warnings, failures."""
        name = event["event"]
        if name == "eval" and event.get("reward_mean") is not None:
            self._eval_s = event.get("eval_s")
            ended = {key: event[key] for key in ("version", "reward_mean", "num_prompts") if key in event}
            self._evals = [*self._evals, cast("EvalPoint", ended)][-HISTORY_EVALS:]
        text = _TEXTS[name](event) if name in _TEXTS else None
        if text is not None:
            self._notes.append({"time_s": event["time_s"], "event": name, "text": text})
        if name == "warning":
            self._num_warnings += 1
            self._warnings.append({"time_s": event["time_s"], "text": text})

    def snapshot(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._phase = snapshot.phase
        if self._began_s is None:
            self._began_s = snapshot.time_s

    def phase(self, phase: str, error: str = "") -> None:
        self._phase, self._error = phase, error

    def state(self) -> LiveState:
        return {
            "rewards": list(self._rewards),
            "slots": list(self._slots),
            "evals": self._evals,
            "num_warnings": self._num_warnings,
            "eval_s": self._eval_s,
        }

    def restore(self, state: LiveState) -> None:
        self._rewards.extend(state["rewards"])
        self._slots.extend(state["slots"])
        self._evals = list(state["evals"])
        self._num_warnings = state["num_warnings"]
        self._eval_s = state.get("eval_s")

    def picture(self) -> dict[str, Any]:
        """The whole status; JSON."""
        snapshot = self._snapshot
        steps = self._steps()
        using = self._using(steps)
        return {
            "schema_version": SCHEMA_VERSION,
            **asdict(self._facts),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_at": self._started_at,
            "updated_at": self._wall_s(),
            "phase": self._phase,
            "error": self._error,
            "progress": self._progress(),
            "admission": _admission(snapshot) if snapshot else {},
            "periods": {"utilization": using and using.to_json(), "steps": steps and steps.to_json()},
            "executors": [_executor(report, using) for report in _ordered(snapshot)] if snapshot else [],
            "utilization": self._utilization(using) | {"slot_history": [round(share, 4) for share in self._slots]},
            "staleness": _shown(steps, "staleness/") | {"bound": self._facts.max_staleness},
            "partial": _shown(steps, PARTIAL),
            "versions": {name: held for name, held in snapshot.worker_versions.items() if held >= 0} if snapshot else {},
            "restarting": dict(snapshot.restarting) if snapshot else {},
            "reward": self._keys("reward/") | {"history": [round(reward, 4) for reward in self._rewards]},
            "eval": {"running": snapshot.eval_running if snapshot else "", "history": self._evals},
            "sync": self._keys("sync/"),
            "timing": _per_step(steps),
            "ledger": dict(snapshot.ledger) if snapshot else self._keys("ledger/"),
            "tokens_discarded": self._line.get("waste/tokens_discarded"),
            "checkpoint": snapshot.checkpoint if snapshot else "",
            "notes": list(self._notes),
            "warnings": list(self._warnings),
            "num_warnings": self._num_warnings,
            "totals": self._metrics.totals(),
        }

    def _progress(self) -> dict[str, Any]:
        snapshot, facts = self._snapshot, self._facts
        step = max(snapshot.step if snapshot else 0, self._pace[-1][1] if self._pace else 0)
        groups_total = facts.train_steps * facts.step_groups
        time_s = max(snapshot.time_s if snapshot else 0.0, self._pace[-1][0] if self._pace else 0.0)
        progress: dict[str, Any] = {
            "step": step,
            "train_steps": facts.train_steps,
            "version": max(snapshot.version if snapshot else 0, int(_number(self._line.get("version", 0)))),
            "groups_trained": max(snapshot.groups_trained if snapshot else 0, step * facts.step_groups),
            "groups_total": groups_total,
            "time_s": time_s,
            "fraction": step / facts.train_steps,
        }
        if "tokens_trained" in self._line:
            progress["tokens_trained"] = self._line["tokens_trained"]
        pace_s = self._pace_s()
        if pace_s is not None:
            progress["step_s"] = pace_s
            # A step that takes longer than others, as over a restart, brings the end no nearer.
            since_s = min(time_s - self._pace[-1][0], pace_s)
            progress["eta_s"] = max(0.0, (facts.train_steps - step) * pace_s - since_s) + (self._eval_s or 0.0)
        return progress

    def _pace_s(self) -> float | None:
        """Seconds per step of late; of this attempt only, for a resumed run may stand on another machine."""
        if len(self._pace) >= 2:
            (first_s, first), (last_s, last) = self._pace[0], self._pace[-1]
            return (last_s - first_s) / (last - first)
        step_s = self._line.get("timing/step_s")
        return None if step_s is None else _number(step_s)

    def _steps(self) -> Period | None:
        """The period of figures that whole steps have: the recent ones, or all of a run that has ended."""
        return self._metrics.whole_run() if self._phase in ENDED else self._metrics.recent()

    def _using(self, steps: Period | None) -> Period | None:
        """The period of what executors integrate: `steps`, or the step under way once it is longer than these together."""
        snapshot = self._snapshot
        if snapshot is None or self._phase in ENDED:
            return steps
        from_s = steps.to_s if steps else self._began_s or 0.0
        if steps is not None and snapshot.time_s - from_s <= steps.to_s - steps.from_s:
            return steps
        return self._metrics.step_so_far(snapshot.reports, from_s, snapshot.time_s) or steps

    def _utilization(self, using: Period | None) -> dict[str, Any]:
        figures = _shown(using, "")
        known: dict[str, Any] = {name.replace("/", "_"): figures[name] for name in UTILIZATION if name in figures}
        gauges = [report.gauges for report in self._snapshot.reports.values()] if self._snapshot else []
        for name in ("running_sequences", "slots"):
            if amounts := [own[name] for own in gauges if name in own]:
                known[name] = sum(amounts)
        return known

    def _keys(self, prefix: str) -> dict[str, Scalar]:
        return {key.removeprefix(prefix): value for key, value in self._line.items() if key.startswith(prefix)}


_TEXTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "warning": lambda event: str(event.get("message", "")),
    "failed": lambda event: f"failed: {event.get('error', '')}",
    "restarted": lambda event: f"{event.get('worker')} was restarted in {duration(event.get('restart_s'))}",
    "resumed": lambda event: f"resumed from step {event.get('from_step')}",
    "checkpointed": lambda event: f"checkpoint of step {event.get('step')}",
    "eval": lambda event: f"eval of version {event.get('version')}: {number(event.get('reward_mean'), 3)}",
}


def _ordered(snapshot: Snapshot) -> list[ExecutorReport]:
    """In the order of the flow."""
    order = {"feed": 0, "rollout": 1, "reward": 2, "trainer": 3}
    return sorted(snapshot.reports.values(), key=lambda report: (order.get(report.role, 9), report.name))


def _shown(period: Period | None, prefix: str) -> dict[str, Scalar]:
    """The period's figures of that prefix, without it."""
    if period is None:
        return {}
    return {key.removeprefix(prefix): value for key, value in period.figures.items() if key.startswith(prefix)}


def _per_step(period: Period | None) -> dict[str, float]:
    """Mean seconds of a step and of its parts."""
    return {part: _number(seconds) / period.steps for part, seconds in _shown(period, "timing/").items()} if period else {}


def _executor(report: ExecutorReport, using: Period | None) -> dict[str, Any]:
    state_s = _shown(using, f"{STATES}{report.name}/")
    return {
        "name": report.name,
        "role": report.role,
        "state": report.state.value,
        "waiting_for": report.waiting_for,
        # A restart's overlap with the new process is taken back from one state: never below nothing.
        "state_s": {state: max(0.0, round(_number(seconds), 3)) for state, seconds in state_s.items()},
        "gauges": dict(report.gauges),
    }


def _admission(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "closed_by": snapshot.admission,
        "cause": snapshot.admission_cause,
        "window_taken": snapshot.window_taken,
        "window_groups": snapshot.window_groups,
        "window_budget": snapshot.window_budget,
    }


def _number(value: Scalar) -> float:
    assert not isinstance(value, list), value
    return float(value)
