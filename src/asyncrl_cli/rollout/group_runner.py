"""A group from prompt to rewarded trajectories: n responses at once, each rewarded as soon as it has ended.

    GroupRequest -> tokenize -> n x (engine.generate -> reward) -> GroupResult (metadata) + GroupPayload (arrays)

A trajectory whose reward failed leaves the group; an aborted group has none. Their tokens are counted as failed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrl_cli.engines.port import Completion, Engine, Sampling
from asyncrl_cli.loop.attempts import AttemptKey, GroupResult, TrajectoryMeta
from asyncrl_cli.loop.ports import EvalRequest, EvalResult, GroupRequest
from asyncrl_cli.rollout.prompts import tokenize_prompts
from asyncrl_cli.samples.trajectory import NOT_SAMPLED, GroupPayload, Segment, Trajectory
from asyncrl_cli.tasks.rewards import RewardFailed


class Rewards(Protocol):
    async def score(self, item: Any, response_text: str) -> float:
        """Raises RewardFailed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """One response; `reward` is None if there is none, and `failure` says why ("" if the group was aborted)."""

    completion: Completion
    reward: float | None = None
    failure: str = ""


@dataclass(slots=True, eq=False)
class _Running:
    """A group, or one call of `evaluate`. `ended_tokens` are those of its responses that have ended."""

    request_ids: list[str]
    aborted: bool = False
    num_finished: int = 0
    ended_tokens: int = 0
    reward_tasks: set[asyncio.Task[float]] = field(default_factory=set)


class GroupRunner:
    """`use_chat_template`: prompts become a user's message in the tokenizer's chat template, if it has one."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        rewards: Rewards,
        sampling: Sampling,
        *,
        max_prompt_tokens: int,
        use_chat_template: bool = True,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._sampling = sampling
        self._max_prompt_tokens = max_prompt_tokens
        self._use_chat_template = use_chat_template
        self._running: dict[AttemptKey, _Running] = {}
        self._evals: set[_Running] = set()

    @property
    def running_tokens(self) -> int:
        """Sampled so far for groups that have not ended; evals do not count."""
        groups = self._running.values()
        return sum(group.ended_tokens + sum(map(self._engine.tokens_of, group.request_ids)) for group in groups)

    async def run(self, request: GroupRequest, on_sequence: Callable[[int], None]) -> tuple[GroupResult, GroupPayload]:
        """`on_sequence(number of responses that have ended)` is called at the end of each."""
        prompt_tokens = self.tokenize(request.item)
        if problem := self._prompt_problem(request.key.uid, prompt_tokens):
            return _result(request.key, prompt_tokens, [], (problem,) * request.n)
        group = _Running(request_ids=[f"{request.key}/{index}" for index in range(request.n)])
        self._running[request.key] = group
        try:
            outcomes = await _together(
                self._respond(group, request_id, prompt_tokens, request.item, self._sampling, seed, on_sequence)
                for request_id, seed in zip(group.request_ids, seeds(request.seed, request.n), strict=True)
            )
        finally:
            del self._running[request.key]
        if group.aborted:
            outcomes = [_Outcome(completion=outcome.completion) for outcome in outcomes]
        return _result(request.key, prompt_tokens, outcomes)

    async def abort(self, key: AttemptKey) -> None:
        """The group's `run` returns soon after, without trajectories. Unknown keys are ignored."""
        group = self._running.get(key)
        if group is not None:
            await self._end(group)

    async def abort_evals(self) -> None:
        """Every running `evaluate` returns soon after; what had no reward yet is among its failures."""
        for running in list(self._evals):
            await self._end(running)

    async def _end(self, running: _Running) -> None:
        running.aborted = True
        for request_id in running.request_ids:
            await self._engine.abort(request_id)
        for task in running.reward_tasks:
            task.cancel()

    async def evaluate(self, request: EvalRequest, sampling: Sampling) -> EvalResult:
        """One response per item, at most as many at once as the engine has slots. ValueError on another version.

        Each item's random numbers depend on the request's seed and its uid, not on the items that it comes with.
        """
        if self._engine.version != request.version:
            raise ValueError(f"eval of version {request.version} on an engine that holds {self._engine.version}")
        places = asyncio.Semaphore(self._engine.slots)
        prefix = f"eval-{request.version}-{request.seed}"
        running = _Running(request_ids=[f"{prefix}/{index}-{item['uid']}" for index, item in enumerate(request.items)])
        self._evals.add(running)
        try:
            outcomes = await _together(
                self._evaluate_item(places, running, request_id, item, sampling, eval_seed(request.seed, item["uid"]))
                for request_id, item in zip(running.request_ids, request.items, strict=True)
            )
        finally:
            self._evals.discard(running)
        scored = [(o.reward, len(o.completion.tokens)) for o in outcomes if o.reward is not None]
        return EvalResult(
            version=request.version,
            rewards=tuple(reward for reward, _ in scored),
            response_tokens=tuple(length for _, length in scored),
            failures=tuple(outcome.failure or "aborted" for outcome in outcomes if outcome.reward is None),
        )

    async def _evaluate_item(
        self,
        places: asyncio.Semaphore,
        running: _Running,
        request_id: str,
        item: Mapping[str, Any],
        sampling: Sampling,
        seed: int,
    ) -> _Outcome:
        prompt_tokens = self.tokenize(item)
        if problem := self._prompt_problem(item["uid"], prompt_tokens):
            return _Outcome(completion=_NOTHING, failure=problem)
        async with places:
            if running.aborted:
                return _Outcome(completion=_NOTHING)
            return await self._respond(running, request_id, prompt_tokens, item, sampling, seed, lambda num_finished: None)

    def tokenize(self, item: Mapping[str, Any]) -> list[int]:
        return tokenize_prompts(self._tokenizer, [item], use_chat_template=self._use_chat_template)[0]

    def _prompt_problem(self, uid: str, prompt_tokens: list[int]) -> str:
        if len(prompt_tokens) > self._max_prompt_tokens:
            return f"prompt {uid} has {len(prompt_tokens)} tokens, rollout.max_prompt_tokens is {self._max_prompt_tokens}"
        return "" if prompt_tokens else f"prompt {uid} has no tokens"

    async def _respond(
        self,
        group: _Running,
        request_id: str,
        prompt_tokens: list[int],
        item: Mapping[str, Any],
        sampling: Sampling,
        seed: int,
        on_sequence: Callable[[int], None],
    ) -> _Outcome:
        if group.aborted:
            return _Outcome(completion=_NOTHING)
        completion = await self._engine.generate(request_id, prompt_tokens, sampling, seed)
        group.num_finished += 1
        group.ended_tokens += len(completion.tokens)
        on_sequence(group.num_finished)
        if group.aborted or completion.finish_reason == "abort":
            return _Outcome(completion=completion)
        text = self._tokenizer.decode(completion.tokens, skip_special_tokens=True)
        try:
            return _Outcome(completion=completion, reward=await self._score(group, item, text))
        except RewardFailed as failed:
            return _Outcome(completion=completion, failure=f"reward of {request_id}: {failed}")

    async def _score(self, group: _Running, item: Mapping[str, Any], text: str) -> float | None:
        """None if the group was aborted meanwhile."""
        task = asyncio.ensure_future(self._rewards.score(item, text))
        group.reward_tasks.add(task)
        try:
            await asyncio.wait({task})
            return None if task.cancelled() else task.result()
        finally:
            task.cancel()
            group.reward_tasks.discard(task)


