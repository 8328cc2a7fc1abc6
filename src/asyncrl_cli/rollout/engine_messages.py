"""What `ProcessEngine` and the `EngineServer` in its child process say to each other, in frames (tasks/frames.py).

engine -> server    settings of the engine; then lists of Asked
server -> engine    Started; then Told: outcomes, and how the engine stands
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.errors import AsyncrlError, ExecutorFailed

CANCEL = "cancel"
"""The method that ends the call with the id in `arguments`; it has no outcome of its own."""


@dataclass(frozen=True, slots=True)
class Started:
    failure: Exception | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """One call of a method of the engine. Calls begin in the order in which they were asked."""

    call_id: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """Outcomes by call id (a value, or the exception that it ended with), and the engine as it stands after them.

    `tokens`: those of the responses now running, by request id, where they are told of.
    """

    outcomes: tuple[tuple[int, Any], ...]
    version: int
    running: int
    sampled_tokens: int
    decode_steps: int
    tokens: Mapping[str, int] | None = None


def portable(error: Exception) -> Exception:
    """An error that any process can read: ours and ValueErrors as they are, others by their name and message."""
    if isinstance(error, AsyncrlError):
        return error
    if isinstance(error, ValueError):
        return ValueError(str(error))
    return ExecutorFailed(f"{type(error).__name__}: {error}")
