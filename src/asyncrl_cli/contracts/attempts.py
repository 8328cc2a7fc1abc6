"""An attempt: one try at one prompt, from its start to its end.

        admit            finish            take             train
(new) -------> running -------> finished -------> training -------> trained
                  |                 |
                  +--> dropped <----+    for good: failed, stale, equal rewards
                  +--> requeued <---+    ends this attempt; the prompt starts again as a new one

While an attempt runs, each of its n responses is in a part or waits to be placed again. A part is a set of
responses of one attempt that were placed on one worker together. The attempt ends when every part has its
result and no response waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any, NamedTuple

from annotated_types import Len

from asyncrl_cli.base.safe_files import Count, Finite


class Stage(StrEnum):
    """The stage of an attempt."""

    RUNNING = "running"
    FINISHED = "finished"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"
    REQUEUED = "requeued"


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


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """Responses of one attempt that were placed on one worker together. `goes_on`: the kept tokens that they
    continue from, by index. `version`: the oldest version that their tokens may have, kept ones included.
    `result`: None until the part has ended."""

    key: PartKey
    indices: tuple[int, ...]
    worker: str
    version: int
    goes_on: Mapping[int, Kept] = field(default_factory=dict)
    result: PartResult | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """All that the loop knows about one try. Only the ledger changes its stage and its deadline.

    `requeues`: how often its prompt was requeued for staleness. `deadline`: the last version in which it may
    be trained. `parts`: by number; a part that was lost with its worker is removed. `unplaced`: indices of
    the responses that have to be placed: all at the start, later those of lost parts, and in a resumed run
    those that had not ended. `kept`: what unplaced responses continue from, by index; `so_far` is the handle
    of those tokens. `result` is set from the stage `finished` on. `columns`: handles of what scorers have
    computed for it since, by scorer (for `reward`, the scores themselves). Checkpoints hold neither columns
    nor the parts of a finished group.
    """

    prompt: Prompt
    number: int = 0
    requeues: int = 0
    stage: Stage = Stage.RUNNING
    deadline: int = -1
    parts: dict[int, Part] = field(default_factory=dict)
    unplaced: tuple[int, ...] = ()
    kept: dict[int, Kept] = field(default_factory=dict)
    so_far: Any = None
    result: GroupResult | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    key: AttemptKey = field(init=False)
    num_parts: int = 0

    def __post_init__(self) -> None:
        self.key = AttemptKey(self.prompt.uid, self.prompt.epoch, self.number)

    def place(
        self, num_responses: int, worker: str, version: int, *, free_slots: int, mixes: bool = True
    ) -> Part:
        """Make a part of the first unplaced responses. They continue from their kept tokens where
        `Kept.goes_on` allows it. The first `free_slots` of them start at once."""
        indices, self.unplaced = self.unplaced[:num_responses], self.unplaced[num_responses:]
        kept = {index: self.kept.pop(index) for index in indices if index in self.kept}
        start = indices[:free_slots]
        goes_on = {
            index: one
            for index, one in kept.items()
            if one.goes_on(version, mixes=mixes, at_once=index in start)
        }
        oldest = min([version, *(so_far.oldest for so_far in goes_on.values())])
        key = PartKey(self.key, self.num_parts)
        part = self.parts[key.number] = Part(
            key=key, indices=indices, worker=worker, version=oldest, goes_on=goes_on
        )
        self.num_parts += 1
        return part

    def lose(self, number: int) -> None:
        """The worker of a running part has died: its responses have to be placed again."""
        self.unplaced = tuple(sorted((*self.unplaced, *self.parts.pop(number).indices)))

    def running_parts(self) -> list[Part]:
        return [part for part in self.parts.values() if part.result is None]

    def ended_parts(self) -> list[PartResult]:
        return [part.result for part in self.parts.values() if part.result is not None]

    def ended_tokens(self) -> int:
        """The tokens of the group (before it has finished: of its ended parts), plus the tokens kept for
        unplaced responses."""
        ended = [self.result] if self.result is not None else self.ended_parts()
        return sum(part.response_tokens for part in ended) + sum(
            so_far.tokens for so_far in self.kept.values()
        )

    def next(self, *, requeues: int) -> Attempt:
        """The prompt's next try."""
        return Attempt(prompt=self.prompt, number=self.number + 1, requeues=requeues)

    def outcome(self) -> GroupResult:
        assert self.result is not None, f"{self.key} is {self.stage}"
        return self.result
