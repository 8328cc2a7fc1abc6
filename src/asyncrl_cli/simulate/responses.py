"""Responses that belong together, from their submission to their last reward: a group's, or those of one eval call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from asyncrl_cli.loop.attempts import GroupResult, TrajectoryMeta
from asyncrl_cli.loop.ports import EvalRequest, EvalResult, GroupRequest
from asyncrl_cli.simulate.decoding import SimulatedEngine
from asyncrl_cli.simulate.sequence import SimulatedSequence

if TYPE_CHECKING:
    from asyncrl_cli.simulate.simulated_worker import WorkerTimes


class Fate(NamedTuple):
    """What is in store for one response: its length, how long its reward takes, and a uniform number that decides on it."""

    tokens: int
    reward_s: float
    luck: float


def fates(rng: random.Random, n: int, times: WorkerTimes) -> list[Fate]:
    """Of n responses to one prompt. The lengths are drawn first: they are the same whatever the rewards do."""
    lengths = times.response_tokens(rng, n)
    return [Fate(tokens, times.reward_s(rng), rng.random()) for tokens in lengths]


class Responses:
    """`done` is resolved by the last reward, or by the abort; `on_end` is called at each end of a response."""

    def __init__(
        self, fates: Sequence[Fate], times: WorkerTimes, engine: SimulatedEngine, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self.aborted = False
        self.num_ended = 0
        self.ended_tokens = 0
        self._fates = fates
        self._times = times
        self._engine = engine
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.done = self._loop.create_future()
        self._sequences = [
            SimulatedSequence(index, times.prompt_tokens, fate.tokens, self._ended) for index, fate in enumerate(fates)
        ]
        self._rewarded_s = [float("inf")] * len(fates)
        engine.submit(self._sequences)

    def abort(self) -> None:
        """What runs is cut, rewards that are being computed are lost."""
        self.aborted = True
        self._engine.abort(self._sequences)
        self._finish()

    def group_result(self, request: GroupRequest) -> GroupResult:
        """As the real group runner makes it: trajectories whose reward raised leave, an aborted group has none."""
        kept = [] if self.aborted else [index for index, fate in enumerate(self._fates) if not self._fails(fate)]
        tokens = sum(sequence.tokens for sequence in self._sequences)
        return GroupResult(
            key=request.key,
            trajectories=tuple(self._meta(index) for index in kept),
            failures=() if self.aborted else ("the reward raised",) * (request.n - len(kept)),
            failed_tokens=tokens - sum(self._sequences[index].tokens for index in kept),
            payload=str(request.key),
        )

    def eval_result(self, request: EvalRequest) -> EvalResult:
        """What has its reward; an aborted eval has less of it."""
        lengths, failures = [], []
        for sequence, fate in zip(self._sequences, self._fates, strict=True):
            if self._rewarded_s[sequence.index] > self._loop.time():
                failures.append("aborted")
            elif self._fails(fate):
                failures.append("the reward raised")
            else:
                lengths.append(sequence.tokens)
                versions = {version for version, _ in self._engine.version_tokens(sequence)}
                assert versions == {request.version}, f"a load during an eval of version {request.version}: {versions}"
        return EvalResult(
            version=request.version,
            rewards=(0.5,) * len(lengths),
            response_tokens=tuple(lengths),
            failures=tuple(failures),
        )

    def _ended(self, sequence: SimulatedSequence) -> None:
        self.num_ended += 1
        self.ended_tokens += sequence.tokens
        self._rewarded_s[sequence.index] = self._loop.time() + self._fates[sequence.index].reward_s
        self._on_end()
        if self.num_ended == len(self._fates):
            last_s = max(self._rewarded_s)
            if last_s > self._loop.time():
                self._loop.call_at(last_s, self._finish)
            else:
                self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def _fails(self, fate: Fate) -> bool:
        return fate.luck < self._times.failure_ratio

    def _meta(self, index: int) -> TrajectoryMeta:
        sequence = self._sequences[index]
        return TrajectoryMeta(
            prompt_tokens=sequence.prompt_tokens,
            response_tokens=sequence.tokens,
            reward=float(self._fates[index].luck > 0.5),
            finish_reason="length" if sequence.tokens == self._times.max_response_tokens else "stop",
            version_tokens=self._engine.version_tokens(sequence),
        )
