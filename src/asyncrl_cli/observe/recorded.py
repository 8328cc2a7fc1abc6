"""A recorded run: the contents of the files in its directory, read only when they are needed.

The run may be running, stopped, killed or resumed, and anything may stand in its files. Each line is parsed
once, as the type of its file (run_lines.py); the code that uses it checks nothing again. A malformed line is
left out, and counted in `damage`, for the user to be told; an incomplete one at a file's end is left out in
silence. A file that was never written is empty.

A resume retrains the steps after its checkpoint: metrics.jsonl and timeline.jsonl lose the lines of these
steps when it starts, events.jsonl keeps them, `events` leaves them out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Self

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.base.safe_files import (
    T,
    UnsafeFile,
    load_json,
    open_regular,
    parse_json,
    read_bytes,
    read_lines,
    reason,
)
from asyncrl_cli.checkpoint.lookup import REPLAY, find_run
from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.contracts.status import Status, parse_status
from asyncrl_cli.observe.format import MOST_SHOWN, is_number
from asyncrl_cli.observe.run_lines import (
    EVENT,
    SAMPLE,
    EventLine,
    Line,
    MetricsLine,
    RecordedSpan,
    SampleLine,
    TimelineLine,
)
from asyncrl_cli.observe.run_status import MAX_STATUS_BYTES
from asyncrl_cli.profile.loaded import Loaded
from asyncrl_cli.profile.resolved import read_document

DUMP_NAME = re.compile(r"step-(\d{6,})\.jsonl")
LISTS = frozenset({"staleness/histogram", "staleness/span_histogram", "response_tokens/quantiles"})
"""The keys of metrics whose values are lists; all others hold single numbers."""
MOST_NOTED = 100_000
"""Limit for the damaged lines of a file that are counted."""


class Damage:
    """Lines that were left out because they are malformed. A line counts once, however often it is read."""

    def __init__(self) -> None:
        self._lines: dict[Path, dict[int, str]] = {}

    def add(self, path: Path, number: int, why: str) -> None:
        """Number 0: the whole file was left out."""
        lines = self._lines.setdefault(path, {})
        if len(lines) < MOST_NOTED:
            lines[number] = why

    @property
    def notes(self) -> list[str]:
        """For each file how many lines, and what is wrong with the first one."""
        notes = []
        for path, lines in self._lines.items():
            number, more = min(lines), " or more" if len(lines) == MOST_NOTED else ""
            what = f"damaged lines of {path} left out: {len(lines):,}{more}; line {number}"
            notes.append(f"{what if number else f'{path} is left out'}: {lines[number]}")
        return notes


class Recorded:
    """The run in `directory`. Methods that read a file raise ConfigError if it cannot be read."""

    def __init__(self, directory: Path) -> None:
        self.damage = Damage()
        self.files = RunDirectory(directory)
        self.name = directory.name

    @classmethod
    def find(cls, run: str, runs_dir: Path) -> Self:
        """The run of that name or directory. Raises ConfigError if there is none."""
        return cls(find_run(run, runs_dir))

    @cached_property
    def status(self) -> Status | None:
        """The last status.json; None if there is none that can be read. (`read_status` says whether the run
        lives.)"""
        try:
            return parse_status(read_bytes(self.files.status, max_bytes=MAX_STATUS_BYTES))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as wrong:
            self.damage.add(self.files.status, 0, reason(wrong))
        return None

    @cached_property
    def loaded(self) -> Loaded:
        """The resolved profile and where each of its values comes from. Raises RefusedError if it cannot be
        read."""
        return read_document(self.files.config_resolved)

    @cached_property
    def roles(self) -> dict[str, str]:
        """Executor -> feed, rollout, reward, scorer or trainer."""
        return {executor.name: executor.role for executor in self.status.executors} if self.status else {}

    @cached_property
    def replay_of(self) -> str:
        """The run of which this is a replay (`asyncrl replay`); "" if it is none. Raises ConfigError if its
        description cannot be read."""
        path = self.files.path / REPLAY
        described = load_json(path, dict[str, object], error=ConfigError) if path.exists() else {}
        return str(described.get("of", ""))

    @property
    def attempts(self) -> list[Path]:
        """The log directories of the attempts, the first one first."""
        paths = (self.files.logs / f"attempt-{number + 1}" for number in range(self.files.attempts))
        return [path for path in paths if path.is_dir()]

    def metrics(self) -> Iterator[Line]:
        """A line per train step (docs/metrics.md), without values that are not finite."""
        for line in lines_of(self.files.metrics, MetricsLine, self.damage):
            yield {key: value for key, value in line.items() if _is_usable(value, key in LISTS)}

    def num_steps(self) -> int:
        """How many lines metrics.jsonl has, damaged ones included."""
        with _readable(self.files.metrics):
            return sum(1 for _ in read_lines(self.files.metrics))
        return 0

    def timeline(self, first_step: int = 1, last_step: int | None = None) -> Iterator[TimelineLine]:
        """The lines of these train steps: each executor's spans (state, start_s, end_s), and counts of
        running sequences."""
        lines = lines_of(self.files.timeline, TimelineLine, self.damage)
        wanted = takewhile(lambda line: last_step is None or line.get("step", 0) <= last_step, lines)
        return (line for line in wanted if line.get("step", first_step) >= first_step)

    def events(self, *names: str) -> Iterator[EventLine]:
        """The events of these names (default: all) in the order in which they happened, without those between
        a checkpoint and the resume from it: they belong to steps that were trained again."""
        resumes = list(self._events("resumed"))
        for event in self._events(*names, "resumed") if names else self._events():
            if event["event"] == "resumed":
                resumes = resumes[1:]
                if names and "resumed" not in names:
                    continue
            if not any(_is_abandoned(event, resumed) for resumed in resumes):
                yield event

    def _events(self, *names: str) -> Iterator[EventLine]:
        # Most lines are about groups. They are recognised by their text, because parsing them all takes long.
        written = re.compile(f'"event": "(?:{"|".join(map(re.escape, names))})"'.encode())
        wanted = (lambda line: bool(written.search(line))) if names else bool
        for event in lines_of(self.files.events, EVENT, self.damage, wanted):
            if not names or event["event"] in names:
                yield event

    @property
    def sampled_steps(self) -> list[int]:
        """The train steps whose trajectories were dumped (`logging.samples_every_steps`)."""
        found = (DUMP_NAME.fullmatch(path.name) for path in self.files.samples.glob("step-*.jsonl"))
        return sorted(int(match[1]) for match in found if match)

    def samples(self, step: int) -> Iterator[SampleLine]:
        """The dumped trajectories of a train step (train/sample_dump.py); none if they were not dumped."""
        return lines_of(self.files.samples / f"step-{step:06d}.jsonl", SAMPLE, self.damage)


def _is_abandoned(event: EventLine, resumed: EventLine) -> bool:
    """Whether the resume, which came later, went back to before the event. A checkpoint's own event comes
    when it is written, a little after the time from which the resume continues; an eval's when it ends, and
    it is valid as long as its version is."""
    if event["event"] == "checkpointed":
        return event.get("step", 0) > resumed.get("from_step", 0)
    if event["event"] == "eval":
        return event.get("version", 0) > resumed.get("version", 0)
    return event.get("time_s", 0.0) > resumed.get("from_time_s", resumed.get("time_s", 0.0))


def _is_usable(value: object, is_list: bool) -> bool:
    if is_list:
        return isinstance(value, list) and bool(value) and all(_is_usable(one, False) for one in value)
    return is_number(value) and abs(value) < MOST_SHOWN


def read_metrics(path: Path) -> list[Line]:
    """All lines of metrics.jsonl, for figures that need every line. Raises ConfigError if it cannot be read,
    or a line is damaged."""
    run = Recorded(path.parent)
    lines = list(run.metrics())
    for note in run.damage.notes:
        raise ConfigError(note, hint="use another run")
    return lines


def lines_of(
    path: Path, kind: type[T], damage: Damage, wanted: Callable[[bytes], bool] = bool
) -> Iterator[T]:
    """The lines that are `wanted`, parsed as `kind`; none if there is no file. Malformed lines are counted in
    `damage`, but not the last one if it is incomplete: its writer was killed, or is writing it.

    Raises ConfigError if the file cannot be read.
    """
    # Number and fault of a malformed line, until it is known not to be the last one.
    wrong: tuple[int, str] | None = None
    with _readable(path):
        for number, line in enumerate(read_lines(path), start=1):
            if wrong:
                damage.add(path, *wrong)
                wrong = None
            if line and not line.isspace() and wanted(line):
                try:
                    entry = parse_json(line, kind)
                except ValueError as error:
                    wrong = number, str(error)
                    continue
                yield entry
        if wrong:
            with open_regular(path) as file:
                file.seek(-1, os.SEEK_END)
                is_incomplete = file.read(1) != b"\n"
            if not is_incomplete:
                damage.add(path, *wrong)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Leave the block if the file is missing. Raises ConfigError if it cannot be read."""
    try:
        yield
    except FileNotFoundError:
        return
    except (OSError, UnsafeFile) as error:
        hint = "the run's other files may be readable without it"
        raise ConfigError(f"{path} cannot be read: {reason(error)}", hint=hint) from None


def add_span(spans: list[RecordedSpan], state: str, start_s: float, end_s: float) -> None:
    """Append a span, or extend the last one if it has the same state and there is no gap."""
    if spans and spans[-1][0] == state and start_s - spans[-1][2] < 1e-3:
        spans[-1] = (state, spans[-1][1], max(end_s, spans[-1][2]))
    else:
        spans.append((state, start_s, end_s))
