"""A recorded run as a trace, for Perfetto or chrome://tracing: who did what when, and how each group became a
version. docs/trace.md explains how to read it.

    events.jsonl ───> loop: train steps, versions, events; groups: lanes; arrows (perfetto_groups.py)
    timeline.jsonl ─> executors: a track each, with states and what they wait for; a track per slot, if
                      sequences were traced
    metrics.jsonl ──> counters: staleness, window, versions, tokens per second, groups
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.base.storage import appearing_file
from asyncrl_cli.observe.line_types import Line, RecordedSpan, Spans, TimelineLine
from asyncrl_cli.observe.recorded import Recorded, add_span
from asyncrl_cli.report.out_file import check_out
from asyncrl_cli.report.perfetto_entries import Entry, Tracks, arrow, counter, micros, slice_on
from asyncrl_cli.report.perfetto_groups import (
    EXECUTORS,
    LOOP,
    Group,
    Story,
    group_entries,
    mark_entries,
    version_entries,
)

GENERATOR = "asyncrl trace"
"""In each trace's head. A file that has it may be overwritten."""
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


def write_trace(run: Recorded, path: Path, first: int = 1, last: int | None = None) -> Counter[str]:
    """Write the train steps from `first` to `last` (None: to the end) to `path`, gzipped if it ends with .gz.
    Returns how many entries there are of each kind.

    Raises ConfigError for a range without a train step or a malformed file of the run, OSError if `path`
    cannot be written, and as `check_out`.
    """
    check_out(path, GENERATOR, "trace")
    head = json.dumps({"generator": GENERATOR, "run": run.name})
    counted: Counter[str] = Counter()
    opened = cast("Callable[..., IO[str]]", gzip.open if path.suffix == ".gz" else open)
    with appearing_file(path) as temporary, opened(temporary, "wt", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {head}, "traceEvents": [\n')
        for index, entry in enumerate(trace_entries(run, first, last)):
            counted[entry["cat"] if entry["ph"] in "Xi" else entry["ph"]] += 1
            file.write((",\n" if index else "") + json.dumps(entry, separators=(",", ":")))
        file.write("\n]}\n")
        if (first > 1 or last is not None) and not counted["step"]:
            asked = f"--steps {first}:{'' if last is None else last}"
            hint = f"'asyncrl status {run.name}' says how far it has come"
            raise ConfigError(f"run '{run.name}' has trained no step of {asked}", hint=hint)
    return counted


def trace_entries(run: Recorded, first: int = 1, last: int | None = None) -> Iterator[Entry]:
    """All entries of the trace, the names of tracks at the end."""
    tracks, ends, waits_s = Tracks(), dict[int, int](), dict[int, float]()
    process = tracks.process(LOOP)
    for name in run.roles:
        tracks.track(EXECUTORS, name)
    for line in run.metrics():
        step = line["step"]
        if last is None or step <= last:
            ends[step], waits_s[step] = micros(line["time_s"]), line.get("timing/wait_data_s", 0.0)
            yield from step_counters(line, process) if step >= first else ()
    story = Story(run.events(), ends, first, last)
    groups = {group.key: group for group in story.groups}
    yield from group_entries(story, tracks, waits_s)
    yield from version_entries(story, tracks)
    yield from mark_entries(story, tracks)
    yield from executor_entries(run.timeline(first, last), tracks, groups)
    yield from tracks.entries


def step_counters(line: Line, process: int) -> Iterator[Entry]:
    end = micros(line["time_s"])
    start = max(0, end - micros(line.get("timing/step_s", 0.0)))
    for time, counters in ((start, COUNTERS), (end, COUNTERS_AT_END)):
        for name, keys in counters.items():
            if figures := {figure: line[key] for figure, key in keys.items() if key in line}:
                yield counter(process, name, time, figures)


def executor_entries(
    lines: Iterable[TimelineLine], tracks: Tracks, groups: Mapping[str, Group]
) -> Iterator[Entry]:
    """Entries from the lines of timeline.jsonl. A span that is split over two lines is one slice; a sequence
    in a slot has, the first time, an arrow from its group."""
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
            yield from _states(name, joined[:-1], tracks, waits.get(name, ()))
            del joined[:-1]
        for name, stays in line.get("slots", {}).items():
            for slot, sequence, start_s, end_s in stays:
                track = tracks.track(f"{name} slots", f"slot {slot:03d}")
                start, key = micros(start_s), sequence.rpartition("/")[0]
                group = groups.get(key)
                facts = {"worker": name, "group": key if group else ""}
                yield slice_on(track, sequence, "sequence", start, micros(end_s), facts)
                if group is not None and group.track is not None and sequence not in traced:
                    number = 2 * 10**12 + len(traced)
                    yield from arrow("sequence", number, [(group.track, group.times[0]), (track, start)])
                    traced.add(sequence)
    for name, joined in spans.items():
        yield from _states(name, joined, tracks, waits.get(name, ()))


def _states(
    name: str, spans: Sequence[RecordedSpan], tracks: Tracks, waits: Sequence[tuple[float, str]]
) -> Iterator[Entry]:
    """Spans of an executor, side by side. `waits`: what it waits for, from each of these times on."""
    track, times = tracks.track(EXECUTORS, name), [time_s for time_s, _ in waits]
    for state, start_s, end_s in spans:
        known = bisect_right(times, end_s) - 1
        was_sampled = known >= 0 and (end_s - start_s >= SAMPLED_S or times[known] >= start_s)
        facts = {"executor": name, "waiting_for": waits[known][1] if was_sampled and state != "busy" else ""}
        yield slice_on(track, state, "state", micros(start_s), micros(end_s), facts)
