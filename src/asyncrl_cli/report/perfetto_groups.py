"""The part of a trace that comes from events.jsonl: what became of each group, the train steps and the
versions.

group      generation ─> waits to be taken ─> training       (slices in lanes: groups overlap)
arrow      generation ─> waits to be taken ─> step N ─> version V
version V  from its publication to the next one ─> load on each worker
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from asyncrl_cli.observe.line_types import EventLine
from asyncrl_cli.report.perfetto_entries import (
    Entry,
    Track,
    Tracks,
    arrow,
    free_lane,
    instant,
    micros,
    slice_on,
)

LOOP, GROUPS, EXECUTORS = "loop", "groups", "executors"
STAGES = ("running", "finished", "training", "trained")
PHASES = ("generation", "waits to be taken", "training")
"""What a group does from one stage to the next."""
LOSSES = ("dropped", "requeued")
LOAD_FIGURES = ("version", "load_s", "pause_s", "send_s", "logprob_abs_diff", "verdict")


@dataclass(slots=True)
class Group:
    """`times`: when it reached each of its stages, in order, and when it was lost, if it was. `facts`: what
    is shown about it."""

    key: str
    times: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    has_ended: bool = False
    track: Track | None = None

    @property
    def step(self) -> int | None:
        return self.facts.get("step")


@dataclass(slots=True)
class Version:
    number: int
    published: int
    step: int
    loads: list[EventLine] = field(default_factory=list)


class Story:
    """What the events of a run say about the train steps from `first` to `last` (None: to the end). `ends`:
    when each step ended.

    A group's key may occur twice: after a crash and a resume, its first try is not continued.
    """

    def __init__(
        self, events: Iterable[EventLine], ends: Mapping[int, int], first: int, last: int | None
    ) -> None:
        self.groups: list[Group] = []
        self.versions: list[Version] = []
        self.marks: list[EventLine] = []
        self.last_event = 0
        self._open: dict[str, Group] = {}
        for event in events:
            self._note(event)
        self._first, self._last = first, last
        self.start = 0 if first == 1 else ends.get(first - 1, 0)
        self.end = self.last_event if last is None else ends.get(last, self.last_event)
        if last is not None and (publish := self.version_after(self.end, 0)) is not None:
            self.end = publish.published

    def _note(self, event: EventLine) -> None:
        name, time = event["event"], micros(event.get("time_s", 0.0))
        self.last_event = max(self.last_event, time)
        if name in (*STAGES, *LOSSES):
            self._move(event, time)
        elif name == "published":
            self.versions.append(Version(event.get("version", 0), time, event.get("step", 0)))
        elif name == "loaded" and self.versions:
            loaded = (known for known in reversed(self.versions) if known.number == event.get("version"))
            next(loaded, self.versions[-1]).loads.append(event)
        else:
            self.marks.append(event)

    def _move(self, event: EventLine, time: int) -> None:
        name, key = event["event"], event.get("group", "")
        if name == "running":
            workers = " ".join(event.get("workers", {}))
            facts = {"group": key, "version": event.get("version"), "workers": workers}
            self._open[key] = Group(key, facts=facts)
            self.groups.append(self._open[key])
        if (group := self._open.get(key)) is None:
            return
        group.times.append(time)
        if name == "trained":
            group.facts |= {"step": event.get("step", 0), "window": event.get("version", 0)}
            group.facts["tokens"] = event.get("tokens")
        if name == "trained" or name in LOSSES:
            group.facts["became"] = f"{name} ({event['reason']})" if event.get("reason") else name
            group.has_ended = True
            del self._open[key]

    def version_after(self, time: int, number: int) -> Version | None:
        later = (one for one in self.versions if one.number >= number and one.published >= time)
        return next(later, None)

    def groups_of_steps(self) -> list[Group]:
        """Groups that these steps trained; groups that were lost in this time; at the run's end, also those
        under way."""
        return sorted(filter(self._has, self.groups), key=lambda group: group.times[0])

    def _has(self, group: Group) -> bool:
        if group.step is not None:
            # else an event is missing: a full disk ends events.jsonl, not the run
            is_whole = len(group.times) == len(STAGES)
            return is_whole and self._first <= group.step and (self._last is None or group.step <= self._last)
        return self.covers(group.times[-1]) if group.has_ended else self._last is None

    def covers(self, time: int) -> bool:
        return self.start <= time <= self.end


def group_entries(story: Story, tracks: Tracks, waits_s: Mapping[int, float]) -> Iterator[Entry]:
    """`waits_s`: how long the trainer waited for the groups of each step. Sets the groups' tracks."""
    lanes, of_step = list[int](), dict[int, list[Group]]()
    step_track, version_track = tracks.track(LOOP, "train steps"), tracks.track(LOOP, "versions")
    for group in story.groups_of_steps():
        yield from _slices(group, lanes, tracks, story.end)
        if group.step is not None:
            of_step.setdefault(group.step, []).append(group)
    numbers, done = iter(range(1, 10**12)), 0
    for step, groups in sorted(of_step.items()):
        start = max(min(group.times[2] for group in groups), done)
        done = max(start + 1, max(group.times[3] for group in groups))
        latest = max(groups, key=lambda group: group.times[1])
        args = {
            "step": step,
            "window": latest.facts["window"],
            "groups": len(groups),
            "waited_s": waits_s.get(step),
        }
        yield slice_on(step_track, f"step {step}", "step", start, done, {**args, "last_group": latest.key})
        version = story.version_after(done, latest.facts["window"] + 1)
        ends = [(version_track, version.published)] if version is not None else []
        for group in groups:
            assert group.track is not None
            stops = [(group.track, group.times[0]), (group.track, group.times[1]), (step_track, start), *ends]
            yield from arrow("group", next(numbers), stops)


