"""Every group of the run, from its prompt to its train step: one method per transition, and each transition
is one event. The only writer of `Admission` and its ledger. No I/O, no waiting.

Also which finished groups are not worth training, and when there are so many of them that the run should end.
DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): groups whose trajectories all have the same reward
are not trained. Their advantages would be 0 under every estimator that compares a response with its group.
Such a group is dropped when it finishes, which frees its place in the window: another prompt starts there,
under all rules of admission. The filter compares the task's reward (verl's `filter_groups.metric = "acc"`),
without the penalty of `algorithm.overlong_buffer_tokens`. A resumed run counts from zero: what was wrong may
have been mended.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.contracts.ports import DataStore, Feed, PartialResult
from asyncrl_cli.contracts.prompt_group import (
    MIXED,
    AttemptKey,
    DataKey,
    GroupResult,
    PartRequest,
    PartResult,
    TrajectoryFailure,
)
from asyncrl_cli.loop.admission import Admission
from asyncrl_cli.loop.bias import BiasMeter
from asyncrl_cli.loop.data_keys import DataKeys
from asyncrl_cli.loop.fleet import Placement
from asyncrl_cli.loop.ledger import Attempt, Part, Stage
from asyncrl_cli.loop.logical_order import LogicalAdmission
from asyncrl_cli.profile.arithmetic import CRITIC, PROX, REWARD, LoopSettings, least_trajectories

EQUAL_REWARDS = "equal rewards"
"""The ledger's reason for dropping such a group."""
_FROM_TRAJECTORIES = 64
"""`task.max_failed_ratio` is checked from this many trajectories on."""


