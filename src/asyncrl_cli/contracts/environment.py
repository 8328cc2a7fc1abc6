"""What gives a model its prompts and judges its answers: the environment port, in one turn or several, and
the description of a task's reward, which every process can read; `reward_functions.build_reward` makes a
function of it.

item ─> start ─> Turn ─> render, generate, parse ─> step ─> Turn ─> render, generate, parse ─> step ─> End
                                                     └── no room for a further turn ─> cut ─> End
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from asyncrl_cli.base.named_code import UserCode
from asyncrl_cli.contracts.item import Item, messages_of

Message = Mapping[str, Any]
"""A chat message in OpenAI's shape: `role`, `content`, and where they apply `tool_calls`, `tool_call_id`,
`name` and `reasoning_content`."""
ToolSchema = Mapping[str, Any]
"""A tool in OpenAI's shape: `{"type": "function", "function": {"name": ..., "description": ..., "parameters":
<JSON schema>}}`."""
Adapter = Literal["plain", "worked"]
AnswerFormat = Literal["final", "anywhere"]
RewardKind = Literal[
    "dataset",
    "exact-match",
    "math-verify",
    "function",
    "agent",
    "verifiers",
    "episode",
    "none",
    "several",
]
MAX_REWARD = 1e9
"""The largest reward, positive or negative. Larger ones are mistakes, and their sums or squares would not be
finite."""
NAMES_ANSWER = "names_answer"
"""The figure of a reward that is 1 if the response names the reference answer, and otherwise 0."""
MAX_PARTS = 64
"""Figures that may come with one reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model sees next. `messages` are appended to all that it has seen and said; `tools` are those
    that it may call.

    `is_last`: `step` will end the trajectory whatever the answer is, so its engine slot is already free while
    `step` runs (else only with `rollout.hold_slots = false`). `fields`: values of declared fields
    (`task.fields`) for the answer that `step` was given, one per token.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    is_last: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """`reward` includes `turn_rewards`, which are kept for people to read. If it is a `Reward`, its parts are
    facts, too, and its fields those of the trajectory. `facts`: figures of this trajectory for the metrics.
    `fields`: as in `Turn`; for fields of a trajectory, its value."""

    reward: float
    turn_rewards: tuple[float, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said in a turn: `text`, without special tokens, and the `message` parsed from it
    (`content`, `reasoning_content`, `tool_calls`).

    `finish_reason`: "stop" or "length". `malformed`: why a tool call could not be parsed, or ""; then
    `message` has no tool calls. `tokens`: the sampled ids.
    """

    text: str
    message: Message
    finish_reason: str
    malformed: str = ""
    tokens: Sequence[int] = ()


class EpisodeFailed(Exception):
    """This trajectory has no reward: its group goes on without it, if at least two others have one.
    Metrics count failures by `kind`; `text` gives the details.

    Kinds: prompt, template, cut, engine, environment, agent, tool-timeout, tool-died, episode-timeout,
    reward, mixed, aborted.
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
        return End(reward=await self._rewards.score(self._item, answer.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Describes a task's reward; small and picklable.

    `dataset` and `params`: the dataset whose items are scored, and whose verifier may be used. `adapter`: how
    the answer is found in a response. `answer_key`: the column of the answer. Kinds: `agent`: `function`
    plays items and gives their rewards (tasks/players.py). `verifiers`: the verifiers environment `dataset`
    does, in the interpreter `python` ("": ours). `episode`: the environment gives the reward, and responses
    are not scored. `none`: 0, to which a reward model adds its score. `several`: the weighted sum of `parts`.
    `answer_format`: where `math-verify` looks for the answer.
    """

    kind: RewardKind
    dataset: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    adapter: Adapter = "plain"
    function: UserCode | None = None
    python: str = ""
    answer_format: AnswerFormat = "final"
    answer_key: str = "answer"
    parts: tuple[RewardPart, ...] = ()

    @property
    def plays(self) -> bool:
        """Whether the pool plays items instead of scoring responses."""
        return self.kind in ("agent", "verifiers")

    @property
    def functions(self) -> tuple[UserCode, ...]:
        """The user's functions that it calls."""
        functions = () if self.function is None else (self.function,)
        return (*functions, *(code for part in self.parts for code in part.spec.functions))

    @property
    def needs_answer(self) -> bool:
        """Whether every item must have an answer. Functions of the user's, reward models and teachers may do
        without."""
        if self.parts:
            return any(part.spec.needs_answer for part in self.parts)
        return self.function is None and self.kind not in ("episode", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One of several rewards. `name`: as `task.reward` names it."""

    name: str
    weight: float
    spec: RewardSpec


class Reward(float):
    """A reward with its parts: the several rewards of which it is the sum, unweighted, and other figures, by
    name; and `fields`: values of the trajectory's declared fields."""

    parts: Mapping[str, float]
    fields: Mapping[str, Any]

    def __new__(
        cls, value: float, parts: Mapping[str, float] | None = None, fields: Mapping[str, Any] | None = None
    ) -> Reward:
        made = super().__new__(cls, value)
        made.parts, made.fields = parts or {}, fields or {}
        return made


class NoReward:
    """TRL's None: the reward does not apply to the item. It is left out of a sum of several, but cannot be
    the only one."""

    def __repr__(self) -> str:
        return "None"


REWARD_PART = "reward/"
"""Prefix of the facts that are parts of a reward."""


def figures_of(reward: float) -> dict[str, float]:
    """The parts of a reward as facts of its trajectory, which become the metrics `reward/<part>/mean`;
    `my_rewards.score` is the part `my_rewards:score`."""
    parts = reward.parts.items() if isinstance(reward, Reward) else ()
    return {f"{REWARD_PART}{re.sub('[:/]', '.', name)}": part for name, part in parts}


def reward_parts(facts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The parts of a reward, unweighted, by name, from the facts of its trajectory."""
    return {name.removeprefix(REWARD_PART): part for name, part in facts if name.startswith(REWARD_PART)}
