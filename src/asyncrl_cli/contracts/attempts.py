"""A prompt group on its way through the run: what is known of its responses. (loop/attempts.py has the attempt
itself.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any, NamedTuple

from annotated_types import Len

from asyncrl_cli.base.safe_files import Count, Finite


class AttemptKey(NamedTuple):
    """Names one try at one prompt of one epoch."""

    uid: str
    epoch: Count
    attempt: Count

    def __str__(self) -> str:
        return f"{self.uid}@{self.epoch}.{self.attempt}"


class PartKey(NamedTuple):
    """Names a part: its attempt, and its number in the order in which the attempt's parts were placed.
    Numbers are never reused."""

    attempt: AttemptKey
    number: Count

    def __str__(self) -> str:
        return f"{self.attempt}/{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One dataset item. `item`: `prompt` (text), `answer`, `metadata` (any picklable values): what engine and
    verifier need."""

    uid: str
    epoch: int
    item: Mapping[str, Any]


class Kept(NamedTuple):
    """A response of a running group in a checkpoint: sampled tokens per version, ascending by version. A
    resumed run continues the response or, if `is_whole`, only computes its reward."""

    version_tokens: Annotated[tuple[tuple[Count, Count], ...], Len(1)]
    is_whole: bool = False

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.version_tokens)

    @property
    def oldest(self) -> int:
        return self.version_tokens[0][0]

    def goes_on(self, version: int, *, mixes: bool, at_once: bool) -> bool:
        """Whether it may continue with weights of `version`. `mixes`: a response may have tokens of several
        versions. `at_once`: it gets a slot now. A load could overtake it in a queue, because a drain waits
        only for running responses."""
        return self.is_whole or mixes or (at_once and self.version_tokens[-1][0] == version)


class Failure(NamedTuple):
    """Why a trajectory has no reward: a `kind`, which metrics count (`envs.port.EpisodeFailed`), and a text
    for people."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryMeta:
    """What the driver knows of a trajectory: enough for advantages, balancing and every metric.

    Checkpoints hold it unchanged. `version_tokens` counts sampled tokens per version, ascending by version:
    `((3, 17), (4, 5))`. `model_score`: the reward model's score, if there is one; `reward` includes it times
    its weight; not in checkpoints. `num_turns`: answers of the model; `num_forks`: contexts that the chat
    template rewrote; `tool_s`: time spent waiting for the environment between turns; `facts`: the
    environment's own figures.
    """

    prompt_tokens: Count
    response_tokens: Count
    reward: Finite
    finish_reason: str
    version_tokens: Annotated[tuple[tuple[Count, Count], ...], Len(1)]
    num_turns: Count = 1
    num_forks: Count = 0
    tool_s: Finite = 0.0
    facts: tuple[tuple[str, Finite], ...] = ()
    model_score: Finite | None = None

    def judged(self, score: float, weight: float) -> TrajectoryMeta:
        """A copy with a reward model's score added to its reward."""
        return replace(self, reward=self.reward + weight * score, model_score=score)

    @property
    def is_truncated(self) -> bool:
        """Whether it ended at a limit of tokens or turns."""
        return self.finish_reason in ("length", "max_turns")

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
class _Result:
    """What became of a set of responses. A failed one is not in `trajectories`; `failures` has its reason.

    Checkpoints hold it unchanged, except for the payload, which they store separately.
    """

    trajectories: tuple[TrajectoryMeta, ...]
    failures: tuple[Failure, ...]
    failed_tokens: Count
    payload: Any = None

    @property
    def response_tokens(self) -> int:
        return sum(meta.response_tokens for meta in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult(_Result):
    """What a worker returns for a part."""

    key: PartKey


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult(_Result):
    """A finished group: the results of its parts, end to end. `payload` is a tuple of the parts' payloads, in
    the same order."""

    key: AttemptKey

    @classmethod
    def of(cls, key: AttemptKey, parts: Sequence[PartResult]) -> GroupResult:
        return cls(
            key=key,
            trajectories=tuple(chain.from_iterable([part.trajectories for part in parts])),
            failures=tuple(chain.from_iterable([part.failures for part in parts])),
            failed_tokens=sum([part.failed_tokens for part in parts]),
            payload=tuple([part.payload for part in parts]),
        )
