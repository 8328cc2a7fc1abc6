"""A recorded run: the contents of the files in its directory, read only when they are needed.

The run may be running, stopped, killed or resumed: an incomplete line at a file's end is left out, and a file
that was never written is empty. Damaged lines are left out, too, and counted in `damage`. A resume retrains
the steps after its checkpoint: metrics.jsonl and timeline.jsonl lose the lines of these steps when it starts,
events.jsonl keeps them, `events` leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from asyncrl_cli.base.safe_files import parse_json, read_bytes, reason
from asyncrl_cli.checkpoint.find import find_run
from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.observe.line_types import Event, EventLine, Sample, SampleLine, TimelineLine
from asyncrl_cli.observe.lines import Damage, Line, lines_of, metrics_of
from asyncrl_cli.observe.status import MAX_STATUS_BYTES, RECORDED
from asyncrl_cli.profile.loaded import Loaded, read_document

DUMP_NAME = re.compile(r"step-(\d{6,})\.jsonl")


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
    def status(self) -> Mapping[str, Any]:
        """The last status.json; empty if there is none that can be read. Any key may be missing:
        `read_status` is strict, and says whether the run lives."""
        try:
            return parse_json(read_bytes(self.files.status, max_bytes=MAX_STATUS_BYTES), RECORDED)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as wrong:
            self.damage.add_file(self.files.status, reason(wrong))
        return {}

    @cached_property
    def loaded(self) -> Loaded:
        """The resolved profile and where each of its values comes from. Raises RefusedError if it cannot be
        read."""
        return read_document(self.files.config_resolved)

    @cached_property
    def roles(self) -> dict[str, str]:
        """Executor -> feed, rollout, reward or trainer."""
        return {executor["name"]: executor["role"] for executor in self.status.get("executors", ())}

    @property
    def attempts(self) -> list[Path]:
        """The log directories of the attempts, the first one first."""
        return [
            path
            for number in range(1, self.files.attempts + 1)
            if (path := self.files.logs / f"attempt-{number}").is_dir()
        ]

    def metrics(self) -> Iterator[Line]:
        """A line per train step (docs/metrics.md), without values that are not finite."""
        return metrics_of(self.files.metrics, self.damage)

    def timeline(self, first_step: int = 1, last_step: int | None = None) -> Iterator[TimelineLine]:
        """The lines of these train steps: each executor's spans (state, start_s, end_s), and counts of
        running sequences."""
        lines: Iterator[TimelineLine] = lines_of(self.files.timeline, TimelineLine, self.damage)
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
        for event in lines_of(self.files.events, Event, self.damage, wanted):
            if not names or event["event"] in names:
                yield event

    @property
    def sampled_steps(self) -> list[int]:
        """The train steps whose trajectories were dumped (`logging.samples_every_steps`)."""
        found = (DUMP_NAME.fullmatch(path.name) for path in self.files.samples.glob("step-*.jsonl"))
        return sorted(int(match[1]) for match in found if match)

    def samples(self, step: int) -> Iterator[SampleLine]:
        """The dumped trajectories of a train step (samples.py); none if they were not dumped."""
        return lines_of(self.files.samples / f"step-{step:06d}.jsonl", Sample, self.damage)


def _is_abandoned(event: EventLine, resumed: EventLine) -> bool:
    """Whether the resume, which came later, went back to before the event. A checkpoint's own event comes
    when it is written, a little after the time from which the resume continues; an eval's when it ends, and
    it is valid as long as its version is."""
    if event["event"] == "checkpointed":
        return event.get("step", 0) > resumed.get("from_step", 0)
    if event["event"] == "eval":
        return event.get("version", 0) > resumed.get("version", 0)
    return event.get("time_s", 0.0) > resumed.get("time_s", 0.0)
