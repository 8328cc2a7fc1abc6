"""A recorded run as a page shows it: its columns, evals, marks and timeline as JSON, and its facts as words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.errors import AsyncrlError, RefusedError
from asyncrl_cli.loop.watching import ENDED
from asyncrl_cli.observe.format import clock, count, event_text, number
from asyncrl_cli.observe.lines import EventLine, Line
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.status import read_status
from asyncrl_cli.plan.cluster import counted
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.keys import entries_of
from asyncrl_cli.report.columns import Columns, columns_of, rounded
from asyncrl_cli.report.timeline import Timeline
from asyncrl_cli.report.totals import Totals
from asyncrl_cli.report.verdict import Finding, verdict_of
from asyncrl_cli.safe_files import read_lines

MARKS = {
    "eval": "eval",
    "checkpointed": "checkpoint",
    "resumed": "resume",
    "restarted": "restart",
    "lost": "worker lost",
    "failed": "failure",
    "warning": "warning",
}
"""Event -> its word on the page."""
PUBLISHED = "published"
DETAIL_WINDOWS = 6
MOST_MARKS = 100
"""Of one kind. The first and the last are among those that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """`facts`: (label, text). `values` and `origins` are the configuration by dotted key. `detail`: some windows in the middle of
    the timeline, exact, if the whole is merged."""

    name: str
    purpose: str
    facts: list[tuple[str, str]]
    values: Mapping[str, Any]
    origins: Mapping[str, str]
    findings: list[Finding]
    columns: Columns
    timeline: Timeline
    detail: Timeline | None
    evals: list[dict[str, Any]]
    marks: list[dict[str, Any]]
    published_s: list[float]
    limits: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        columns = self.columns
        return {
            "name": self.name,
            "steps_per_point": columns.steps_per_point,
            "columns": columns.values,
            "lows": columns.lows,
            "highs": columns.highs,
            "evals": self.evals,
            "marks": self.marks,
            "published_s": self.published_s,
            "timeline": self.timeline.to_json(),
            "detail": self.detail.to_json() if self.detail else {"merged_s": 0, "executors": {}},
            "limits": self.limits,
        }


def run_data(recorded: Recorded) -> RunData:
    """Raises RefusedError for a run in which no train step has ended yet, and what reading its files raises."""
    profile = recorded.loaded.profile
    settings = LoopSettings.of(profile)
    num_steps = sum(1 for _ in read_lines(recorded.files.metrics)) if recorded.files.metrics.exists() else 0
    totals = Totals()
    timeline = Timeline(roles=recorded.roles, length_s=_length_s(recorded)).read(recorded.timeline())
    lines = _with_shares(totals.of(recorded.metrics()), timeline, profile.rollout.n)
    columns = columns_of(lines, num_steps)
    if not totals.steps:
        raise RefusedError(
            f"run '{recorded.name}' has nothing to report yet: no train step has ended", hint=f"asyncrl status {recorded.name}"
        )
    events = [_event(event, settings.schedule.step_groups * profile.rollout.n) for event in recorded.events(*MARKS, PUBLISHED)]
    evals = [event for event in events if event["event"] == "eval" and event["reward_mean"] is not None]
    return RunData(
        name=recorded.name,
        purpose=profile.purpose,
        facts=_facts(recorded, settings, totals),
        values=entries_of(profile),
        origins=recorded.loaded.origins,
        findings=[*_outcome(recorded, totals, events), *verdict_of(totals, settings, settings.schedule.mode)],
        columns=columns,
        timeline=timeline,
        detail=_middle(recorded, num_steps, settings.schedule.window_steps) if timeline.merged_s else None,
        evals=evals,
        marks=[event for name in MARKS for event in _thinned([event for event in events if event["event"] == name])],
        published_s=[event["time_s"] for event in events if event["event"] == PUBLISHED],
        limits={"staleness": settings.schedule.max_staleness, "logprob_diff": settings.max_logprob_diff},
    )


