"""The run as plain lines, where there is no terminal: steps now and then, evals, warnings, totals at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from asyncrl_cli.observe.format import clock, count, number, share
from asyncrl_cli.observe.sinks import NullSink
from asyncrl_cli.observe.summary import summary_text
from asyncrl_cli.observe.terminal import neutral

EVERY_S = 5.0
"""Least time between two step lines: a fast run must not flood a log."""
SHOWN_EVENTS = {
    "eval": lambda event: f"eval of version {event.get('version')}: {number(event.get('reward_mean'), 3)}",
    "checkpointed": lambda event: f"checkpoint of step {event.get('step')} written",
    "restarted": lambda event: f"{event.get('worker')} was restarted in {event.get('restart_s', 0.0):.0f} s",
    "resumed": lambda event: f"resumed from step {event.get('from_step')}",
    "failed": lambda event: f"stopping: {event.get('error', '')}",
    "warning": lambda event: f"warning: {event.get('message', '')}",
}


class Plain(NullSink):
    """Writes to `stream` (stderr: stdout carries data). A closed stream is no reason to stop."""

    def __init__(self, stream: TextIO, *, every_s: float = EVERY_S, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._every_s = every_s
        self._now = now
        self._said_s = float("-inf")
        self._pending: Mapping[str, Any] | None = None
        self._train_steps = 0
        self._phase = ""

    def line(self, line: Mapping[str, Any]) -> None:
        self._pending = line
        if self._now() - self._said_s >= self._every_s:
            self._say_step()

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] in SHOWN_EVENTS:
            self._write(event["time_s"], SHOWN_EVENTS[event["event"]](event))

    def status(self, status: Mapping[str, Any]) -> None:
        self._train_steps = status["train_steps"]
        if status["phase"] != self._phase:
            self._phase = status["phase"]
            self._write(status["progress"]["time_s"], f"{status['name']} ({status['mode']}): {self._phase}")

    def close(self, status: Mapping[str, Any]) -> None:
        if self._pending is not None:
            self._say_step()
        self._stream.write(neutral(summary_text({**status, "error": ""})) + "\n")
        self._stream.flush()

    def _say_step(self) -> None:
        assert self._pending is not None
        self._write(self._pending["time_s"], step_text(self._pending, self._train_steps))
        self._said_s, self._pending = self._now(), None

    def _write(self, time_s: float, text: str) -> None:
        self._stream.write(neutral(f"{clock(time_s)}  {text}\n"))
        self._stream.flush()


def step_text(line: Mapping[str, Any], train_steps: int) -> str:
    """A metrics line in a hundred characters; what was not measured is left out."""
    parts = [
        ("reward", number(line.get("reward/mean"), 3)),
        ("slots", share(line.get("rollouter/slot_utilization"))),
        ("idle trainer", share(line.get("trainer/idle_ratio"))),
        ("rollouter", share(line.get("rollouter/idle_ratio"))),
        ("staleness", f"{number(line.get('staleness/mean'))}/{line.get('staleness/max', '-')}"),
        ("tokens/s", count(line.get("rollouter/tokens_per_s"))),
    ]
    step = f"step {line['step']}" + (f"/{train_steps}" if train_steps else "")
    return f"{step} v{line['version']}  " + "  ".join(f"{what} {figure}" for what, figure in parts if figure != "-")
