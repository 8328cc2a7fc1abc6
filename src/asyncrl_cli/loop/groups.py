"""Every group of the run, from its prompt to its train step: one method per transition, and each transition
is one event.

The only writer of `Admission` and its ledger. No I/O, no waiting.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.base.safe_files import Count
from asyncrl_cli.contracts.attempts import (
    Attempt,
    AttemptKey,
    GroupResult,
    Kept,
    Part,
    PartKey,
    PartResult,
    Stage,
)
from asyncrl_cli.contracts.ports import Feed, PartRequest
from asyncrl_cli.loop.admission import Admission
from asyncrl_cli.loop.filtering import REASON, FailuresLimit, GroupFilter
from asyncrl_cli.loop.fleet import Placement
from asyncrl_cli.loop.ledger import LedgerState
from asyncrl_cli.profile.arithmetic import LoopSettings, least_trajectories
from asyncrl_cli.profile.sharing import CRITIC, PROX, REWARD


class TryState(TypedDict):
    key: AttemptKey
    requeues: Count


class EndedState(TypedDict):
    """A part of a running group that has ended."""

    indices: tuple[Count, ...]
    version: Count
    result: PartResult


class RunningState(TryState):
    """A running group. `kept`: by index, the responses that continue from the tokens that they had.
    Checkpoints up to 2026-11 have none of the keys below: their groups start again."""

    deadline: NotRequired[Count]
    num_parts: NotRequired[Count]
    ended: NotRequired[list[EndedState]]
    kept: NotRequired[dict[int, Kept]]


FinishedState = TypedDict("FinishedState", {"deadline": Count, "try": TryState, "result": GroupResult})


class GroupsState(TypedDict):
    """The groups' part of a checkpoint. `again`: requeued, not yet started."""

    tokens_discarded: Count
    tokens_trained: Count
    ledger: LedgerState
    feed: dict[str, Any]
    running: list[RunningState]
    again: list[TryState]
    finished: list[FinishedState]
    failures: NotRequired[dict[str, Count]]


