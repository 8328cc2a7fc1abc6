"""The environment port: who gives a model its prompts and judges its responses.

item ─> start ─> Turn ─> render, generate ─> step ─> Turn ─> render, generate ─> step ─> End
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl_cli.tasks.item import Item

Message = Mapping[str, str]
"""`role` and `content`, as chat templates take them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """`messages` come after all that the model has seen and said. `is_last`: `step` will end the trajectory whatever the response
    is, so the engine's slot is free while it judges."""

    messages: tuple[Message, ...]
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    reward: float


class EpisodeFailed(Exception):
    """This trajectory has no reward; `str(error)` says why ("" if it was aborted). It leaves its group, and the others go on."""


class Rewards(Protocol):
    async def score(self, item: Any, response_text: str) -> float:
        """The task's reward. Raises RewardFailed."""


class Environment(Protocol):
    """Made for one trajectory. What it raises fails that trajectory alone; it is cancelled where a group is aborted."""

    async def start(self, item: Item) -> Turn: ...

    async def step(self, response: str) -> Turn | End:
        """`response`: the model's text, without special tokens."""
