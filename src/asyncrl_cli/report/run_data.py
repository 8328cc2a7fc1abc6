"""A recorded run as a page shows it: its columns, evals, marks and timeline as JSON, and its facts as
words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.base.errors import AsyncrlError, RefusedError, counted
from asyncrl_cli.contracts.events import ENDED
from asyncrl_cli.observe.format import clock, count, evenly, event_text, is_number
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.run_lines import EventLine, Totals
from asyncrl_cli.observe.run_status import read_status
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.loaded import Loaded
from asyncrl_cli.report.series import Timeline, columns_of, rounded
from asyncrl_cli.report.verdict import Remark, learned, verdict_of, warned

MARKS = {
    "eval": "eval",
    "checkpointed": "checkpoint",
    "resumed": "resume",
    "restarted": "restart",
    "lost": "worker lost",
    "failed": "failure",
    "warning": "warning",
}
"""Event -> its name on the page."""
PUBLISHED = "published"
EVAL_KEYS = ("version", "reward_mean", "reward_low", "reward_high", "eval_set")
MOST_MARKS = 100
"""Limit for each kind of mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """`facts`: (label, text). `charts`: what page.js draws, as JSON."""

    name: str
    loaded: Loaded
    facts: list[tuple[str, str]]
    findings: list[Remark]
    charts: Mapping[str, Any]


def run_data(recorded: Recorded) -> RunData:
    """Raises RefusedError if no train step of the run has ended yet, and what reading its files raises."""
    profile = recorded.loaded.profile
    settings = LoopSettings.of(profile)
    totals = Totals()
    length_s = recorded.status.progress.time_s if recorded.status else 0.0
    timeline = Timeline(roles=recorded.roles, length_s=length_s).read(recorded.timeline())
    lines = (  # with the number of samples trained so far, and the shares of the roles' states
        {
            **line,
            "samples": line["groups_trained"] * profile.rollout.n,
            **timeline.shares.get(line["step"], {}),
        }
        for line in totals.of(recorded.metrics())
    )
    columns = columns_of(lines, recorded.num_steps())
    if not totals.steps:
        why = f"run '{recorded.name}' has nothing to report yet: no train step has ended"
        raise RefusedError(why, hint=f"asyncrl status {recorded.name}")
    recorded_events = list(recorded.events(*MARKS, PUBLISHED))
    events = [_event(event, settings.schedule.step_groups * profile.rollout.n) for event in recorded_events]
    by_name = {name: [event for event in events if event["event"] == name] for name in (*MARKS, PUBLISHED)}
    scored = [event for event in by_name["eval"] if is_number(event["reward_mean"])]
    # A resume may repeat one.
    evals = list({(event["version"], event["eval_set"]): event for event in scored}.values())
    charts = {
        "name": recorded.name,
        "steps_per_point": columns.steps_per_point,
        "columns": columns.values,
        "lows": columns.lows,
        "highs": columns.highs,
        "evals": evals,
        "marks": [mark for name in MARKS for mark in evenly(by_name[name], MOST_MARKS)],
        "published_s": [event["time_s"] for event in by_name[PUBLISHED]],
        "timeline": timeline.to_json(),
        "limits": {"staleness": settings.schedule.max_staleness, "logprob_diff": settings.max_logprob_diff},
    }
    verdict = verdict_of(totals, settings, is_divisible=max(_processes(recorded)) > 1)
    damage = [Remark("damaged files", "bad", note) for note in recorded.damage.notes]
    return RunData(
        name=recorded.name,
        loaded=recorded.loaded,
        facts=_facts(recorded, settings, totals),
        findings=[*_outcome(recorded, totals, recorded_events), *damage, *verdict],
        charts=charts,
    )


def _event(event: EventLine, samples_per_step: int) -> dict[str, Any]:
    """What a page shows of an event."""
    name, step = event["event"], event.get("step", 0)
    scores = {key: event.get(key) for key in EVAL_KEYS} if name == "eval" else {}
    text = event_text(event) or f"{name}: {event.get('worker', '')}"
    place = {"step": step, "time_s": rounded(event.get("time_s", 0.0)), "samples": step * samples_per_step}
    return {"event": name, "kind": MARKS.get(name, name), "text": text, **scores, **place}


def _facts(recorded: Recorded, settings: LoopSettings, totals: Totals) -> list[tuple[str, str]]:
    profile, schedule = settings.profile, settings.schedule
    rollouts = "partial" if profile.async_training.partial_rollout else "whole"
    window = f"{counted(schedule.window_steps, 'train step')} per version (K)"
    kinds = {"environment": profile.task.environment, "reward": profile.task.reward}
    task = [profile.task.source, *(f"{kind} {name}" for kind, name in kinds.items() if name != "auto")]
    groups = f"{schedule.step_groups} groups of {profile.rollout.n} responses per train step, "
    groups += f"{schedule.window_groups} per version"
    if profile.async_training.on_stale == "wait":
        groups += f"; no token older than {counted(schedule.max_staleness, 'version')}"
    steps = f"{count(totals.steps)} of {count(schedule.train_steps)} steps"
    attempts = counted(max(len(recorded.attempts), 1), "attempt")
    ranks, workers = _processes(recorded)
    trainer = counted(ranks, "trainer rank") if ranks else "trainer"
    where = "in turns on the same resources" if profile.placement.colocate else "apart"
    device = f", {profile.placement.device}" if profile.placement.device != "auto" else ""
    return [
        ("state", _state(recorded)),
        ("mode", f"{schedule.mode}: {window}, eta {schedule.eta}, {rollouts} rollouts"),
        ("profile", recorded.status.profile if recorded.status else profile.name),
        ("model", f"{profile.model.path}, {profile.model.dtype}"),
        ("task", ", ".join(task)),
        ("engine", profile.rollout.engine),
        ("placement", f"{trainer} and {counted(workers, 'rollout worker')}, {where}{device}"),
        ("schedule", groups),
        ("trained", f"{steps}, {count(totals.last.get('tokens_trained'))} tokens"),
        ("time", f"{clock(totals.last.get('time_s'))} of training, {attempts}"),
    ]


def _processes(recorded: Recorded) -> tuple[int, int]:
    """Numbers of trainer ranks and rollout workers. All ranks are one executor, so their logs are counted. A
    simulated run has none."""
    ranks = sum(1 for attempt in recorded.attempts[-1:] for _ in attempt.glob("trainer-*.log"))
    return ranks, list(recorded.roles.values()).count("rollout")


def _state(recorded: Recorded) -> str:
    try:
        found = read_status(str(recorded.files.path), recorded.files.path.parent)
    except AsyncrlError as error:
        return error.message
    phase = found.status.phase
    if error_text := found.status.error:
        return f"{phase}: {error_text}"
    return found.remark or (phase if phase in ENDED else f"{phase}, {found.liveness}")


def _outcome(recorded: Recorded, totals: Totals, events: list[EventLine]) -> Iterator[Remark]:
    if recorded.status and (error := recorded.status.error):
        yield Remark("outcome", "bad", f"The run ended in an error: {error}", f"asyncrl logs {recorded.name}")
    resumes = sum(event["event"] == "resumed" for event in events)
    again = f", resumed {counted(resumes, 'time')}" if resumes else ""
    text = f"{count(totals.steps)} train steps in {clock(totals.last.get('time_s'))}{again}. "
    evals = [event for event in events if is_number(event.get("reward_mean")) and not event.get("eval_set")]
    yield learned(evals, totals, text)
    yield from warned([event for event in events if event["event"] == "warning"], recorded.name)
