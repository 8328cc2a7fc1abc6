"""A recorded run as a trace, for Perfetto or chrome://tracing: who did what when, and how each group became a
version. docs/trace.md explains how to read it.

    events.jsonl ───> loop: train steps, versions, events; groups: lanes; arrows
    timeline.jsonl ─> executors: a track each, with states and what they wait for; a track per slot, if
                      sequences were traced
    metrics.jsonl ──> counters: staleness, window, versions, tokens per second, groups

    group             generation ─> waits to be taken ─> training       (slices in lanes: groups overlap)
    arrow             generation ─> waits to be taken ─> step N ─> version V
    version V         from its publication to the next one ─> load on each worker

Entries are in Chrome's JSON format, which Perfetto reads (source: "Trace Event Format", the document of
chrome://tracing). Times are whole microseconds of the run.

    process, thread   where a slice stands: a track, with a name (ph M)
    slice             a stretch of time on a track (ph X). Slices of one lie side by side or in each other
    arrow             from slice to slice, by an id (ph s, t, f): each end binds to the slice that is open
                      on its track at that time
    counter           a figure that holds until the next one (ph C)
    instant           something that has no length (ph i)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

from asyncrl_cli.measure.machines import machine_of, shown_name
from asyncrl_cli.observe.recorded import Recorded, add_span
from asyncrl_cli.observe.run_lines import EventLine, RecordedSpan, Spans, TimelineLine

Entry = dict[str, object]
Track = Mapping[str, int]
"""The keys `pid` and `tid`, which put an entry on a track."""
SAMPLED_S = 1.0
"""What executors wait for is recorded once a second, so at least once during a stay this long."""
COUNTERS = {
    "staleness, versions": {"mean": "staleness/mean", "max": "staleness/max"},
    "tokens/s": {"rollout": "rollouter/tokens_per_s", "trainer": "trainer/tokens_per_s"},
    "window": {"version": "window"},
    "reward": {"mean": "reward/mean"},
}
"""Counters that hold from a step's beginning on: the counter's name, its figures, and their keys in
metrics.jsonl."""
COUNTERS_AT_END = {
    "groups": {"running": "ledger/running", "finished": "ledger/finished"},
    "version": {"newest": "version"},
}
"""The same, from the step's end on."""
LOOP, GROUPS, EXECUTORS = "loop", "groups", "executors"
STAGES = ("running", "finished", "training", "trained")
PHASES = ("generation", "waits to be taken", "training")
"""What a group does from one stage to the next."""
LOSSES = ("dropped", "requeued")
GROUP_ARROW, LOAD_ARROW, SEQUENCE_ARROW = 1, 10**12, 2 * 10**12
"""The first ids of each kind of arrow: an id is unique in the whole trace, and no run has as many groups."""
LOAD_FIGURES = ("version", "load_s", "pause_s", "send_s", "logprob_abs_diff", "verdict")


def trace_entries(run: Recorded, first: int = 1, last: int | None = None) -> Iterator[Entry]:
    """All entries of the trace, the names of tracks at the end."""
    tracks, ends, waits_s = Tracks(), dict[int, int](), dict[int, float]()
    process = tracks.process(LOOP)
    for name, role in run.roles.items():
        tracks.track(EXECUTORS, shown_name(name, role))
    for line in run.metrics():
        step = line["step"]
        if last is not None and step > last:
            continue
        end = ends[step] = micros(line["time_s"])
        waits_s[step] = line.get("timing/wait_data_s", 0.0)
        start = max(0, end - micros(line.get("timing/step_s", 0.0)))
        for time, counters in ((start, COUNTERS), (end, COUNTERS_AT_END)) if step >= first else ():
            for name, keys in counters.items():
                if figures := {figure: line[key] for figure, key in keys.items() if key in line}:
                    yield counter(process, name, time, figures)
    story = Story(run.events(), ends, first, last)
    groups = {group.key: group for group in story.groups}
    yield from group_entries(story, tracks, waits_s)
    yield from version_entries(story, tracks)
    # All other events (evals, checkpoints, restarts, warnings) have no length.
    instant = {"ph": "i", "s": "t", "cat": "event", **tracks.track(LOOP, "events")}
    for mark in story.marks:
        if story.covers(time := micros(mark.get("time_s", 0.0))):
            facts = {key: value for key, value in mark.items() if key not in ("time_s", "event")}
            yield {**instant, "name": mark["event"], "ts": time, "args": facts}
    yield from executor_entries(run.timeline(first, last), tracks, groups, run.roles)
    yield from tracks.entries


