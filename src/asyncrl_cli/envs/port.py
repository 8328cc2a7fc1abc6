"""The environment port: an environment gives a model its prompts and judges what it answers. Today's tasks have one turn.

item ─> start ─> Turn ─> render, generate, parse ─> step ─> Turn ─> render, generate, parse ─> step ─> End
                                                     └── no room for a further turn ─> cut ─> End
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl_cli.tasks.item import Item, messages_of

Message = Mapping[str, Any]
"""A chat message in OpenAI's shape: `role`, `content`, and where they apply `tool_calls`, `tool_call_id`, `name` and
`reasoning_content`."""
ToolSchema = Mapping[str, Any]
"""A tool in OpenAI's shape: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": <JSON schema>}}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model sees next. `messages` are appended to all that it has seen and said; `tools` are those that it may call.

    `is_last`: `step` will end the trajectory whatever the answer is, so its engine slot is already free while `step` runs.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """`reward` includes `turn_rewards`, which are kept for people to read. `facts`: figures of this trajectory for the metrics."""

    reward: float
    turn_rewards: tuple[float, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said in a turn: `text`, without special tokens, and the `message` parsed from it (`content`,
    `reasoning_content`, `tool_calls`).

    `finish_reason`: "stop" or "length". `malformed`: why a tool call could not be parsed, or ""; then `message` has no tool calls.
    """

    text: str
    message: Message
    finish_reason: str
    malformed: str = ""


class EpisodeFailed(Exception):
    """This trajectory has no reward; it leaves its group, and the others go on. `kind` is what metrics count, `text` says more.

    Kinds: prompt, template, cut, environment, agent, tool-timeout, tool-died, episode-timeout, reward, aborted.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class Rewards(Protocol):
    async def score(self, item: Any, response_text: Any) -> float:
        """The task's reward. Raises RewardFailed."""


class Environment(Protocol):
    """Made for one trajectory; derive from it. An error that it raises fails only that trajectory. Its calls are cancelled if the
    group is aborted. `episode` names the trajectory: `<attempt>/<index>`, or that of an eval."""

    episode: str = ""

    async def start(self, item: Item) -> Turn: ...

    async def step(self, answer: Answer) -> Turn | End: ...

    async def cut(self, reason: str) -> End:
        """No further turn is possible: what the episode is worth as it stands. `reason`: "length" (the context is full) or
        "max_turns"."""
        raise EpisodeFailed("cut", f"the episode was cut short ({reason}), and its environment gives no reward for that")

    async def close(self) -> None:
        """Let go of what the episode holds. Called once, whatever happened, errors and aborts included."""


class SelfPlayed(Environment):
    """Plays its whole episode by itself: it asks the model without the episode's turns, and is asked for nothing but `play`."""

    async def play(self, episode: Any) -> End:
        """Play an `episode.Episode`, and fill its conversation and `finish_reason`."""
        raise NotImplementedError


class OneTurn(Environment):
    """The environment of tasks with one prompt and one response: the task's reward ends it."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    async def start(self, item: Item) -> Turn:
        self._item = item
        return Turn(messages=messages_of(item["prompt"]), is_last=True)

    async def step(self, answer: Answer) -> End:
        return End(reward=await self._rewards.score(self._item, answer.text))
