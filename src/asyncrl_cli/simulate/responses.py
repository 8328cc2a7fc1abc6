"""Responses that belong together, from their submission to their last reward: a group's, or those of one eval call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from asyncrl_cli.loop.attempts import GroupResult, TrajectoryMeta
from asyncrl_cli.loop.ports import EvalRequest, EvalResult, GroupRequest
from asyncrl_cli.simulate.decoding import SimulatedEngine, SimulatedSequence

if TYPE_CHECKING:
    from asyncrl_cli.simulate.simulated_worker import WorkerTimes

RAISED = "the reward raised"
Fate = tuple[int, float, float]
"""Of one response: its length, how long its reward takes, and a uniform number that decides on it."""


def fates(rng: random.Random, n: int, times: WorkerTimes) -> list[Fate]:
    """Of n responses to one prompt. The lengths are drawn first: they are the same whatever the rewards do."""
    lengths = times.response_tokens(rng, n)
    return [(tokens, times.reward_s(rng), rng.random()) for tokens in lengths]


class Responses:
    """`done` is resolved by the last reward, or by the abort; `on_end` is called at each end of a response."""

    def __init__(
        self, fates: Sequence[Fate], times: WorkerTimes, engine: SimulatedEngine, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self.aborted = False
        self.num_ended = 0
        self.ended_tokens = 0
        self._times = times
        self._engine = engine
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.done = self._loop.create_future()
        self._responses = [
            SimulatedSequence(times.prompt_tokens, tokens, self._ended, reward_s, luck) for tokens, reward_s, luck in fates
        ]
        engine.submit(self._responses)

    def abort(self) -> None:
        """What runs is cut, rewards that are being computed are lost."""
        self.aborted = True
        self._engine.abort(self._responses)
        self._finish()

    def group_result(self, request: GroupRequest) -> GroupResult:
        """As the real group runner makes it: trajectories whose reward raised leave, an aborted group has none."""
        kept = [] if self.aborted else [response for response in self._responses if not self._fails(response)]
        tokens = sum(response.tokens for response in self._responses)
        return GroupResult(
            key=request.key,
            trajectories=tuple(map(self._meta, kept)),
            failures=() if self.aborted else (RAISED,) * (request.n - len(kept)),
            failed_tokens=tokens - sum(response.tokens for response in kept),
            payload=str(request.key),
        )

    def eval_result(self, request: EvalRequest) -> EvalResult:
        """What has its reward; an aborted eval has less of it."""
        rewarded = [response for response in self._responses if response.rewarded_s <= self._loop.time()]
        kept = [response for response in rewarded if not self._fails(response)]
        versions = {version for response in kept for version, _ in self._engine.version_tokens(response)}
        assert versions <= {request.version}, f"a load during an eval of version {request.version}: {versions}"
        num_aborted, num_raised = len(self._responses) - len(rewarded), len(rewarded) - len(kept)
        return EvalResult(
            version=request.version,
            rewards=(0.5,) * len(kept),
            response_tokens=tuple(response.tokens for response in kept),
            failures=("aborted",) * num_aborted + (RAISED,) * num_raised,
        )

    def _ended(self, response: SimulatedSequence) -> None:
        self.num_ended += 1
        self.ended_tokens += response.tokens
        response.rewarded_s = self._loop.time() + response.reward_s
        self._on_end()
        if self.num_ended == len(self._responses):
            last_s = max(response.rewarded_s for response in self._responses)
            if last_s > self._loop.time():
                self._loop.call_at(last_s, self._finish)
            else:
                self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def _fails(self, response: SimulatedSequence) -> bool:
        return response.luck < self._times.failure_ratio

    def _meta(self, response: SimulatedSequence) -> TrajectoryMeta:
        return TrajectoryMeta(
            prompt_tokens=response.prompt_tokens,
            response_tokens=response.tokens,
            reward=float(response.luck > 0.5),
            finish_reason="length" if response.tokens == self._times.max_response_tokens else "stop",
            version_tokens=self._engine.version_tokens(response),
        )