_NOTHING = Completion(tokens=[], logprobs=[], versions=[], finish_reason="abort")


async def _together(coroutines: Iterable[Coroutine[Any, Any, _Outcome]]) -> list[_Outcome]:
    """All results, in order. The first error cancels the others and is raised as it is, not as a group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]


def seeds(seed: int, count: int) -> list[int]:
    """One seed per response, a function of the group's."""
    generator = random.Random(seed)
    return [generator.getrandbits(63) for _ in range(count)]


def eval_seed(seed: int, uid: str) -> int:
    """However an eval's items are divided among workers and calls, an item gets the same random numbers."""
    return random.Random(f"{seed}/{uid}").getrandbits(63)


def _result(
    key: AttemptKey, prompt_tokens: list[int], outcomes: list[_Outcome], failures: tuple[str, ...] = ()
) -> tuple[GroupResult, GroupPayload]:
    """Trajectories and their metadata, in the same order; whoever sends the payload fills in `GroupResult.payload`."""
    kept = [(outcome.completion, outcome.reward) for outcome in outcomes if outcome.reward is not None]
    lost = [outcome for outcome in outcomes if outcome.reward is None]
    result = GroupResult(
        key=key,
        trajectories=tuple(_meta(prompt_tokens, completion, reward) for completion, reward in kept),
        failures=failures + tuple(outcome.failure for outcome in lost if outcome.failure),
        failed_tokens=sum(len(outcome.completion.tokens) for outcome in lost),
        payload=None,
    )
    trajectories = tuple(
        Trajectory(segments=(segment_of(prompt_tokens, completion),), reward=reward, finish_reason=completion.finish_reason)
        for completion, reward in kept
    )
    return result, GroupPayload(uid=key.uid, epoch=key.epoch, attempt=key.attempt, trajectories=trajectories)


def _meta(prompt_tokens: list[int], completion: Completion, reward: float) -> TrajectoryMeta:
    return TrajectoryMeta(
        prompt_tokens=len(prompt_tokens),
        response_tokens=len(completion.tokens),
        reward=reward,
        finish_reason=completion.finish_reason,
        version_tokens=tuple(sorted(Counter(completion.versions).items())),
    )


def segment_of(prompt_tokens: list[int], completion: Completion) -> Segment:
    """Prompt (mask 0, version -1, logprob 0), then response."""
    num_prompt, num_response = len(prompt_tokens), len(completion.tokens)
    return Segment(
        tokens_T=np.array(prompt_tokens + completion.tokens, dtype=np.int32),
        logprobs_T=np.array([0.0] * num_prompt + completion.logprobs, dtype=np.float32),
        versions_T=np.array([NOT_SAMPLED] * num_prompt + completion.versions, dtype=np.int32),
        mask_T=np.array([False] * num_prompt + [True] * num_response, dtype=np.bool_),
    )
