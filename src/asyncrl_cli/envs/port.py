"""The environment port: an environment gives a model its prompts and judges its responses. Today's tasks have one turn.

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
    """`messages` are appended to all that the model has seen and said. `is_last`: `step` will end the trajectory whatever the
    response is, so its engine slot is already free while `step` runs."""

    messages: tuple[Message, ...]
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    reward: float


class EpisodeFailed(Exception):
    """This trajectory has no reward; `str(error)` says why ("" if it was aborted). It leaves its group; the others go on."""


class Rewards(Protocol):
    async def score(self, item: Any, response_text: str) -> float:
        """The task's reward. Raises RewardFailed."""


class Environment(Protocol):
    """Made for one trajectory. An error it raises fails only that trajectory. Its calls are cancelled if the group is aborted."""

    async def start(self, item: Item) -> Turn: ...

    async def step(self, response: str) -> Turn | End:
        """`response`: the model's text, without special tokens."""


class OneTurn:
    """The environment of tasks with one prompt and one response: the task's reward ends it."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    async def start(self, item: Item) -> Turn:
        self._item = item
        return Turn(messages=prompt_of(item), is_last=True)

    async def step(self, response: str) -> End:
        return End(reward=await self._rewards.score(self._item, response))


def prompt_of(item: Mapping[str, Any]) -> tuple[Message, ...]:
    return ({"role": "user", "content": item["prompt"]},)