def _slices(group: Group, lanes: list[int], tracks: Tracks, until: int) -> Iterator[Entry]:
    """The group, and its phases inside it. A group that is still under way lasts until `until`."""
    ends = group.times if group.has_ended else [*group.times, until]
    # a microsecond apart, so that all can be seen
    times = list(accumulate(ends, lambda before, time: max(before + 1, time)))
    track = group.track = tracks.track(GROUPS, f"lane {free_lane(lanes, times[0], times[-1]):02d}")
    group.times = times
    yield slice_on(track, group.key, "group", times[0], times[-1], group.facts)
    short = {key: group.facts.get(key) for key in ("group", "step")}
    for phase, start, end in zip(PHASES, times, times[1:], strict=False):
        yield slice_on(track, phase, "phase", start, end, short)


def version_entries(story: Story, tracks: Tracks) -> Iterator[Entry]:
    """Versions, from one publication to the next, and their loads."""
    track, number = tracks.track(LOOP, "versions"), 10**12
    ends = [*(version.published for version in story.versions[1:]), story.last_event]
    for version, end in zip(story.versions, ends, strict=False):  # without a version there is an end, too
        if not (version.published <= story.end and end >= story.start):
            continue
        name = f"version {version.number}"
        yield slice_on(track, name, "version", version.published, end, {"step": version.step})
        for load in version.loads:
            done, worker = micros(load.get("time_s", 0.0)), load.get("worker", "")
            start = max(version.published, done - max(1, micros(load.get("pause_s", 0.0))))
            figures = {key: load.get(key) for key in LOAD_FIGURES}
            onto = tracks.track(EXECUTORS, f"{worker} loads")
            yield slice_on(onto, f"load {version.number}", "load", start, done, {"worker": worker, **figures})
            number += 1
            yield from arrow("load", number, [(track, version.published), (onto, start)])


def mark_entries(story: Story, tracks: Tracks) -> Iterator[Entry]:
    """All other events (evals, checkpoints, restarts, warnings) as instants."""
    track = tracks.track(LOOP, "events")
    for mark in story.marks:
        if story.covers(time := micros(mark.get("time_s", 0.0))):
            facts = {key: value for key, value in mark.items() if key not in ("time_s", "event")}
            yield instant(track, mark["event"], "event", time, facts)
