"""A prompt group on its way from the feed to the trainer: the n responses to one prompt, trained together.

    Prompt ─> PartRequest ─> (a worker generates and rewards) ─> PartResult ─> GroupResult ─> TrainBatch
              one per worker that gets some of the responses     their parts end to end       │
                                                                               TrainReport <──┘

Worked example, with n = 3 and two workers that have room:

    Prompt(uid="9f3c", epoch=0, item={"prompt": "1+1=", "answer": "2", ...})
    PartRequest(key=9f3c@0.0/0, indices=(0, 1), seed=77, item=...)      to rollout-0
    PartRequest(key=9f3c@0.0/1, indices=(2,), seed=77, item=...)        to rollout-1
    PartResult(key=9f3c@0.0/0, trajectories=(a, b), payload="9f3c@0.0/0")  from rollout-0
    PartResult(key=9f3c@0.0/1, failures=(reward: it raised,), ...)      from rollout-1; response 2 failed
    GroupResult(key=9f3c@0.0, trajectories=(a, b), payload=("9f3c@0.0/0", "9f3c@0.0/1"))
    TrainBatch(step=41, window=10, step_in_window=0, groups=(...), columns=("ref",))
    TrainReport(train_s=3.2, tokens=81920, metrics={"loss/policy": Ratio(12.5, 81920), ...})

Train steps count from 1. If K = 4 of them make a window, this is the first one of window 10, which begins
when version 10 is gathered and ends when version 11 is.

The arrays (`data.trajectories`) are in a store (data/store.py) under these keys: the loop passes keys on,
clears them, and never sees the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any, NamedTuple, TypeAlias

from annotated_types import Len

from asyncrl_cli.base.safe_files import Count, Finite
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.measure.values import Value

Handle: TypeAlias = Any
"""What a transport or a store has made (on Ray, an ObjectRef). Only those who made it open it."""
DataKey: TypeAlias = str
"""Names data in the store: `<attempt>/<part's number>`, or another name after the attempt's."""
VersionTokens = Annotated[tuple[tuple[Count, Count], ...], Len(1)]
"""Sampled tokens per version, ascending by version: `((3, 17), (4, 5))`."""


class AttemptKey(NamedTuple):
    """Names one attempt at one prompt of one epoch. A prompt that is requeued has several."""

    uid: str
    epoch: Count
    attempt: Count

    def __str__(self) -> str:
        return f"{self.uid}@{self.epoch}.{self.attempt}"


def attempt_of(key: DataKey) -> AttemptKey:
    """The attempt that the data belongs to."""
    uid, _, numbers = key.rpartition("/")[0].rpartition("@")
    epoch, _, attempt = numbers.partition(".")
    return AttemptKey(uid, int(epoch), int(attempt))


class PartKey(NamedTuple):
    """Names a part: its attempt, and its number in the order in which the attempt's parts were placed.
    Numbers are never reused."""

    attempt: AttemptKey
    number: Count

    def __str__(self) -> str:
        return f"{self.attempt}/{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One dataset item, as the feed gives it."""

    uid: str
    epoch: int
    item: Item


class VersionPlan(NamedTuple):
    """In a deterministic run: which version samples each token of a response. `first` samples its first
    `stretch_tokens` tokens, the next version as many again, and so on; `last` samples all that remain.

    VersionPlan(first=3, last=4, stretch_tokens=48): tokens 0 to 47 have version 3, all later ones version 4.
    """

    first: Count
    last: Count
    stretch_tokens: Count

    def at(self, position: int) -> int:
        """The version that samples the token at this position."""
        return min(self.first + position // self.stretch_tokens, self.last)

    def left(self, position: int) -> int | None:
        """How many tokens the stretch has from this position on; None if it does not end."""
        is_last = self.at(position) == self.last
        return None if is_last else self.stretch_tokens - position % self.stretch_tokens


class PartialResponse(NamedTuple):
    """What a checkpoint, or a worker that was recalled, has of a response of a running group. Another worker
    continues the response or, if `is_whole`, only computes its reward."""

    version_tokens: VersionTokens
    is_whole: bool = False

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.version_tokens)

    @property
    def oldest(self) -> int:
        return self.version_tokens[0][0]

    @property
    def newest(self) -> int:
        return self.version_tokens[-1][0]

    def cut(self, versions: VersionPlan) -> PartialResponse | None:
        """What a deterministic run continues from: the stretches that are whole. (At a load, the cache is
        rebuilt, and in a stretch it is not.)"""
        if self.is_whole:
            return self
        kept = tuple(one for one in self.version_tokens if one[0] < versions.at(self.tokens))
        return PartialResponse(kept) if kept else None

    def may_continue(self, version: int, *, mixes: bool, at_once: bool) -> bool:
        """Whether it may continue with weights of `version`. `mixes`: a response may have tokens of several
        versions. `at_once`: it gets a slot now. If it had to queue, a load could come first, because a drain
        does not wait for queued responses."""
        return self.is_whole or mixes or (at_once and self.oldest == self.version_tokens[-1][0] == version)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequest:
    """Generate and reward some responses of a group. `indices` are their places in the group, ascending.

    `seed` is the group's: response i uses the i-th number that it yields, so its sampling does not depend on
    where it runs. `partial`: what responses continue from that were begun elsewhere, by index;
    `partial_tokens`: the keys of those tokens. `versions`: in a deterministic run, which version samples
    which token.
    """

    key: PartKey
    item: Item
    indices: tuple[int, ...]
    seed: int
    partial: Mapping[int, PartialResponse] = field(default_factory=dict)
    partial_tokens: Mapping[int, DataKey] = field(default_factory=dict)
    versions: VersionPlan | None = None


