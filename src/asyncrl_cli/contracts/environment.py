"""The environment port: an environment gives a model its prompts and judges its answers, in one turn or
several.

item ─> start ─> Turn ─> render, generate, parse ─> step ─> Turn ─> render, generate, parse ─> step ─> End
                                                     └── no room for a further turn ─> cut ─> End
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl_cli.contracts.item import Item, messages_of
from asyncrl_cli.contracts.reward_spec import figures_of

Message = Mapping[str, Any]
"""A chat message in OpenAI's shape: `role`, `content`, and where they apply `tool_calls`, `tool_call_id`,
`name` and `reasoning_content`."""
ToolSchema = Mapping[str, Any]
"""A tool in OpenAI's shape: `{"type": "function", "function": {"name": ..., "description": ..., "parameters":
<JSON schema>}}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model sees next. `messages` are appended to all that it has seen and said; `tools` are those
    that it may call.

    `is_last`: `step` will end the trajectory whatever the answer is, so its engine slot is already free while
    `step` runs.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """`reward` includes `turn_rewards`, which are kept for people to read. `facts`: figures of this
    trajectory for the metrics."""

    reward: float
    turn_rewards: tuple[float, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said in a turn: `text`, without special tokens, and the `message` parsed from it
    (`content`, `reasoning_content`, `tool_calls`).

    `finish_reason`: "stop" or "length". `malformed`: why a tool call could not be parsed, or ""; then
    `message` has no tool calls.
    """

    text: str
    message: Message
    finish_reason: str
    malformed: str = ""


class EpisodeFailed(Exception):
    """This trajectory has no reward: its group goes on without it. Metrics count failures by `kind`; `text`
    gives the details.

    Kinds: prompt, template, cut, environment, agent, tool-timeout, tool-died, episode-timeout, reward,
    aborted.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class Rewards(Protocol):
    async def score(self, item: Item, response_text: Any) -> float:
        """The task's reward, with its parts if it is a `Reward`. Raises RewardFailed."""


class Environment(Protocol):
    """Base class of environments: one object per trajectory. An error that it raises fails only that
    trajectory. Its calls are cancelled if the group is aborted. `episode`: the trajectory's name,
    `<attempt>/<index>`, or that of an eval."""

    episode: str = ""

    async def start(self, item: Item) -> Turn: ...

    async def step(self, answer: Answer) -> Turn | End: ...

    async def cut(self, reason: str) -> End:
        """End the episode, because no further turn is possible, with the reward that it has earned so far.
        `reason`: "length" (the context is full) or "max_turns"."""
        raise EpisodeFailed(
            "cut", f"the episode was cut short ({reason}), and its environment gives no reward for that"
        )

    async def close(self) -> None:
        """Release the episode's resources. Called exactly once, also after errors and aborts."""


class SelfPlayed(Environment):
    """Plays its whole episode by itself: only `play` is called, and it asks the model itself."""

    async def play(self, episode: Any) -> End:
        """Play an `episode.Episode`, and fill its conversation and `finish_reason`."""
        raise NotImplementedError


class OneTurn(Environment):
    """The environment of tasks with one prompt and one response, which the task's reward scores."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    async def start(self, item: Item) -> Turn:
        self._item = item
        return Turn(messages=messages_of(item["prompt"]), is_last=True)

    async def step(self, answer: Answer) -> End:
        reward = await self._rewards.score(self._item, answer.text)
        return End(reward=float(reward), facts=figures_of(reward))
