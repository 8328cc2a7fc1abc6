"""The run at a glance, as one JSON object: what `status.json`, the screen and `asyncrl status` show.

Lines, events and snapshots go in; `picture` comes out. `periods` says which time the figures cover (see
metrics.py): `periods.utilization` holds for `utilization` and the executors' `state_s`, `periods.steps` for
`staleness`, `partial` and `timing` (means per step). States, waits, gauges, admission and the ledger are
those of this moment; `reward` and `sync` are the last step's.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NotRequired, cast

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.safe_files import Count
from asyncrl_cli.contracts.events import ENDED, Snapshot
from asyncrl_cli.observe.format import LEADING, event_text
from asyncrl_cli.observe.metrics import Period, StepMetrics
from asyncrl_cli.observe.status import SCHEMA_VERSION, EvalPoint
from asyncrl_cli.observe.step_values import FLOW, PARTIAL, SCORER, STATES
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import Profile

HISTORY = 60
"""Number of points kept for the curves of reward, slot use and each eval set."""
RATE_STEPS = 30
SCORER_FIGURES = ("idle_ratio", "tokens_per_s")
NOTES = 8
WARNINGS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts that do not change during an attempt. `step_groups` is R, `window_groups` is W = K * R
    (docs/admission.md)."""

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

    @classmethod
    def of(cls, profile: Profile, run_dir: Path, attempt: int) -> RunFacts:
        schedule, training = asdict(Schedule.of(profile)), profile.async_training
        return cls(
            name=run_dir.name,
            profile=profile.name,
            run_dir=str(run_dir),
            trigger_parameter_sync_step=training.trigger_parameter_sync_step,
            on_stale=training.on_stale,
            attempt=attempt,
            **{
                key: schedule[key]
                for key in ("mode", "train_steps", "step_groups", "window_groups", "max_staleness")
            },
        )


class LiveState(TypedDict):
    """The part of the status that a checkpoint keeps."""

    rewards: list[float]
    slots: list[float]
    evals: list[EvalPoint]
    num_warnings: Count
    eval_s: NotRequired[float | None]


