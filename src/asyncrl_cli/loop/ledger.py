"""The ledger of all attempts of a run. An attempt is one try at one prompt, from its start to its end.

        admit            finish            take             train
(new) -------> running -------> finished -------> training -------> trained
                  |                 |
                  +--> dropped <----+    for good: failed, stale, equal rewards
                  +--> requeued <---+    ends this attempt; the prompt starts again as a new one

While an attempt runs, each of its n responses is in a part or waits to be placed again. A part is a set of
responses of one attempt that were placed on one worker together. The attempt ends when every part has its
result and no response waits.

Every attempt is in exactly one stage, and nothing is ever lost: at every transition `admitted_total` equals
the sum over the six stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.safe_files import Count
from asyncrl_cli.contracts.prompt_group import (
    AttemptKey,
    DataKey,
    GroupResult,
    PartialResponse,
    PartKey,
    PartResult,
    Prompt,
    VersionPlan,
)


class Stage(StrEnum):
    """The stage of an attempt."""

    RUNNING = "running"
    FINISHED = "finished"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"
    REQUEUED = "requeued"


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """Responses of one attempt that were placed on one worker together. `partial`: the kept tokens that they
    continue from, by index. `version`: the oldest version that their tokens may have, kept ones included.
    `result`: None until the part has ended."""

    key: PartKey
    indices: tuple[int, ...]
    worker: str
    version: int
    partial: Mapping[int, PartialResponse] = field(default_factory=dict)
    result: PartResult | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """All that the loop knows about one try. Only the ledger changes its stage and its deadline.

    `requeues`: how often its prompt was requeued for staleness. `deadline`: the last version in which it may
    be trained. `parts`: by number; a part that was lost with its worker is removed. `unplaced`: indices of
    the responses that have to be placed: all at the start, later those of lost parts, and in a resumed run
    those that had not ended. `partial`: what unplaced responses continue from, by index; `partial_tokens`:
    the keys of those tokens, kept until the group has finished. `result` is set from the stage `finished` on.
    `columns`: by scorer that has scored it since, what it returned (`Scorer.score`). Checkpoints hold neither
    columns nor the parts of a finished group. `position` and `versions`: in a deterministic run
    (logical_order.py), its place among the run's trained groups, and which version samples which token of its
    responses.
    """

    prompt: Prompt
    number: int = 0
    requeues: int = 0
    stage: Stage = Stage.RUNNING
    deadline: int = -1
    parts: dict[int, Part] = field(default_factory=dict)
    unplaced: tuple[int, ...] = ()
    partial: dict[int, PartialResponse] = field(default_factory=dict)
    partial_tokens: dict[int, DataKey] = field(default_factory=dict)
    result: GroupResult | None = None
    columns: dict[str, tuple[float, ...]] = field(default_factory=dict)
    position: int = -1
    versions: VersionPlan | None = None
    key: AttemptKey = field(init=False)
    num_parts: int = 0

    def __post_init__(self) -> None:
        self.key = AttemptKey(self.prompt.uid, self.prompt.epoch, self.number)

    def place(
        self, num_responses: int, worker: str, version: int, *, free_slots: int, mixes: bool = True
    ) -> Part:
        """Make a part of the first unplaced responses. They continue from their kept tokens where
        `PartialResponse.may_continue` allows it. The first `free_slots` of them start at once."""
        indices, self.unplaced = self.unplaced[:num_responses], self.unplaced[num_responses:]
        start, partial = indices[:free_slots], dict[int, PartialResponse]()
        for index in indices:
            response = self.partial.pop(index, None)
            if response and response.may_continue(version, mixes=mixes, at_once=index in start):
                partial[index] = response
        version = min([version, *(response.oldest for response in partial.values())])
        key = PartKey(self.key, self.num_parts)
        part = Part(key=key, indices=indices, worker=worker, version=version, partial=partial)
        self.parts[key.number] = part
        self.num_parts += 1
        return part

    def lose(self, number: int) -> None:
        """The worker of a running part has died: its responses have to be placed again."""
        part = self.parts.pop(number)
        self.unplaced = tuple(sorted((*self.unplaced, *part.indices)))
        if self.versions is not None:  # the versions that sampled these tokens may be gone
            self.partial.update(part.partial)

    @property
    def least_version(self) -> int:
        """The oldest weights on which the kept tokens of unplaced responses continue: versions only rise."""
        return max([response.newest for response in self.partial.values()], default=-1)

    def running_parts(self) -> list[Part]:
        return [part for part in self.parts.values() if part.result is None]

    def ended_parts(self) -> list[PartResult]:
        return [part.result for part in self.parts.values() if part.result is not None]

    def joined(self) -> GroupResult:
        """What all its parts have made, end to end: in a deterministic run, where each has one response, in
        the order of the responses."""
        parts = [*self.parts.values()]
        if self.versions is not None:
            parts.sort(key=lambda part: part.indices)
        return GroupResult.of(self.key, [part.result for part in parts if part.result is not None])

    def ended_tokens(self) -> int:
        """The tokens of the group (before it has finished: of its ended parts), plus the tokens kept for
        unplaced responses."""
        ended = [self.result] if self.result is not None else self.ended_parts()
        kept_tokens = sum(response.tokens for response in self.partial.values())
        return sum(part.response_tokens for part in ended) + kept_tokens

    def data_keys(self) -> list[DataKey]:
        """The keys of all its data."""
        ended = [part.payload for part in self.ended_parts()]
        payload = self.result.payload if self.result is not None else None
        partial = dict.fromkeys(self.partial_tokens.values())
        return [key for key in (*ended, *(payload or ()), *partial) if key is not None]

    def outcome(self) -> GroupResult:
        assert self.result is not None, f"{self.key} is {self.stage}"
        return self.result


_ALLOWED = {
    Stage.RUNNING: {Stage.FINISHED, Stage.DROPPED, Stage.REQUEUED},
    Stage.FINISHED: {Stage.TRAINING, Stage.DROPPED, Stage.REQUEUED},
    Stage.TRAINING: {Stage.TRAINED},
}


class LedgerState(TypedDict):
    """The ledger's part of a checkpoint. Live attempts are stored with their groups (`GroupsState`)."""

    admitted_total: Count
    ended: dict[Stage, Count]
    reasons: dict[str, Count]


