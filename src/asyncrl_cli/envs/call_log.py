"""A log of a rollout worker's tool calls, written before they run. It shows what a restarted episode may
already have done.

One line of JSON per model answer that calls tools: `["<trajectory>", turn, ["tool", ...]]`. A file of
MOST_BYTES is renamed (suffix OLDER) and replaces the one renamed before it. Together the two reach further
back than any running episode.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_BYTES = 16 * 2**20
SUFFIX, OLDER = ".tools.jsonl", ".older"

Calls = dict[int, list[str]]
"""Names of the tools called, by turn (from 1)."""


class CallLog:
    """`path`: None to log nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd = -1

    def note(self, trajectory: str, turn: int, tools: Sequence[str]) -> None:
        if self._path is None:
            return
        if self._fd < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._fd, json.dumps([trajectory, turn, list(tools)]).encode() + b"\n")
        if os.fstat(self._fd).st_size > MOST_BYTES:
            os.replace(self._path, f"{self._path}{OLDER}")
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def noted_calls(logs: Path, worker: str = "*") -> dict[str, Calls]:
    """The logged calls of each trajectory that has called a tool, from the files below `logs`; of one worker
    or of all."""
    found = dict[str, Calls]()
    for file in sorted(logs.rglob(f"{worker}{SUFFIX}*")):
        with file.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # the last line of a killed worker
                trajectory, turn, tools = json.loads(line)
                found.setdefault(trajectory, {}).setdefault(turn, []).extend(tools)
    return found


class RepeatedCalls:
    """Reports the tool calls of episodes that start again after a resume or a worker's death: when they are
    placed again, or their prompt is admitted again. The files are read on creation, before the loop runs, and
    at each death.

    `logs`: of all attempts; `latest`: of the running one."""

    def __init__(self, logs: Path, latest: str = "latest") -> None:
        self._latest = logs / latest
        self._lost = noted_calls(logs)
        self._earlier: dict[tuple[str, str], dict[str, Calls]] = {}
        for trajectory, calls in self._lost.items():
            uid, _, rest = trajectory.rpartition("@")  # <uid>@<epoch>.<attempt>/<index>
            self._earlier.setdefault((uid, rest.partition(".")[0]), {})[trajectory] = calls

    def __call__(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Events to add, one per restarted trajectory. `calls`: the tools that it had called, by turn. It may
        call them again."""
        found = dict[str, Calls]()
        if event["event"] == "lost":
            self._lost |= noted_calls(self._latest, event["worker"])
        elif event["event"] == "running":
            found = self._earlier.pop((event["uid"], str(event["epoch"])), {})
        elif event["event"] == "replaced":
            names = [f"{event['group']}/{index}" for index in event["indices"]]
            found = {name: self._lost.pop(name) for name in names if name in self._lost}
        again = {name: event[name] for name in ("group", "uid", "epoch", "attempt") if name in event}
        return [
            {"event": "tools_again", **again, "trajectory": name, "calls": calls}
            for name, calls in found.items()
        ]