def _middle(recorded: Recorded, num_steps: int, window_steps: int) -> Timeline:
    """The timeline of `DETAIL_WINDOWS` windows, in so far as a page can hold it."""
    first = max(1, num_steps // 2)
    lines = recorded.timeline(first, first + DETAIL_WINDOWS * window_steps - 1)
    return Timeline(roles=recorded.roles, length_s=_length_s(recorded)).read(lines)


def _length_s(recorded: Recorded) -> float:
    return float(recorded.status.get("progress", {}).get("time_s", 0.0))


def _with_shares(lines: Iterator[Line], timeline: Timeline, n: int) -> Iterator[Line]:
    """Lines with the shares of the roles' states, and the number of samples trained so far."""
    for line in lines:
        yield {**line, **timeline.shares.get(int(line["step"]), {}), "samples": line["groups_trained"] * n}


def _event(event: EventLine, samples_per_step: int) -> dict[str, Any]:
    """What a page shows of an event."""
    name, step = event["event"], event.get("step", 0)
    own = {key: event.get(key) for key in ("version", "reward_mean", "eval_set")} if name == "eval" else {}
    text = event_text(event) or f"{name}: {event.get('worker', '')}"
    place = {"step": step, "time_s": rounded(event.get("time_s", 0.0)), "samples": step * samples_per_step}
    return {"event": name, "kind": MARKS.get(name, name), "text": text, **own, **place}


def _thinned(items: list[Any]) -> list[Any]:
    """At most `MOST_MARKS` of them, evenly chosen."""
    if len(items) <= MOST_MARKS:
        return items
    return [items[round(place * (len(items) - 1) / (MOST_MARKS - 1))] for place in range(MOST_MARKS)]


def _facts(recorded: Recorded, settings: LoopSettings, totals: Totals) -> list[tuple[str, str]]:
    profile, schedule = settings.profile, settings.schedule
    roles = list(recorded.roles.values())
    device = f", {profile.placement.device}" if profile.placement.device != "auto" else ""
    rollouts = "partial" if profile.async_training.partial_rollout else "whole"
    own = f"eta {schedule.eta}, K {schedule.window_steps}, {rollouts} rollouts"
    return [
        ("state", _state(recorded)),
        ("mode", f"{schedule.mode} ({own})"),
        ("profile", str(recorded.status.get("profile", profile.name))),
        ("model", f"{profile.model.path}, {profile.model.dtype}"),
        ("task", f"{profile.task.source}, environment {profile.task.environment}, reward {profile.task.reward}"),
        ("engine", profile.rollout.engine),
        ("placement", f"{roles.count('trainer')} trainer, {roles.count('rollout')} rollout{device}"),
        (
            "schedule",
            f"R {schedule.step_groups} groups of {profile.rollout.n}, W {schedule.window_groups}, bound {schedule.max_staleness}",
        ),
        (
            "trained",
            f"{count(totals.steps)} of {count(schedule.train_steps)} steps, {count(totals.last.get('tokens_trained'))} tokens",
        ),
        ("time", f"{clock(totals.last.get('time_s'))} of training, {counted(max(len(recorded.attempts), 1), 'attempt')}"),
    ]


def _state(recorded: Recorded) -> str:
    try:
        found = read_status(str(recorded.files.path), recorded.files.path.parent)
    except AsyncrlError as error:
        return error.message
    phase = str(found.status["phase"])
    if error_text := found.status["error"]:
        return f"{phase}: {error_text}"
    return found.remark or (phase if phase in ENDED else f"{phase}, {found.liveness}")


def _outcome(recorded: Recorded, totals: Totals, events: list[dict[str, Any]]) -> Iterator[Finding]:
    phase = str(recorded.status.get("phase", ""))
    if error := str(recorded.status.get("error", "")):
        yield Finding("outcome", "bad", f"The run ended in an error: {error}", f"asyncrl logs {recorded.name}")
    resumes = sum(event["event"] == "resumed" for event in events)
    again = f", resumed {counted(resumes, 'time')}" if resumes else ""
    text = f"{count(totals.steps)} train steps in {clock(totals.last.get('time_s'))}{again}. "
    scores = [event["reward_mean"] for event in events if event.get("reward_mean") is not None and not event["eval_set"]]
    first, last = totals.first.get("reward/mean"), totals.last.get("reward/mean")
    if len(scores) > 1:
        text += f"Held-out reward went from {number(scores[0], 3)} to {number(scores[-1], 3)}."
        is_better = scores[-1] > scores[0]
    else:
        text += f"Training reward went from {number(first, 3)} to {number(last, 3)}; there are no two evals to compare."
        is_better = False
    if first == last == 0 and not any(scores):
        text += " A reward of 0 everywhere teaches nothing: `asyncrl samples` shows what was answered."
    yield Finding("learning", "good" if is_better and phase != "failed" else "note", text)