class Groups:
    def __init__(
        self,
        settings: LoopSettings,
        admission: Admission,
        feed: Feed,
        event: Callable[..., None],
        data: DataStore | None = None,
    ) -> None:
        """`event(name, key=key, **fields)` notifies the run's observers."""
        self.admission = admission
        self._order = admission if isinstance(admission, LogicalAdmission) else None
        self.ledger = admission.ledger
        self.filter = GroupFilter(settings)
        self.bias = BiasMeter(settings.profile.rollout.n)
        self.tokens_discarded = self.tokens_trained = 0
        self.failures: Counter[str] = Counter()
        """Failed trajectories so far, by kind."""
        self.is_learning = False
        """A separate critic is still learning from the groups that were taken last. It scores no others until
        then."""
        most, n = settings.profile.task.max_failed_ratio, settings.profile.rollout.n
        self._failures_limit = FailuresLimit(most, n)
        self._profile, self._step_groups = settings.profile, settings.schedule.step_groups
        self.feed = feed
        self._event = event
        self.data = DataKeys(data, admission.ledger, event)
        self.again: deque[Attempt] = deque()
        """Requeued, not yet started."""

    def start(self) -> list[tuple[str, PartRequest]]:
        """Admit the next prompt, or place again what was lost with a worker. Returns (worker, request) pairs,
        none if closed."""
        self._fill()
        placement = self.admission.choose()
        if placement is None:
            return []
        where = {"workers": dict(placement.responses), "version": placement.version}
        attempt = self.admission.first_lost()
        if attempt is not None:
            parts = self._place_again(attempt, placement, where)
        else:
            attempt = self.again.popleft() if self.again else Attempt(prompt=self.feed.next())
            parts = self.admission.admit(attempt, placement)
            self._entered(attempt, **where)
        # The seed is the group's, whatever worker has its parts: 31 bits of a digest.
        seed = hashlib.blake2b(f"{self._profile.run.seed}/{attempt.key}".encode(), digest_size=4).digest()
        request = partial(
            PartRequest,
            item=attempt.prompt.item,
            seed=int.from_bytes(seed) >> 1,
            versions=attempt.versions,
        )
        keys = attempt.partial_tokens
        return [
            (
                part.worker,
                request(
                    key=part.key,
                    indices=part.indices,
                    partial=part.partial,
                    partial_tokens={index: keys[index] for index in part.partial},
                ),
            )
            for part in parts
        ]

    def _place_again(self, attempt: Attempt, placement: Placement, where: Mapping[str, object]) -> list[Part]:
        before = attempt.ended_tokens()
        parts = self.admission.place_again(attempt, placement)
        kept_tokens = sum(kept.tokens for part in parts for kept in part.partial.values())
        self.tokens_discarded += before - attempt.ended_tokens() - kept_tokens
        fields: dict[str, object] = {"indices": sorted(index for part in parts for index in part.indices)}
        if kept_tokens:
            fields["kept_tokens"] = kept_tokens
        self._event("replaced", key=attempt.key, **where, **fields)
        return parts

    def parts_ended(self, results: Sequence[PartResult]) -> bool:
        """Record a worker's results. Returns true if a group has ended with them. `check_limits` says whether
        too many have failed."""
        if not results:
            return False
        attempts: dict[Attempt, None] = {}
        for result in results:
            self.tokens_discarded += result.failed_tokens
            attempt = self.ledger.running.get(result.key.attempt)
            part = attempt.parts.get(result.key.number) if attempt is not None else None
            if attempt is None or part is None:  # the group was given up, or the part was lost, meanwhile
                self.tokens_discarded += result.response_tokens
                self.bias.returned(result)
                self.data.clear([result.payload])
            else:
                part.result = result
                self.admission.workers[part.worker].release(part.key)
                attempts[attempt] = None
        whole = [attempt for attempt in attempts if not (attempt.unplaced or attempt.running_parts())]
        for attempt in whole:
            group = attempt.joined()
            self.failures.update(failure.kind for failure in group.failures)
            self._failures_limit.count(group)
            if self._order is None and (reason := self._why_dropped(group)):
                self._end(attempt, Stage.DROPPED, reason, group.response_tokens)
            else:
                attempt.result = group
                self.data.clear(attempt.partial_tokens.values())
                attempt.partial_tokens = {}
                self.admission.leave(attempt, Stage.FINISHED)
                self._entered(attempt)
        self._settle()
        return bool(whole)

    def _why_dropped(self, group: GroupResult) -> str:
        """The reason why a group is dropped whose generation has ended; "" if it is not."""
        if len(group.trajectories) < (least := least_trajectories(self._profile)):
            return MIXED if self._profile.rollout.n - len(_broken(group)) >= least else "failed"
        is_left_out = REWARD not in self.admission.scorers and self._leaves_out(group)
        return EQUAL_REWARDS if is_left_out else ""

    def _fill(self) -> None:
        """Deterministic runs: give prompts to all positions that enter now."""
        for position in self._order.vacancies() if self._order is not None else ():
            self._enter(position)

    def _enter(self, position: int) -> None:
        assert self._order is not None
        attempt = Attempt(prompt=self.feed.next())
        self._order.enter(attempt, position)
        self._entered(attempt, workers={}, version=self.admission.version, position=position)

    def _settle(self) -> None:
        """Deterministic runs: judge finished groups in order of position, and replace those that are
        dropped."""
        while self._order is not None and (attempt := self._order.to_judge()) is not None:
            if reason := self._why_dropped(attempt.outcome()):
                self._end(attempt, Stage.DROPPED, reason, attempt.outcome().response_tokens)
                self._enter(attempt.position)
            else:
                self._order.judged += 1

    def _leaves_out(self, group: GroupResult) -> bool:
        """Whether a group is dropped for its rewards, which are known now."""
        self.feed.ended(group)
        self.bias.judged(group)
        return self.filter.leaves_out(group)

    def recalled(self, worker: str, found: PartialResult) -> None:
        """A lent worker has given its device back: the responses that it has stopped are placed again, and
        continue from what it had of them."""
        self.tokens_discarded += found.rest_tokens
        keys, unused = dict(zip(found.responses, found.keys, strict=False)), list[DataKey]()
        for key in found.stopped:
            kept, attempt = found.responses.get(key, {}), self.ledger.running.get(key.attempt)
            if attempt is None or key.number not in attempt.parts:  # the group was given up meanwhile
                self.tokens_discarded += sum(response.tokens for response in kept.values())
                unused += [keys[key]] if key in keys else []
                continue
            self.admission.workers[worker].release(key)
            attempt.lose(key.number)
            attempt.partial |= kept
            if key in keys:
                before = {*attempt.partial_tokens.values()}
                attempt.partial_tokens |= dict.fromkeys(kept, keys[key])
                unused += before - {*attempt.partial_tokens.values()}
        self.data.clear(unused)
        self.admission.note_unplaced()

    def check_limits(self) -> None:
        """Raises AsyncrlError if too many trajectories have failed or too many groups were left out. Call it
        when the results that have arrived are recorded, and not in between: a checkpoint must not hold a
        group that has ended and still runs."""
        self._failures_limit.check()
        self.filter.check()

    def takeable(self, num_groups: int, *, unscored: bool = False) -> bool:
        """Whether `num_groups` can be taken now or, with `unscored`, could be if every finished group were
        scored."""
        enough = len(self.ledger.finished) >= num_groups
        return enough and len(self.admission.takeable(num_groups, unscored=unscored)) == num_groups

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

    def scored(self, scorer: str, columns: Mapping[AttemptKey, tuple[float, ...]]) -> None:
        """Record a scorer's columns, except for groups that were given up meanwhile. A group may be dropped
        for its new rewards."""
        for key, column in columns.items():
            if (attempt := self.ledger.finished.get(key)) is None:
                continue
            attempt.columns[scorer] = column
            self._event("scored", key=key, scorer=scorer)
            if scorer == REWARD and self._leaves_out(result := self._rewarded(attempt)):
                self._end(attempt, Stage.DROPPED, EQUAL_REWARDS, result.response_tokens)

    def columns_lost(self, scorer: str) -> None:
        """Discard a scorer's columns of the groups that wait to be taken."""
        for attempt in self.ledger.finished.values():
            attempt.columns.pop(scorer, None)

    def columns(self) -> tuple[str, ...]:
        """The scorers whose fields the groups in training have."""
        return tuple(name for name in self.admission.scorers if name != REWARD)

    def _rewarded(self, attempt: Attempt) -> GroupResult:
        """The group, with the reward model's scores (if there is one) added to its rewards."""
        result, weight = attempt.outcome(), self._profile.reward_model.weight
        if REWARD not in attempt.columns:
            return result
        scored = zip(result.trajectories, attempt.columns[REWARD], strict=True)
        return replace(result, trajectories=tuple(meta.judged(score, weight) for meta, score in scored))

    def take(self, num_groups: int) -> tuple[GroupResult, ...]:
        attempts = self.admission.takeable(num_groups)
        assert len(attempts) == num_groups
        for attempt in attempts:
            self.admission.take(attempt)
            self._entered(attempt)
        self.columns_lost(CRITIC)  # the next train step has a newer critic
        self.is_learning = CRITIC in self.admission.scorers
        return tuple(self._rewarded(attempt) for attempt in attempts)

    def trained(self) -> None:
        """The train step that took the last groups has ended."""
        for attempt in list(self.ledger.training.values()):
            tokens, versions = attempt.outcome().response_tokens, Counter[int]()
            for meta in attempt.outcome().trajectories:
                for version, sampled in meta.version_tokens:
                    versions[version] += sampled
            self.tokens_trained += tokens
            self.bias.trained(self._rewarded(attempt))
            self.ledger.move(attempt, Stage.TRAINED)
            self.data.release(attempt, Stage.TRAINED)
            self._entered(attempt, tokens=tokens, versions=sorted(versions.items()))

    def open_window(self) -> list[tuple[str, AttemptKey]]:
        """Raise the version, and give up groups past their deadline if `on_stale` says so. Returns (worker,
        group) to abort.

        A prompt that is stale too often may fail the run. It is requeued as well: the failed run's last
        checkpoint must not hold a late group.
        """
        late, training = self.admission.open_window(), self._profile.async_training
        self.columns_lost(PROX)  # the next window begins with newer weights
        self.bias.open_window()
        self._fill()
        self._settle()
        if training.on_stale not in ("drop", "requeue"):
            return []
        running = [(part.worker, attempt.key) for attempt in late for part in attempt.running_parts()]
        exhausted = [attempt for attempt in late if attempt.requeues >= training.max_requeues]
        for attempt in late:
            if training.on_stale == "drop":
                self._end(attempt, Stage.DROPPED, "stale", attempt.ended_tokens())
            elif attempt in exhausted and training.on_exhausted == "drop":
                self._end(attempt, Stage.DROPPED, "requeued too often", attempt.ended_tokens())
            else:
                self._requeue(attempt, "stale", attempt.requeues + 1)
        if exhausted and (training.on_stale, training.on_exhausted) == ("requeue", "fail"):
            raise AsyncrlError(
                f"prompt {exhausted[0].prompt.uid} was requeued {training.max_requeues} times for staleness "
                "and was stale again",
                hint='raise async_training.max_staleness, or set async_training.on_exhausted = "drop"',
            )
        return list(dict.fromkeys(running))

    def arrays_lost(self, worker: str) -> None:
        """The worker's node is gone, and with it the arrays of parts that had ended there. Their responses
        are generated again."""
        for attempt in [*self.ledger.finished.values()]:
            if any(part.worker == worker for part in attempt.parts.values()):
                self._requeue(attempt, "arrays lost", attempt.requeues)
        for attempt in self.ledger.running.values():
            for part in [*attempt.parts.values()]:
                if part.worker == worker and part.result is not None:
                    self.tokens_discarded += part.result.response_tokens
                    self.data.clear([part.result.payload])
                    attempt.lose(part.key.number)
        self.admission.note_unplaced()

    def _requeue(self, attempt: Attempt, reason: str, requeues: int) -> None:
        self._end(attempt, Stage.REQUEUED, reason, attempt.ended_tokens())
        if self._order is not None:
            again = Attempt(prompt=attempt.prompt, number=attempt.number)
            self._order.enter_again(again, attempt)
            self._entered(again, workers={}, version=self.admission.version, position=again.position)
            return
        self.again.append(Attempt(prompt=attempt.prompt, number=attempt.number + 1, requeues=requeues))

    def _end(self, attempt: Attempt, stage: Stage, reason: str, tokens: int) -> None:
        """End an attempt untrained. Its `tokens` count as discarded."""
        self.tokens_discarded += tokens
        self.bias.left_out(attempt, is_filtered=reason == EQUAL_REWARDS)
        self.admission.leave(attempt, stage, reason)
        self.data.release(attempt, f"{stage}: {reason}")
        self._entered(attempt, reason=reason)

    def _entered(self, attempt: Attempt, **fields: object) -> None:
        """Notify the observers that the attempt has entered another stage."""
        self._event(attempt.stage.value, key=attempt.key, **fields)