MIXED = "mixed"
"""The kind of failure of a trajectory that several versions sampled (`async_training.mixed_versions`). It was
left out, or sampled again."""


class TrajectoryFailure(NamedTuple):
    """Why a trajectory has no reward: a `kind`, which metrics count (`contracts.environment.EpisodeFailed`),
    and a text for people."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryMeta:
    """What the driver knows of a trajectory: enough to plan a train step (`Trainer.train`), and for every
    metric.

    Checkpoints hold it unchanged. `model_score`: the reward model's score, if there is one; `reward` includes
    it times its weight; not in checkpoints. `num_turns`: answers of the model; `num_forks`: contexts that the
    chat template rewrote; `tool_s`: time spent waiting for the environment between turns; `facts`: the
    environment's own figures.
    """

    prompt_tokens: Count
    response_tokens: Count
    reward: Finite
    finish_reason: str
    version_tokens: VersionTokens
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
    """What became of a set of responses. A failed one is not in `trajectories`; `failures` has its reason,
    and those of tries that were sampled again.

    Checkpoints hold it unchanged, except for the keys (`payload`): a resumed run has its data under others.
    """

    trajectories: tuple[TrajectoryMeta, ...]
    failures: tuple[TrajectoryFailure, ...]
    failed_tokens: Count

    @property
    def response_tokens(self) -> int:
        return sum(meta.response_tokens for meta in self.trajectories)

    @property
    def shared_tokens(self) -> int:
        """An estimate of the tokens that all its trajectories begin with: the prompt, if none has tools."""
        return min((meta.prompt_tokens for meta in self.trajectories), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult(_Result):
    """What a worker returns for a part. `payload`: the key of its data, even if all responses failed;
    None if a checkpoint left it out."""

    key: PartKey
    payload: DataKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult(_Result):
    """A finished group: the results of its parts, end to end. `payload`: their keys, in the same order."""

    key: AttemptKey
    payload: tuple[DataKey, ...] | None = None

    @classmethod
    def of(cls, key: AttemptKey, parts: Sequence[PartResult]) -> GroupResult:
        return cls(
            key=key,
            trajectories=tuple(chain.from_iterable([part.trajectories for part in parts])),
            failures=tuple(chain.from_iterable([part.failures for part in parts])),
            failed_tokens=sum([part.failed_tokens for part in parts]),
            payload=tuple([part.payload for part in parts if part.payload is not None]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The R groups of one train step, in finish order. `window` is the number of the window that trains them.
    `columns`: the scorers whose columns the store has for every group (the trainer computes the others)."""

    step: int
    window: int
    step_in_window: int
    groups: tuple[GroupResult, ...]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What a train step reports. Seconds are the trainer's, or one rank's: `train_s`, and `column_s` for the
    columns that were computed before training, by name (`old_logprob`, `ref`, ...). `tokens` (sampled
    tokens trained, including those of skipped steps) and `metrics` cover all ranks; `metrics` are typed and
    finite, and go into the step's line unchanged.

    `skipped_steps`: how many of its optimizer steps were skipped because the gradient was not finite; metrics
    that this spoils are absent. `skipped_in_a_row`: how many of the run's latest optimizer steps were skipped
    without a break, across train steps."""

    train_s: float
    tokens: int
    metrics: Mapping[str, Value]
    column_s: Mapping[str, float] = field(default_factory=dict)
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