class LiveStatus:
    def __init__(self, facts: RunFacts, metrics: StepMetrics) -> None:
        self._facts = facts
        self._metrics = metrics
        self._started_at = time.time()
        self._phase = "starting"
        self._error = ""
        self._line: Mapping[str, Any] = {}
        self._snapshot: Snapshot | None = None
        self._began_s = 0.0
        self._pace: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS)
        self._lasting: LiveState = {
            "rewards": [],
            "slots": [],
            "evals": [],
            "num_warnings": 0,
            "eval_s": None,
        }
        self._notes: deque[dict[str, Any]] = deque(maxlen=NOTES)
        self._warnings: deque[dict[str, Any]] = deque(maxlen=WARNINGS)

    def line(self, line: Mapping[str, Any]) -> None:
        """A train step has ended. `StepMetrics` must have been updated with it before."""
        self._line = line
        self._pace.append((line["time_s"], line["step"]))
        for history, key in (
            (self._lasting["rewards"], "reward/mean"),
            (self._lasting["slots"], "rollouter/slot_utilization"),
        ):
            if key in line:
                history.append(line[key])
                del history[:-HISTORY]

    def event(self, event: Mapping[str, Any]) -> None:
        """Keep events that people want to read: evals, checkpoints, restarts, resumes, warnings, failures."""
        name, time_s, text = event["event"], event["time_s"], event_text(event)
        if name == "eval":
            self._eval(event)
        if text is not None:
            self._notes.append({"time_s": time_s, "event": name, "text": text})
        if name == "warning":
            self._lasting["num_warnings"] += 1
            self._warnings.append({"time_s": time_s, "text": text})

    def _eval(self, event: Mapping[str, Any]) -> None:
        if event.get("reward_mean") is None or "version" not in event:
            return
        self._lasting["eval_s"] = event.get("eval_s")
        kept = ("version", "reward_mean", "reward_low", "reward_high", "num_prompts", "eval_set")
        ended = {key: event[key] for key in kept if key in event}
        same = [point for point in self._lasting["evals"] if point.get("eval_set") == ended.get("eval_set")]
        for point in [point for point in same if point["version"] == ended["version"]] or same[
            : max(0, len(same) + 1 - HISTORY)
        ]:
            self._lasting["evals"].remove(point)
        self._lasting["evals"].append(cast("EvalPoint", ended))

    def recall(self, evals: Iterable[Mapping[str, Any]]) -> None:
        """After a resume: all evals of the run that still hold. The checkpoint lacks those that ended after
        it."""
        self._lasting["evals"] = []
        for event in evals:
            self._eval(event)

    def snapshot(self, snapshot: Snapshot) -> None:
        if self._snapshot is None:
            self._began_s = snapshot.time_s
        self._snapshot, self._phase = snapshot, snapshot.phase

    def phase(self, phase: str, error: str = "") -> None:
        self._phase, self._error = phase, error

    def state(self) -> LiveState:
        return deepcopy(self._lasting)

    def restore(self, state: LiveState) -> None:
        self._lasting = state

    def picture(self) -> dict[str, Any]:
        """The whole status, ready for JSON."""
        snapshot = self._snapshot
        # Figures of whole steps cover the recent ones or, once the run has ended, all of them.
        steps = self._metrics.whole_run() if self._phase in ENDED else self._metrics.recent()
        using = self._using(steps)
        of_steps = steps.figures if steps else {}
        lasting, timing = deepcopy(self._lasting), _under("timing/", of_steps)
        return {
            "schema_version": SCHEMA_VERSION,
            **asdict(self._facts),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_at": self._started_at,
            "updated_at": time.time(),
            "phase": self._phase,
            "error": self._error,
            "progress": self._progress(),
            "admission": _admission(snapshot) if snapshot else {},
            "periods": {"utilization": using and using.to_json(), "steps": steps and steps.to_json()},
            "executors": _executors(snapshot, using) if snapshot else [],
            "utilization": self._utilization(using)
            | {"slot_history": [round(share, 4) for share in lasting["slots"]]},
            "staleness": _under("staleness/", of_steps) | {"bound": self._facts.max_staleness},
            "partial": _under(PARTIAL, of_steps),
            **({"env": env} if (env := _under("env/", of_steps)) else {}),
            **(
                {"filtered_ratio": of_steps["trainer/filtered_ratio"]}
                if "trainer/filtered_ratio" in of_steps
                else {}
            ),
            "versions": {name: held for name, held in snapshot.worker_versions.items() if held >= 0}
            if snapshot
            else {},
            "restarting": dict(snapshot.restarting) if snapshot else {},
            "reward": _under("reward/", self._line)
            | {"history": [round(reward, 4) for reward in lasting["rewards"]]},
            "eval": {"running": snapshot.eval_running if snapshot else "", "history": lasting["evals"]},
            "sync": _under("sync/", self._line),
            "timing": {part: seconds / steps.steps for part, seconds in timing.items()} if steps else {},
            "ledger": dict(snapshot.ledger) if snapshot else _under("ledger/", self._line),
            "tokens_discarded": self._line.get("waste/tokens_discarded"),
            "checkpoint": snapshot.checkpoint if snapshot else "",
            "notes": list(self._notes),
            "warnings": list(self._warnings),
            "num_warnings": lasting["num_warnings"],
            "totals": self._metrics.totals(),
        }

    def _progress(self) -> dict[str, Any]:
        snapshot, facts = self._snapshot, self._facts
        ended_s, step = self._pace[-1] if self._pace else (0.0, 0)
        time_s, version, groups_trained = ended_s, self._line.get("version", 0), 0
        if snapshot is not None:
            step, time_s, version = (
                max(step, snapshot.step),
                max(time_s, snapshot.time_s),
                max(version, snapshot.version),
            )
            groups_trained = snapshot.ledger["trained"]
        progress: dict[str, Any] = {
            "step": step,
            "train_steps": facts.train_steps,
            "version": version,
            "groups_trained": max(groups_trained, step * facts.step_groups),
            "groups_total": facts.train_steps * facts.step_groups,
            "time_s": time_s,
            "fraction": step / facts.train_steps,
        }
        if "tokens_trained" in self._line:
            progress["tokens_trained"] = self._line["tokens_trained"]
        if (step_s := self._step_s()) is not None:
            progress |= {
                "step_s": step_s,
                "eta_s": self._left_s(facts.train_steps - step, step_s, time_s - ended_s),
            }
        return progress

    def _left_s(self, steps_left: int, step_s: float, since_s: float) -> float:
        """Estimated seconds for the remaining steps and the last eval. `since_s`: since the last step
        ended."""
        eval_s = self._lasting.get("eval_s") or 0.0
        if not steps_left:
            return max(0.0, eval_s - since_s)
        # Count at most one mean step of the current one: a step that takes longer (a restart) must not reduce
        # the time left.
        return max(0.0, steps_left * step_s - min(since_s, step_s)) + eval_s

    def _step_s(self) -> float | None:
        """Recent seconds per step. Counts this attempt only: a resumed run may be on another machine."""
        if len(self._pace) < 2:
            return self._line.get("timing/step_s")
        (first_s, first), (last_s, last) = self._pace[0], self._pace[-1]
        return (last_s - first_s) / (last - first)

    def _using(self, steps: Period | None) -> Period | None:
        """The period of the utilization figures: `steps`, or the current step once it has taken longer than
        these together."""
        snapshot = self._snapshot
        if snapshot is None or self._phase in ENDED:
            return steps
        from_s = steps.to_s if steps else self._began_s
        if steps is not None and snapshot.time_s - from_s <= steps.to_s - steps.from_s:
            return steps
        return self._metrics.step_so_far(snapshot.reports, from_s, snapshot.time_s) or steps

    def _utilization(self, using: Period | None) -> dict[str, Any]:
        figures = using.figures if using else {}
        reports = list(self._snapshot.reports.values()) if self._snapshot else []
        scorers = [
            f"{report.name}/{figure}"
            for report in reports
            if report.role == SCORER
            for figure in SCORER_FIGURES
        ]
        known: dict[str, Any] = {
            name.replace("/", "_"): figures[name] for name in (*LEADING, *scorers) if name in figures
        }
        gauges = ("running_sequences", "slots")
        totals = {
            name: [report.gauges[name] for report in reports if name in report.gauges] for name in gauges
        }
        return known | {name: sum(amounts) for name, amounts in totals.items() if amounts}


def _under(prefix: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures whose keys begin with `prefix`, which is removed."""
    return {key.removeprefix(prefix): value for key, value in figures.items() if key.startswith(prefix)}


def _executors(snapshot: Snapshot, using: Period | None) -> list[dict[str, Any]]:
    """One entry per executor, in the order in which data flows through them."""
    figures = using.figures if using else {}
    return [
        {
            "name": report.name,
            "role": report.role,
            "state": report.state.value,
            "waiting_for": report.waiting_for,
            # After a restart, time counted for both the old and the new process is subtracted again: clamp at
            # 0.
            "state_s": {
                state: max(0.0, round(s, 3))
                for state, s in _under(f"{STATES}{report.name}/", figures).items()
            },
            "gauges": dict(report.gauges),
        }
        for report in sorted(
            snapshot.reports.values(), key=lambda report: (FLOW.index(report.role), report.name)
        )
    ]


def _admission(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "closed_by": snapshot.admission,
        "cause": snapshot.admission_cause,
        "window_taken": snapshot.window_taken,
        "window_groups": snapshot.window_groups,
        "window_budget": snapshot.window_budget,
    }
