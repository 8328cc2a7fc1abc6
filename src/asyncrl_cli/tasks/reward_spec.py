"""The description of a task's reward, which every process can read; `scoring.build_scorer` makes a scorer from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl_cli.tasks.user_code import UserCode

Adapter = Literal["plain", "worked"]
AnswerFormat = Literal["final", "anywhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Describes a task's reward; small and picklable.

    `dataset` and `params`: the dataset whose items are scored, and whose verifier may be used. `adapter`: how the answer is found
    in a response. Kinds: `agent`: `function` plays items and gives their rewards (agents.py). `verifiers`: the verifiers
    environment `dataset` does, in the interpreter `python` ("": ours). `episode`: the environment gives the reward, and responses
    are not scored. `none`: 0, to which a reward model adds its score. `answer_format`: where `math-verify` looks for the answer.
    """

    kind: Literal["dataset", "exact-match", "math-verify", "function", "agent", "verifiers", "episode", "none"]
    dataset: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    adapter: Adapter = "plain"
    function: UserCode | None = None
    python: str = ""
    answer_format: AnswerFormat = "final"

    @property
    def plays(self) -> bool:
        """Whether the pool plays items instead of scoring responses."""
        return self.kind in ("agent", "verifiers")
