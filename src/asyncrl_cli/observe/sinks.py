"""What a run's figures are written to: its own files, and the table of the sinks that a profile can name.

`Observers` gives every sink the same four things: a line of metrics per train step, events, where the
executors' time went, and a status per second. A package adds a sink as an entry point of `asyncrl.sinks`, and
a profile names it in `logging.sinks`.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from asyncrl_cli.base.named_code import find_plugin
from asyncrl_cli.base.safe_files import MIB
from asyncrl_cli.base.storage import naming, repair_lines, replace_text
from asyncrl_cli.contracts.events import StepRecord
from asyncrl_cli.contracts.status import Status
from asyncrl_cli.observe.format import is_number
from asyncrl_cli.observe.run_lines import Line
from asyncrl_cli.profile.schema import Profile

log = logging.getLogger("asyncrl")
SINKS = {
    "wandb": "asyncrl_cli.observe.service_sinks:Wandb",
    "tensorboard": "asyncrl_cli.observe.service_sinks:TensorBoard",
    "mlflow": "asyncrl_cli.observe.service_sinks:Mlflow",
    "prometheus": "asyncrl_cli.observe.prometheus_sink:Prometheus",
}
"""Those that keys of their own in `[logging]` switch on."""
DIGITS = 4
"""Decimals of times in timeline.jsonl: a tenth of a millisecond is enough and keeps the file small."""
MAX_TRACED_BYTES = 256 * MIB
MAX_WAIT_CHARACTERS = 200


class Sink:
    """Writes or shows what `Observers` computes. A subclass overrides the methods it needs. They are called
    on the event loop and must return at once.

    One that a profile names is constructed with the profile and the run's directory, when the run starts. It
    may raise PreflightError.
    """

    @classmethod
    def check(cls, profile: Profile) -> None:
        """Raises PreflightError, before anything is started, if the sink could not start."""

    def line(self, line: Line) -> None:
        """The metrics of a train step."""

    def event(self, event: Line) -> None:
        """One event, as it stands in events.jsonl."""

    def spans(self, spans: Line) -> None:
        """Where the executors' time went since the last train step, as it stands in timeline.jsonl."""

    def status(self, status: Status) -> None:
        """The run at a glance, once a second."""

    def end(self, status: Status) -> None:
        """The run has ended with this status. All sinks get this call before any is closed."""

    def close(self, status: Status) -> None:
        """Finish. The only call that may take time."""


def check_sinks(profile: Profile) -> None:
    """Raises PreflightError, before anything is started, for a sink that could not start (no login, no
    package, no free port), ConfigError for an unknown one."""
    for name in _wanted(profile):
        _kind(name).check(profile)


def make_sinks(profile: Profile, run_dir: Path) -> list[Sink]:
    """Start the sinks. Raises PreflightError if one does not start."""
    return [_kind(name)(profile, run_dir) for name in _wanted(profile)]


def _wanted(profile: Profile) -> list[str]:
    logging = profile.logging
    switched_on = {
        "wandb": logging.wandb != "disabled",
        "tensorboard": logging.tensorboard,
        "mlflow": bool(logging.mlflow_uri),
        "prometheus": logging.prometheus_port is not None,
    }
    return list(dict.fromkeys([name for name, is_on in switched_on.items() if is_on] + [*logging.sinks]))


def _kind(name: str) -> type[Sink]:
    kind: type[Sink] = find_plugin("logging.sinks", name, SINKS, "asyncrl.sinks")
    return kind


