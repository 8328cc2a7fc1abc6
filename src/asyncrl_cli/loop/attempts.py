"""An attempt: one try at one prompt, from its start to its end.

        admit            finish            take             train
(new) -------> running -------> finished -------> training -------> trained
                  |                 |
                  +--> dropped <----+    for good: failed, stale
                  +--> requeued <---+    ends this attempt; the prompt starts again as the next one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from annotated_types import Len

from asyncrl_cli.safe_files import Count, Finite


class Stage(StrEnum):
    """Where an attempt is."""

    RUNNING = "running"
    FINISHED = "finished"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"
    REQUEUED = "requeued"


class AttemptKey(NamedTuple):
    """Names one try at one prompt of one epoch."""

    uid: str
    epoch: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.uid}@{self.epoch}.{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One dataset item. `item`: `prompt` (text), `answer`, `metadata` (any picklable values): what engine and verifier need."""

    uid: str
    epoch: int
    item: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryMeta:
    """What the driver knows of a trajectory: enough for advantages, balancing and every metric.

    A checkpoint has it as it is. `version_tokens` counts sampled tokens per version, ascending by version: `((3, 17), (4, 5))`.
    """

    prompt_tokens: Count
    response_tokens: Count
    reward: Finite
    finish_reason: str
    version_tokens: Annotated[tuple[tuple[Count, Count], ...], Len(1)]

    @property
    def oldest(self) -> int:
        return self.version_tokens[0][0]

    @property
    def newest(self) -> int:
        return self.version_tokens[-1][0]

    @property
    def span(self) -> int:
        return self.newest - self.oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """A finished group. Failed trajectories are not in `trajectories`; `failures` says why, one string each."""

    key: AttemptKey
    trajectories: tuple[TrajectoryMeta, ...]
    failures: tuple[str, ...]
    failed_tokens: int
    payload: Any

    @property
    def response_tokens(self) -> int:
        return sum(meta.response_tokens for meta in self.trajectories)


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """All that the loop knows of a try. The ledger alone moves it to another stage.

    `requeues`: how often staleness has sent its prompt back. `deadline`: the last version that it may be trained in. `worker`:
    where it was started. `result`: what came of it, from `finished` on.
    """

    prompt: Prompt
    number: int = 0
    requeues: int = 0
    stage: Stage = Stage.RUNNING
    deadline: int = -1
    worker: str = ""
    result: GroupResult | None = None
    key: AttemptKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = AttemptKey(self.prompt.uid, self.prompt.epoch, self.number)

    def next(self, *, requeues: int) -> Attempt:
        """The prompt's next try."""
        return Attempt(prompt=self.prompt, number=self.number + 1, requeues=requeues)

    def outcome(self) -> GroupResult:
        assert self.result is not None, f"{self.key} is {self.stage}"
        return self.result
