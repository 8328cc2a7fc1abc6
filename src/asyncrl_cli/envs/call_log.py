"""The tool calls of a rollout worker, noted before they run: what has happened outside when an episode has to start again.

One line of JSON per answer of the model that calls tools: `["<trajectory>", turn, ["tool", ...]]`. A file of MOST_BYTES becomes the
older one, whose predecessor goes: together they reach further back than any episode that still runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

MOST_BYTES = 16 * 2**20
SUFFIX, OLDER = ".tools.jsonl", ".older"

Calls = dict[int, list[str]]
"""Names of the tools called, by turn (from 1)."""


class CallLog:
    """`path`: None notes nothing."""

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


def noted_calls(logs: Path, trajectories: Iterable[str]) -> dict[str, Calls]:
    """What the files below `logs` say of these trajectories, by trajectory; those without calls are left out."""
    wanted, found = set(trajectories), dict[str, Calls]()
    for file in sorted(logs.rglob(f"*{SUFFIX}*")):
        with file.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # a killed worker's last
                trajectory, turn, tools = json.loads(line)
                if trajectory in wanted:
                    found.setdefault(trajectory, {}).setdefault(turn, []).extend(tools)
    return found