class Groups:
    def __init__(
        self, settings: LoopSettings, admission: Admission, feed: Feed, event: Callable[..., None]
    ) -> None:
        """`event(stage, key=key, **fields)` notifies the run's observers."""
        self.admission = admission
        self.ledger = admission.ledger
        self.filter = GroupFilter(settings)
        self._failures_limit = FailuresLimit(settings.profile.task.max_failed_ratio)
        self.tokens_discarded = 0
        self.tokens_trained = 0
        self.failures: Counter[str] = Counter()
        """Failed trajectories so far, by kind."""
        self.is_learning = False
        """A separate critic is still learning from the groups that were taken last. It scores no others until
        then."""
        self._profile, self._step_groups = settings.profile, settings.schedule.step_groups
        self._feed = feed
        self._event = event
        self._again: deque[Attempt] = deque()

    def start(self) -> list[tuple[str, PartRequest]]:
        """Admit the next prompt, or place again what was lost with a worker. Returns (worker, request) pairs,
        none if closed."""
        placement = self.admission.choose()
        if placement is None:
            return []
        attempt = self.admission.first_lost()
        told = {"workers": dict(placement.responses), "version": placement.version}
        if attempt is not None:
            parts = self._place_again(attempt, placement, told)
        else:
            attempt = self._again.popleft() if self._again else Attempt(prompt=self._feed.next())
            parts = self.admission.admit(attempt, placement)
            self._tell(attempt, **told)
        item, seed = attempt.prompt.item, self._seed(attempt.key)
        request = partial(PartRequest, item=item, seed=seed, so_far=attempt.so_far)
        return [
            (part.worker, request(key=part.key, indices=part.indices, goes_on=part.goes_on)) for part in parts
        ]

    def _place_again(self, attempt: Attempt, placement: Placement, told: Mapping[str, Any]) -> list[Part]:
        before = attempt.ended_tokens()
        parts = self.admission.place_again(attempt, placement)
        kept_tokens = sum(so_far.tokens for part in parts for so_far in part.goes_on.values())
        self.tokens_discarded += before - attempt.ended_tokens() - kept_tokens
        indices = sorted(index for part in parts for index in part.indices)
        self._event(
            "replaced",
            key=attempt.key,
            **told,
            indices=indices,
            **({"kept_tokens": kept_tokens} if kept_tokens else {}),
        )
        return parts

    def parts_ended(self, results: Sequence[PartResult]) -> bool:
        """Record a worker's results. Returns true if a group has ended with them. The tokens of groups that
        were given up in the meantime count as discarded. `check_limits` says whether too many have failed."""
        attempts = [attempt for result in results if (attempt := self._end_part(result)) is not None]
        whole = [
            attempt
            for attempt in dict.fromkeys(attempts)
            if not (attempt.unplaced or attempt.running_parts())
        ]
        for attempt in whole:
            self._end_running(attempt)
        return bool(whole)

    def check_limits(self) -> None:
        """Raises AsyncrlError if too many trajectories have failed or too many groups were left out. Call it
        when the results that have arrived are recorded, and not in between: a checkpoint must not hold a
        group that has ended and still runs."""
        self._failures_limit.check()
        self.filter.check()

    def _end_part(self, result: PartResult) -> Attempt | None:
        """Record one result. Returns its attempt; None if the attempt no longer has this part."""
        self.tokens_discarded += result.failed_tokens
        attempt = self.ledger.running.get(result.key.attempt)
        part = attempt.parts.get(result.key.number) if attempt is not None else None
        if part is None:
            self.tokens_discarded += result.response_tokens
            return None
        self.admission.end_part(part, result)
        return attempt

    def _end_running(self, attempt: Attempt) -> None:
        """The last part of a group has ended."""
        result = GroupResult.of(attempt.key, attempt.ended_parts())
        self.failures.update(failure.kind for failure in result.failures)
        self._failures_limit.count(result)
        too_few = len(result.trajectories) < least_trajectories(self._profile)
        is_rewarded = REWARD not in self.admission.scorers
        if (
            reason := "failed"
            if too_few
            else REASON
            if is_rewarded and self.filter.leaves_out(result)
            else ""
        ):
            self._drop(attempt, reason, result.response_tokens)
            return
        attempt.result = result
        self.admission.leave(attempt, Stage.FINISHED)
        self._tell(attempt)

    def _drop(self, attempt: Attempt, reason: str, tokens: int) -> None:
        """Drop a group that is not worth training."""
        self.tokens_discarded += tokens
        self._end(attempt, Stage.DROPPED, reason)

    def takeable(self, num_groups: int, *, unscored: bool = False) -> bool:
        """Whether `num_groups` can be taken now or, with `unscored`, could be if every finished group were
        scored."""
        enough = len(self.ledger.finished) >= num_groups
        return enough and len(self.admission.takeable(num_groups, unscored=unscored)) == num_groups

    def may_score(self, scorer: str) -> bool:
        """Whether that scorer has groups to score, and may do so: the critic may not while it learns."""
        return bool(self.unscored(scorer)) and not (scorer == CRITIC and self.is_learning)

    def unscored(self, scorer: str) -> list[Attempt]:
        """The finished groups without that scorer's column: first those that could be taken now, then the
        others, in finish order.

        `prox` scores with the weights that the window begins with, so only the groups that this window can
        still take count. The critic changes with every train step, so only the groups that the next step
        takes count.
        """
        if scorer in (PROX, CRITIC):
            most = self.admission.takes_left if scorer == PROX else self._step_groups
            could = self.admission.takeable(most, unscored=True)
            return [attempt for attempt in could if scorer not in attempt.columns]
        missing = [attempt for attempt in self.ledger.finished.values() if scorer not in attempt.columns]
        if len(missing) < 2:
            return missing
        first = dict.fromkeys(self.admission.takeable(len(self.ledger.finished), unscored=True))
        return sorted(missing, key=lambda attempt: attempt not in first)

    def scored(self, scorer: str, columns: Mapping[AttemptKey, Any]) -> None:
        """Record a scorer's columns, except for groups that were given up meanwhile. A group may be dropped
        for its new rewards."""
        for key, column in columns.items():
            if (attempt := self.ledger.finished.get(key)) is None:
                continue
            attempt.columns[scorer] = column
            self._event("scored", key=key, scorer=scorer)
            if scorer == REWARD and self.filter.leaves_out(result := self._rewarded(attempt)):
                self._drop(attempt, REASON, result.response_tokens)

    def columns_lost(self, scorer: str) -> None:
        """Discard a scorer's columns of the groups that wait to be taken."""
        for attempt in self.ledger.finished.values():
            attempt.columns.pop(scorer, None)

    def columns(self) -> dict[AttemptKey, Mapping[str, Any]]:
        """What scorers have computed for the sampled tokens of the groups in training, by scorer."""
        names = [name for name in self.admission.scorers if name != REWARD]
        return {
            key: {name: attempt.columns[name] for name in names}
            for key, attempt in self.ledger.training.items()
        }

    def _rewarded(self, attempt: Attempt) -> GroupResult:
        """The group, with the reward model's scores (if there is one) added to its rewards."""
        result, weight = attempt.outcome(), self._profile.reward_model.weight
        scores = attempt.columns.get(REWARD, (None,) * len(result.trajectories))
        trajectories = tuple(
            meta if score is None else meta.judged(score, weight)
            for meta, score in zip(result.trajectories, scores, strict=True)
        )
        return replace(result, trajectories=trajectories)

    def take(self, num_groups: int) -> tuple[GroupResult, ...]:
        attempts = self.admission.takeable(num_groups)
        assert len(attempts) == num_groups
        for attempt in attempts:
            self.admission.take(attempt)
            self._tell(attempt)
        self.columns_lost(CRITIC)  # the next train step has a newer critic
        self.is_learning = CRITIC in self.admission.scorers
        return tuple(self._rewarded(attempt) for attempt in attempts)

    def trained(self) -> None:
        """The train step that took the last groups has ended."""
        for attempt in list(self.ledger.training.values()):
            tokens = attempt.outcome().response_tokens
            self.tokens_trained += tokens
            self.ledger.move(attempt, Stage.TRAINED)
            self._tell(attempt, tokens=tokens)

    def publish(self) -> list[tuple[str, AttemptKey]]:
        """Raise the version, and give up groups past their deadline if `on_stale` says so. Returns (worker,
        group) to abort."""
        late, training = self.admission.publish(), self._profile.async_training
        self.columns_lost(PROX)  # the next window begins with newer weights
        if training.on_stale not in ("drop", "requeue"):
            return []
        aborts = dict.fromkeys(
            (part.worker, attempt.key) for attempt in late for part in attempt.running_parts()
        )
        exhausted = [attempt for attempt in late if attempt.requeues >= training.max_requeues]
        for attempt in late:
            self._give_up(attempt)
        if exhausted and (training.on_stale, training.on_exhausted) == ("requeue", "fail"):
            raise AsyncrlError(
                f"prompt {exhausted[0].prompt.uid} was requeued {training.max_requeues} times for staleness "
                "and was stale again",
                hint='raise async_training.max_staleness, or set async_training.on_exhausted = "drop"',
            )
        return list(aborts)

    def state(self, kept: Mapping[PartKey, Mapping[int, Kept]]) -> GroupsState:
        """Everything as JSON, except payloads, the prompts' items and what follows from the run's step.
        `kept`: what the running parts had a moment ago."""
        return {
            "tokens_discarded": self.tokens_discarded,
            "tokens_trained": self.tokens_trained,
            "ledger": self.ledger.state(),
            "feed": self._feed.state(),
            "running": [_encode_running(attempt, kept) for attempt in self.ledger.running.values()],
            "again": [_encode(attempt) for attempt in self._again],
            "finished": [_encode_finished(attempt) for attempt in self.ledger.finished.values()],
            "failures": dict(self.failures),
        }

    def payloads(self) -> tuple[tuple[Any, ...], ...]:
        """The handles of all arrays held here, in the order of `state`: each finished group's parts, then
        each ended part."""
        finished = [attempt.outcome().payload for attempt in self.ledger.finished.values()]
        ended = [
            (part.payload,) for attempt in self.ledger.running.values() for part in attempt.ended_parts()
        ]
        return (*finished, *ended)

    def restore(self, state: GroupsState, payloads: Iterable[tuple[Any, ...]], lost_tokens: int) -> None:
        """Continue from `state`. What ran at the cut is placed again, as if all workers had been lost.
        Responses continue from their kept tokens; `lost_tokens` count as discarded. `payloads`: those of
        `Groups.payloads`, then those of kept groups."""
        self.tokens_discarded = state["tokens_discarded"] + lost_tokens
        self.tokens_trained = state["tokens_trained"]
        self.failures = Counter(state.get("failures", {}))
        self._feed.restore(state["feed"])
        handles = iter(payloads)
        finished = [self._decode(entry["try"]) for entry in state["finished"]]
        for attempt, entry in zip(finished, state["finished"], strict=True):
            attempt.stage, attempt.deadline = Stage.FINISHED, entry["deadline"]
            attempt.result = replace(entry["result"], payload=next(handles))
        running = [self._decode_running(entry, handles) for entry in state["running"]]
        for attempt in running:
            (attempt.so_far,) = next(handles) if attempt.kept else (None,)
        self.ledger.restore(state["ledger"], [*running, *finished])
        self.admission.note_unplaced()
        self._again.extend(self._decode(entry) for entry in state["again"])

    def forget_unfinished(self) -> None:
        """After `restore`: the kept responses that had not ended start again."""
        for attempt in self.ledger.running.values():
            whole = {index: kept for index, kept in attempt.kept.items() if kept.is_whole}
            self.tokens_discarded += sum(
                kept.tokens for index, kept in attempt.kept.items() if index not in whole
            )
            attempt.kept = whole

    def arrays_lost(self, worker: str) -> None:
        """The worker's node is gone, and with it the arrays of parts that had ended there. Their responses
        are generated again."""
        for attempt in [*self.ledger.finished.values()]:
            if any(part.worker == worker for part in attempt.parts.values()):
                self.tokens_discarded += attempt.ended_tokens()
                self._end(attempt, Stage.REQUEUED, "arrays lost")
                self._again.append(attempt.next(requeues=attempt.requeues))
        for attempt in self.ledger.running.values():
            for part in [*attempt.parts.values()]:
                if part.worker == worker and part.result is not None:
                    self.tokens_discarded += part.result.response_tokens
                    attempt.lose(part.key.number)
        self.admission.note_unplaced()

    def _give_up(self, attempt: Attempt) -> None:
        """A group has passed its deadline: requeue its prompt, or drop it for good.

        A prompt that fails the run is requeued as well: the failed run's last checkpoint must not hold a late
        group.
        """
        training = self._profile.async_training
        self.tokens_discarded += attempt.ended_tokens()
        if training.on_stale == "drop":
            self._end(attempt, Stage.DROPPED, "stale")
        elif attempt.requeues >= training.max_requeues and training.on_exhausted == "drop":
            self._end(attempt, Stage.DROPPED, "requeued too often")
        else:
            self._end(attempt, Stage.REQUEUED, "stale")
            self._again.append(attempt.next(requeues=attempt.requeues + 1))

    def _end(self, attempt: Attempt, stage: Stage, reason: str) -> None:
        self.admission.leave(attempt, stage, reason)
        self._tell(attempt, reason=reason)

    def _tell(self, attempt: Attempt, **fields: Any) -> None:
        """Notify the observers that the attempt has entered another stage."""
        self._event(attempt.stage.value, key=attempt.key, **fields)

    def _seed(self, key: AttemptKey) -> int:
        digest = hashlib.blake2b(f"{self._profile.run.seed}/{key}".encode(), digest_size=4).digest()
        return int.from_bytes(digest) >> 1

    def _decode_running(self, state: RunningState, handles: Iterator[tuple[Any, ...]]) -> Attempt:
        attempt = self._decode(state)
        attempt.deadline = state.get("deadline", self.admission.deadline_from(self.admission.version))
        for entry in state.get("ended", ()):
            (payload,), key = next(handles), entry["result"].key
            result = replace(entry["result"], payload=payload)
            attempt.parts[key.number] = Part(
                key=key, indices=entry["indices"], worker="", version=entry["version"], result=result
            )
        attempt.num_parts, attempt.kept = state.get("num_parts", 0), dict(state.get("kept", {}))
        ended = {index for part in attempt.parts.values() for index in part.indices}
        attempt.unplaced = tuple(index for index in range(self._profile.rollout.n) if index not in ended)
        return attempt

    def _decode(self, state: TryState) -> Attempt:
        key = state["key"]
        return Attempt(
            prompt=self._feed.find(key.uid, key.epoch), number=key.attempt, requeues=state["requeues"]
        )


def _encode(attempt: Attempt) -> TryState:
    return {"key": attempt.key, "requeues": attempt.requeues}


def _encode_running(attempt: Attempt, kept: Mapping[PartKey, Mapping[int, Kept]]) -> RunningState:
    """`kept` has what running parts had; a part that began later has nothing yet."""
    running = [kept.get(part.key, {}) for part in attempt.running_parts()]
    ended: list[Any] = [
        {
            "indices": part.indices,
            "version": part.version,
            "result": asdict(replace(part.result, payload=None)),
        }
        for part in attempt.parts.values()
        if part.result is not None
    ]
    return {
        **_encode(attempt),
        "deadline": attempt.deadline,
        "num_parts": attempt.num_parts,
        "ended": ended,
        "kept": dict(sorted(chain(attempt.kept.items(), *(part.items() for part in running)))),
    }


def _encode_finished(attempt: Attempt) -> FinishedState:
    result: Any = asdict(replace(attempt.outcome(), payload=None))
    return {"deadline": attempt.deadline, "try": _encode(attempt), "result": result}
