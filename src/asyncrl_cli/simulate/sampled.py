"""Responses that belong together, from their submission to their last reward: a group's, or those of one eval call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from asyncrl_cli.loop.ports import EvalRequest, EvalResult, GroupRequest, GroupResult, TrajectoryMeta
from asyncrl_cli.simulate.engine import SimulatedEngine
from asyncrl_cli.simulate.sequence import SimulatedSequence

if TYPE_CHECKING:
    from asyncrl_cli.simulate.workers import WorkerTimes


class Fate(NamedTuple):
    """What is in store for one response: its length, how long its reward takes, and a uniform number that decides on it."""

    tokens: int
    reward_s: float
    luck: float


def fates(rng: random.Random, n: int, times: WorkerTimes) -> list[Fate]:
    """Of n responses to one prompt. The lengths are drawn first: they are the same whatever the rewards do."""
    lengths = times.response_tokens(rng, n)
    return [Fate(tokens, times.reward_s(rng), rng.random()) for tokens in lengths]


class Sampled:
    """`on_sequence(self, sequence)` at each end of a response, `on_done(self)` once, at the last reward or the abort."""

    def __init__(
        self,
        fates: Sequence[Fate],
        prompt_tokens: int,
        engine: SimulatedEngine,
        on_sequence: Callable[[Sampled, SimulatedSequence], None],
        on_done: Callable[[Sampled], None],
    ) -> None:
        self.fates = fates
        self.aborted = False
        self.num_ended = 0
        self.sequences = [SimulatedSequence(index, prompt_tokens, fate.tokens, self._ended) for index, fate in enumerate(fates)]
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._on_sequence = on_sequence
        self._on_done = on_done
        self._rewarded_s = [float("inf")] * len(fates)
        self._rewards: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        """What runs is cut, rewards that are being computed are lost."""
        self.aborted = True
        self._engine.abort(self.sequences)
        if self._rewards is not None:
            self._rewards.cancel()
        self._on_done(self)

    def has_reward(self, index: int) -> bool:
        return self._rewarded_s[index] <= self._loop.time()

    def version_tokens(self, index: int) -> tuple[tuple[int, int], ...]:
        return self._engine.version_tokens(self.sequences[index])

    def _ended(self, sequence: SimulatedSequence) -> None:
        self.num_ended += 1
        self._rewarded_s[sequence.index] = self._loop.time() + self.fates[sequence.index].reward_s
        self._on_sequence(self, sequence)
        if self.num_ended < len(self.fates):
            return
        last_s = max(self._rewarded_s)
        if last_s > self._loop.time():
            self._rewards = self._loop.call_at(last_s, self._on_done, self)
        else:
            self._on_done(self)


def group_result(sampled: Sampled, request: GroupRequest, times: WorkerTimes, has_broken_reward: bool) -> GroupResult:
    """As the real group runner makes it: trajectories whose reward raised leave, an aborted group has none."""
    least_luck = min(fate.luck for fate in sampled.fates) if has_broken_reward else -1.0
    kept, failed_tokens = [], 0
    for sequence, fate in zip(sampled.sequences, sampled.fates, strict=True):
        if sampled.aborted or fate.luck < times.failure_ratio or fate.luck == least_luck:
            failed_tokens += sequence.tokens
        else:
            kept.append(_meta(sampled, sequence, fate, times))
    failures = () if sampled.aborted else ("the reward raised",) * (request.n - len(kept))
    return GroupResult(
        key=request.key, trajectories=tuple(kept), failures=failures, failed_tokens=failed_tokens, payload=str(request.key)
    )


def eval_result(sampled: Sampled, request: EvalRequest, times: WorkerTimes) -> EvalResult:
    """What has its reward; an aborted eval has less of it."""
    lengths, failures = [], []
    for sequence, fate in zip(sampled.sequences, sampled.fates, strict=True):
        if not sampled.has_reward(sequence.index):
            failures.append("aborted")
        elif fate.luck < times.failure_ratio:
            failures.append("the reward raised")
        else:
            lengths.append(sequence.tokens)
            versions = {version for version, _ in sampled.version_tokens(sequence.index)}
            assert versions == {request.version}, f"a load during an eval of version {request.version}: {versions}"
    return EvalResult(
        version=request.version,
        rewards=(0.5,) * len(lengths),
        response_tokens=tuple(lengths),
        failures=tuple(failures),
    )


def _meta(sampled: Sampled, sequence: SimulatedSequence, fate: Fate, times: WorkerTimes) -> TrajectoryMeta:
    return TrajectoryMeta(
        prompt_tokens=sequence.prompt_tokens,
        response_tokens=sequence.tokens,
        reward=float(fate.luck > 0.5),
        finish_reason="length" if sequence.tokens == times.max_response_tokens else "stop",
        version_tokens=sampled.version_tokens(sequence.index),
    )