class LineFile(Sink):
    """A file of JSON lines, each flushed to the system at once: a killed process leaves at most one
    incomplete line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        repair_lines(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def append(self, line: Line) -> None:
        with naming(self._path):
            self._file.write(to_json(line) + "\n")

    def close(self, status: Status) -> None:
        self._file.close()


class StepFile(LineFile):
    """One line per train step. A resume removes the lines of steps that will be trained again."""

    def event(self, event: Line) -> None:
        if event["event"] == "resumed":
            with self._path.open("rb") as file:
                lasting = takewhile(lambda line: json.loads(line)["step"] <= event["from_step"], file)
                self._file.truncate(sum(map(len, lasting)))


class MetricsFile(StepFile):
    """metrics.jsonl."""

    def line(self, line: Line) -> None:
        self.append(line)


class EventsFile(LineFile):
    """events.jsonl: lines are never removed. After a crash, `resumed` says from which step the run
    continues."""

    def event(self, event: Line) -> None:
        self.append(event)


class TimelineFile(StepFile):
    """timeline.jsonl: what every executor did when, on the run's time axis (`time_s`).

        {"step": 7, "spans": {"trainer": [["starved", 11.2, 11.9], ...]},
         "running": {"rollout-0": [[12.1, 64], ...]}}

    A step's line holds what was reported since the previous line. `covered` has the time up to which the
    step's figures count each executor: it may be a little later than its last span. Once a second `running`
    gets (time, running sequences) and, if it has changed, `waits` gets (time, what the executor waits for).
    With `logging.trace_sequences` there is `slots`, too: (slot, sequence, start, end) of each worker's
    sequences, until the file has `MAX_TRACED_BYTES`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._running: dict[str, list[tuple[float, float]]] = {}
        self._waits: dict[str, list[tuple[float, str]]] = {}
        self._waiting_for: dict[str, str] = {}
        self._is_full = False

    def spans(self, spans: Line) -> None:
        if not self._is_full and "slots" in spans:
            self._is_full = os.fstat(self._file.fileno()).st_size > MAX_TRACED_BYTES
            if self._is_full:
                size = MAX_TRACED_BYTES // MIB
                log.warning("timeline.jsonl has %d MiB: sequences are traced no further", size)
        wanted = {key: content for key, content in spans.items() if key != "slots" or not self._is_full}
        self.append({**wanted, "running": self._running, "waits": self._waits})
        self._running, self._waits = {}, {}

    def status(self, status: Status) -> None:
        """Remember how many sequences run now, and what every executor waits for."""
        time_s = round(status.progress.time_s, DIGITS)
        for executor in status.executors:
            name, sequences = executor.name, executor.gauges.get("running_sequences")
            if executor.role == "rollout" and is_number(sequences):
                self._running.setdefault(name, []).append((time_s, sequences))
            wait = executor.waiting_for[:MAX_WAIT_CHARACTERS]
            if wait != self._waiting_for.get(name, ""):
                self._waiting_for[name] = wait
                self._waits.setdefault(name, []).append((time_s, wait))


def span_line(record: StepRecord, ahead_s: float) -> dict[str, object]:
    """A step's spans as JSON. `ahead_s` is the run's time minus the driver's clock."""

    def at(time_s: float) -> float:
        return round(time_s + ahead_s, DIGITS)

    spans = {
        name: [(str(span.state), at(span.start_s), at(span.end_s)) for span in its_spans]
        for name, its_spans in record.spans.items()
    }
    slots = {
        name: [(slot, sequence, at(start_s), at(end_s)) for slot, sequence, start_s, end_s in intervals]
        for name, intervals in record.slot_intervals.items()
    }
    covered = {name: at(time_s) for name, time_s in record.covered_s.items()}
    return {"step": record.step, "spans": spans, "covered": covered} | ({"slots": slots} if slots else {})


class StatusFile(Sink):
    """status.json, replaced atomically. Not synced to disk until the run ends: a newer one comes every
    second."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def status(self, status: Status) -> None:
        replace_text(self._path, to_json(status.to_json()), durable=False)

    def close(self, status: Status) -> None:
        replace_text(self._path, to_json(status.to_json()))


def to_json(content: Line) -> str:
    """Strict JSON. A figure that is not finite becomes a string ("nan", "inf"): it was measured, so it is not
    left out."""
    return json.dumps(_finite(content), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
