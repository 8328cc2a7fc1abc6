"""The run as plain lines, where there is no terminal: steps now and then, evals, warnings, totals at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from asyncrl_cli.loop.watching import ENDED
from asyncrl_cli.observe.format import NOTHING, clock, count, number, share
from asyncrl_cli.observe.sinks import Sink
from asyncrl_cli.observe.summary import event_text, summary_rows
from asyncrl_cli.observe.terminal import neutral

EVERY_S = 5.0
"""Least time between two step lines: a fast run must not flood a log."""


class Plain(Sink):
    """Writes to `stream` (stderr: stdout carries data). A closed stream is no reason to stop."""

    def __init__(self, stream: TextIO, *, every_s: float = EVERY_S, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._every_s = every_s
        self._now = now
        self._said_s = float("-inf")
        self._said_step = 0
        self._phase = ""

    def event(self, event: Mapping[str, Any]) -> None:
        if (text := event_text(event)) is None:
            return
        told = {"warning": f"warning: {text}", "checkpointed": f"{text} written", "failed": f"stopping: {event.get('error', '')}"}
        self._write(event["time_s"], told.get(event["event"], text))

    def status(self, status: Mapping[str, Any]) -> None:
        if status["phase"] != self._phase:
            self._phase = status["phase"]
            self._write(status["progress"]["time_s"], f"{status['name']} ({status['mode']}): {self._phase}")
        if status["phase"] not in ENDED and self._now() - self._said_s >= self._every_s:
            self._say_step(status)

    def close(self, status: Mapping[str, Any]) -> None:
        self._say_step(status)
        rows = summary_rows({**status, "error": ""})
        self._stream.write(neutral("".join(f"{what:<11}{figures}\n" for what, figures in rows)))
        self._stream.flush()

    def _say_step(self, status: Mapping[str, Any]) -> None:
        """Once per step at most, and none before the first has ended."""
        step = status["progress"]["step"]
        if step != self._said_step and status["periods"]["steps"]:
            self._write(status["progress"]["time_s"], step_text(status))
            self._said_s, self._said_step = self._now(), step

    def _write(self, time_s: float, text: str) -> None:
        self._stream.write(neutral(f"{clock(time_s)}  {text}\n"))
        self._stream.flush()


def step_text(status: Mapping[str, Any]) -> str:
    """The screen's leading figures, in its words and over the same time."""
    progress, steps, use, staleness = status["progress"], status["periods"]["steps"], status["utilization"], status["staleness"]
    parts = [
        f"step {progress['step']}/{progress['train_steps']} v{progress['version']}",
        f"reward {number(status['reward'].get('mean'), 3)}",
        f"{steps['words']}: staleness {number(staleness.get('mean'))}/{staleness.get('max', NOTHING)}",
    ]
    using = status["periods"]["utilization"]
    if using != steps:
        parts.append(f"{using['words']}:")
    parts += [
        f"slots used {share(use.get('rollouter_slot_utilization'))}",
        f"trainer idle {share(use.get('trainer_idle_ratio'))}",
        f"rollouter idle {share(use.get('rollouter_idle_ratio'))}",
        f"tokens/s {count(use.get('rollouter_tokens_per_s'))}",
    ]
    return "  ".join(parts)
