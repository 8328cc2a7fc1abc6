"""The description of a task's reward, which every process can read; `scoring.build_reward` makes a scorer
from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl_cli.base.named_code import UserCode

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
        """Whether every item must have an answer. A function of the user's may do without."""
        if self.parts:
            return any(part.spec.needs_answer for part in self.parts)
        return self.function is None and self.kind != "episode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One of several rewards. `name`: as `task.reward` names it."""

    name: str
    weight: float
    spec: RewardSpec


class Reward(float):
    """A reward with its parts: the several rewards of which it is the sum, unweighted, and other figures, by
    name."""

    parts: Mapping[str, float]

    def __new__(cls, value: float, parts: Mapping[str, float] | None = None) -> Reward:
        made = super().__new__(cls, value)
        made.parts = parts or {}
        return made


class NoReward:
    """TRL's None: the reward does not apply to the item. It is left out of a sum of several, but cannot be
    the only one."""

    def __repr__(self) -> str:
        return "None"


def figures_of(reward: float) -> dict[str, float]:
    """The parts of a reward as facts of its trajectory, which become the metrics `reward/<part>/mean`;
    `my_rewards.score` is the part `my_rewards:score`."""
    parts = reward.parts.items() if isinstance(reward, Reward) else ()
    return {f"reward/{re.sub('[:/]', '.', name)}": part for name, part in parts}