@dataclass(slots=True)
class Group:
    """`times`: when it reached each of its stages, in order, and when it was lost, if it was. `facts`: what
    is shown about it. `step`, `window`: those that trained it."""

    key: str
    facts: dict[str, object]
    times: list[int] = field(default_factory=list)
    step: int | None = None
    window: int = 0
    has_ended: bool = False
    track: Track | None = None


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
        under_way: dict[str, Group] = {}
        for event in events:
            name, time, key = event["event"], micros(event.get("time_s", 0.0)), event.get("group", "")
            self.last_event = max(self.last_event, time)
            if name == "running":
                workers = " ".join(event.get("workers", {}))
                facts: dict[str, object] = {"group": key, "version": event.get("version"), "workers": workers}
                under_way[key] = Group(key, facts)
                self.groups.append(under_way[key])
            if name in (*STAGES, *LOSSES):
                if (group := under_way.get(key)) is None:
                    continue
                group.times.append(time)
                if name == "trained":
                    group.step, group.window = event.get("step", 0), event.get("version", 0)
                    group.facts |= {"step": group.step, "window": group.window, "tokens": event.get("tokens")}
                if name == "trained" or name in LOSSES:
                    group.facts["became"] = f"{name} ({event['reason']})" if event.get("reason") else name
                    group.has_ended = True
                    del under_way[key]
            elif name == "published":
                self.versions.append(Version(event.get("version", 0), time, event.get("step", 0)))
            elif name == "loaded" and self.versions:
                loaded = (known for known in reversed(self.versions) if known.number == event.get("version"))
                next(loaded, self.versions[-1]).loads.append(event)
            else:
                self.marks.append(event)
        self._first, self._last = first, last
        self.start = 0 if first == 1 else ends.get(first - 1, 0)
        self.end = self.last_event if last is None else ends.get(last, self.last_event)
        if last is not None and (publish := self.version_after(self.end, 0)) is not None:
            self.end = publish.published

    def version_after(self, time: int, number: int) -> Version | None:
        later = (one for one in self.versions if one.number >= number and one.published >= time)
        return next(later, None)

    def covers(self, time: int) -> bool:
        return self.start <= time <= self.end

    def has(self, group: Group) -> bool:
        """Whether these steps trained the group, or it was lost in their time; at the run's end, also a group
        under way."""
        if group.step is not None:
            # else an event is missing: a full disk ends events.jsonl, not the run
            is_whole = len(group.times) == len(STAGES)
            return is_whole and self._first <= group.step and (self._last is None or group.step <= self._last)
        return self.covers(group.times[-1]) if group.has_ended else self._last is None


def group_entries(story: Story, tracks: Tracks, waits_s: Mapping[int, float]) -> Iterator[Entry]:
    """`waits_s`: how long the trainer waited for the groups of each step. Sets the groups' tracks."""
    taken_until, by_step = list[int](), dict[int, list[Group]]()
    step_track, version_track = tracks.track(LOOP, "train steps"), tracks.track(LOOP, "versions")
    for group in sorted(filter(story.has, story.groups), key=lambda group: group.times[0]):
        # A group that is still under way lasts until the end. Times are a microsecond apart: all can be seen.
        ends = group.times if group.has_ended else [*group.times, story.end]
        times = group.times = list(accumulate(ends, lambda before, time: max(before + 1, time)))
        # It takes the first lane that is free.
        free = (lane for lane, until in enumerate(taken_until) if until <= times[0])
        lane = next(free, len(taken_until))
        taken_until[lane : lane + 1] = [times[-1]]
        track = group.track = tracks.track(GROUPS, f"lane {lane:02d}")
        yield slice_on(track, group.key, "group", times[0], times[-1], group.facts)
        short = {"group": group.key, "step": group.step}
        for phase, start, end in zip(PHASES, times, times[1:], strict=False):
            yield slice_on(track, phase, "phase", start, end, short)
        if group.step is not None:
            by_step.setdefault(group.step, []).append(group)
    numbers, done = count(GROUP_ARROW), 0
    for step, groups in sorted(by_step.items()):
        start = max(min(group.times[2] for group in groups), done)
        done = max(start + 1, max(group.times[3] for group in groups))
        latest = max(groups, key=lambda group: group.times[1])
        args = {"step": step, "window": latest.window, "groups": len(groups), "waited_s": waits_s.get(step)}
        yield slice_on(step_track, f"step {step}", "step", start, done, {**args, "last_group": latest.key})
        version = story.version_after(done, latest.window + 1)
        stops = [(version_track, version.published)] if version is not None else []
        for group in groups:
            assert group.track is not None
            begin = [(group.track, group.times[0]), (group.track, group.times[1]), (step_track, start)]
            yield from arrow("group", next(numbers), [*begin, *stops])


def version_entries(story: Story, tracks: Tracks) -> Iterator[Entry]:
    """Versions, from one publication to the next, and their loads."""
    track, numbers = tracks.track(LOOP, "versions"), count(LOAD_ARROW)
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
            yield from arrow("load", next(numbers), [(track, version.published), (onto, start)])