def _broken(group: GroupResult) -> list[TrajectoryFailure]:
    """The failures but for mixed versions, which are left out by choice."""
    return [failure for failure in group.failures if failure.kind != MIXED]


class FailuresLimit:
    """`task.max_failed_ratio`."""

    def __init__(self, max_failed_ratio: float, group_trajectories: int) -> None:
        self._most, self._group_trajectories = max_failed_ratio, group_trajectories
        self._trajectories = self._failed = 0
        self._last = ""

    def count(self, result: GroupResult) -> None:
        self._trajectories += self._group_trajectories
        self._failed += len(failures := _broken(result))
        if failures:
            self._last = failures[-1].text

    def check(self) -> None:
        """Raises AsyncrlError if too many trajectories have failed."""
        if self._trajectories >= _FROM_TRAJECTORIES and self._failed > self._most * self._trajectories:
            raise AsyncrlError(
                f"{self._failed} of {self._trajectories} trajectories failed, more than "
                f"task.max_failed_ratio = {self._most} allows; the last one: {self._last}",
                hint="fix the reward, environment or agent (the run's log has every failure) and resume, or "
                "resume with a higher task.max_failed_ratio",
            )


class GroupFilter:
    """Judges finished groups. `rewards`: the common reward of each group dropped since the last train
    step."""

    def __init__(self, settings: LoopSettings) -> None:
        algorithm = settings.profile.algorithm
        self.is_on = algorithm.filter_groups
        self.rewards: list[float] = []
        self._num_batches = algorithm.max_num_gen_batches
        self._step_groups = settings.schedule.step_groups
        self._in_a_row, self._last = 0, 0.0

    def leaves_out(self, result: GroupResult) -> bool:
        """Whether the group should be dropped. Counts it if so."""
        rewards = {trajectory.reward for trajectory in result.trajectories}
        if not self.is_on or len(rewards) > 1:
            self._in_a_row = 0
            return False
        self._last = rewards.pop()
        self.rewards.append(self._last)
        self._in_a_row += 1
        return True

    def check(self) -> None:
        """Raises AsyncrlError if too many groups in a row were dropped."""
        if self._in_a_row > self._num_batches * self._step_groups:
            raise AsyncrlError(
                f"each of the last {self._in_a_row} groups had equal rewards (the last one: {self._last:g}), "
                f"more than algorithm.max_num_gen_batches = {self._num_batches} times R = "
                f"{self._step_groups}: nothing is left to train",
                hint="start a run with prompts that the model solves now and then (too easy and too hard "
                "ones give equal rewards) or a larger rollout.n, or resume with a higher "
                "algorithm.max_num_gen_batches",
            )