class Ledger:
    """Live attempts by stage, in order of arrival. Ended attempts are kept as totals only, with reasons for
    the untrained ones."""

    def __init__(self) -> None:
        self.admitted_total = 0
        self.reasons: Counter[str] = Counter()
        self.ended: Counter[Stage] = Counter()
        self.running: dict[AttemptKey, Attempt] = {}
        self.finished: dict[AttemptKey, Attempt] = {}
        self.training: dict[AttemptKey, Attempt] = {}
        self.deadlines: Counter[int] = Counter()
        """The number of untaken attempts per deadline."""
        self._live = {
            Stage.RUNNING: self.running,
            Stage.FINISHED: self.finished,
            Stage.TRAINING: self.training,
        }

    def admit(self, attempt: Attempt) -> None:
        assert not any(attempt.key in attempts for attempts in self._live.values()), (
            f"{attempt.key} was admitted twice"
        )
        self.admitted_total += 1
        self._enter(attempt, Stage.RUNNING)
        self.check()

    def move(self, attempt: Attempt, to: Stage, reason: str = "") -> None:
        """Move one live attempt to another stage; `reason` says why one is dropped or requeued."""
        assert to in _ALLOWED.get(attempt.stage, ()), f"{attempt.key} cannot go from {attempt.stage} to {to}"
        del self._live[attempt.stage][attempt.key]
        if attempt.stage is not Stage.TRAINING and to is not Stage.FINISHED:
            self._count_deadline(attempt, -1)
        attempt.stage = to
        if to in self._live:
            self._live[to][attempt.key] = attempt
        else:
            self.ended[to] += 1
        if reason:
            self.reasons[f"{to}: {reason}"] += 1
        self.check()

    def set_deadline(self, attempt: Attempt, deadline: int) -> None:
        """Raise the deadline of a running attempt, whose responses with the oldest weights were lost."""
        assert deadline >= attempt.deadline, (
            f"{attempt.key}: the deadline {attempt.deadline} cannot fall to {deadline}"
        )
        self._count_deadline(attempt, -1)
        attempt.deadline = deadline
        self._count_deadline(attempt, +1)

    def totals(self) -> dict[str, int]:
        """`admitted_total` and the six stages, under their metric names."""
        live = {stage: len(attempts) for stage, attempts in self._live.items()}
        return {"admitted_total": self.admitted_total} | {
            stage.value: live.get(stage, 0) + self.ended[stage] for stage in Stage
        }

    def check(self) -> None:
        counted = sum(map(len, self._live.values())) + self.ended.total()
        assert self.admitted_total == counted, f"admitted {self.admitted_total}, accounted for {counted}"

    def state(self) -> LedgerState:
        return {
            "admitted_total": self.admitted_total,
            "ended": dict(self.ended),
            "reasons": dict(self.reasons),
        }

    def restore(self, state: LedgerState, live: Iterable[Attempt]) -> None:
        """`live`: the attempts that had not ended, each in its stage."""
        self.admitted_total = state["admitted_total"]
        self.ended, self.reasons = Counter(state["ended"]), Counter(state["reasons"])
        for attempt in live:
            self._enter(attempt, attempt.stage)
        self.check()

    def _enter(self, attempt: Attempt, stage: Stage) -> None:
        """Add a live attempt that is new to the ledger."""
        attempt.stage = stage
        self._live[stage][attempt.key] = attempt
        self._count_deadline(attempt, +1)

    def _count_deadline(self, attempt: Attempt, change: int) -> None:
        self.deadlines[attempt.deadline] += change
        if not self.deadlines[attempt.deadline]:
            del self.deadlines[attempt.deadline]
