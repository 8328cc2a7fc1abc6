"""Entries of a trace in Chrome's JSON format, which Perfetto reads: tracks, slices, arrows, counters and
instants.

Source: "Trace Event Format", the document of chrome://tracing. Times are whole microseconds of the run.

    process, thread    where a slice stands: a track, with a name (ph M)
    slice              a stretch of time on a track (ph X). Slices of one lie side by side or in each other
    arrow              from slice to slice, by an id (ph s, t, f): each end binds to the slice that is open
                       on its track at that time
    counter            a figure that holds until the next one (ph C)
    instant            something that has no length (ph i)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Entry = dict[str, Any]
Track = Mapping[str, int]
"""The keys `pid` and `tid`, which put an entry on a track."""


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