def executor_entries(
    lines: Iterable[TimelineLine], tracks: Tracks, groups: Mapping[str, Group], roles: Mapping[str, str]
) -> Iterator[Entry]:
    """Entries from the lines of timeline.jsonl. A span that is split over two lines is one slice; a sequence
    in a slot has, the first time, an arrow from its group. `roles`: of the executors."""
    spans: Spans = {}
    waits: dict[str, list[tuple[float, str]]] = {}
    traced: set[str] = set()
    for line in lines:
        for name, samples in line.get("running", {}).items():
            process = tracks.process(EXECUTORS)
            yield from (counter(process, f"{name}: slots", micros(at), {"in use": n}) for at, n in samples)
        for name, texts in line.get("waits", {}).items():
            waits.setdefault(name, []).extend(texts)
        for name, added in line["spans"].items():
            joined = spans.setdefault(name, [])
            for span in added:
                add_span(joined, *span)
            # The last one may go on in the next line.
            yield from _states(name, roles.get(name, name), joined[:-1], tracks, waits.get(name, ()))
            del joined[:-1]
        for name, stays in line.get("slots", {}).items():
            for slot, sequence, start_s, end_s in stays:
                track = tracks.track(f"{name} slots", f"slot {slot:03d}")
                start, key = micros(start_s), sequence.rpartition("/")[0]
                group = groups.get(key)
                facts = {"worker": name, "group": key if group else ""}
                yield slice_on(track, sequence, "sequence", start, micros(end_s), facts)
                if group is not None and group.track is not None and sequence not in traced:
                    number = SEQUENCE_ARROW + len(traced)
                    yield from arrow("sequence", number, [(group.track, group.times[0]), (track, start)])
                    traced.add(sequence)
    for name, joined in spans.items():
        yield from _states(name, roles.get(name, name), joined, tracks, waits.get(name, ()))


def _states(
    name: str,
    role: str,
    spans: Sequence[RecordedSpan],
    tracks: Tracks,
    waits: Sequence[tuple[float, str]],
) -> Iterator[Entry]:
    """Spans of an executor, side by side. `waits`: what it waits for, from each of these times on."""
    track, times = tracks.track(EXECUTORS, shown_name(name, role)), [time_s for time_s, _ in waits]
    executor = {"executor": name, "machine": machine_of(name, role)}
    for state, start_s, end_s in spans:
        known = bisect_right(times, end_s) - 1
        was_sampled = known >= 0 and (end_s - start_s >= SAMPLED_S or times[known] >= start_s)
        why = waits[known][1] if was_sampled and state != "busy" else ""
        yield slice_on(
            track, state, "state", micros(start_s), micros(end_s), {**executor, "waiting_for": why}
        )


def micros(time_s: float) -> int:
    return round(time_s * 1e6)


class Tracks:
    """Numbers tracks as they are asked for, the topmost first. `entries` are their names."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], Track] = {}

    def process(self, name: str) -> int:
        if name not in self._processes:
            number = self._processes[name] = len(self._processes) + 1
            self._name("process", {"pid": number}, name, number)
        return self._processes[name]

    def track(self, process: str, thread: str) -> Track:
        if (process, thread) not in self._threads:
            # A thread's number is unique in the whole trace: Perfetto takes two threads with one number for
            # the same thread.
            track = {"pid": self.process(process), "tid": 1000 + len(self._threads)}
            self._threads[process, thread] = track
            self._name("thread", track, thread, track["tid"])
        return self._threads[process, thread]

    def _name(self, what: str, track: Track, name: str, place: int) -> None:
        for key, args in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
            self.entries.append({"ph": "M", **track, "name": f"{what}_{key}", "args": args})


def slice_on(track: Track, name: str, kind: str, start: int, end: int, args: Mapping[str, object]) -> Entry:
    """At least a microsecond long, so that it can be seen, and binds arrows."""
    known = {key: value for key, value in args.items() if value not in (None, "")}
    times = {"ts": start, "dur": max(end - start, 1)}
    return {"ph": "X", "name": name, "cat": kind, **track, **times, "args": known}


def arrow(name: str, number: int, stops: Sequence[tuple[Track, int]]) -> Iterator[Entry]:
    """An arrow through slices that are open on these tracks at these times."""
    for index, (track, time) in enumerate(stops):
        phase = "s" if index == 0 else "f" if index == len(stops) - 1 else "t"
        end = {"bp": "e"} if phase == "f" else {}
        yield {"ph": phase, "name": name, "cat": name, "id": number, **track, "ts": time, **end}


def counter(process: int, name: str, time: int, figures: Mapping[str, float]) -> Entry:
    return {"ph": "C", "name": name, "pid": process, "ts": time, "args": dict(figures)}
