"""Runs parts of groups and evals, from prompts to rewarded trajectories: episodes at once, each with an environment of its own.

    PartRequest -> for each index (environment.start -> engine.generate -> environment.step -> ...) -> PartResult + GroupPayload

A trajectory without a reward is left out of its part; an aborted part has no trajectories. Their tokens count as failed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from asyncrl_cli.engines.port import Engine, Sampling
from asyncrl_cli.envs.episode import Episode, derived_seed
from asyncrl_cli.envs.port import Answer, End, Environment, EpisodeFailed
from asyncrl_cli.errors import first_line
from asyncrl_cli.loop.attempts import AttemptKey, Failure, PartResult
from asyncrl_cli.loop.ports import EvalRequest, EvalResult, PartRequest
from asyncrl_cli.samples import GroupPayload
from asyncrl_cli.tasks.rewards import RewardFailed

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Running:
    """A running part of the attempt `key`, or one call of `evaluate` (key None). `waits`: calls of environments, which an abort
    cancels."""

    key: AttemptKey | None
    episodes: list[Episode]
    sampling: Sampling
    on_sequence: Callable[[int], None] = lambda num_finished: None
    aborted: bool = False
    num_finished: int = 0
    waits: set[asyncio.Future[Any]] = field(default_factory=set)

    def release(self, episode: Episode) -> None:
        """Note that the episode no longer needs its slot."""
        if episode.needs_slot:
            episode.needs_slot = False
            self.num_finished += 1
            self.on_sequence(self.num_finished)


class GroupRunner:
    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        make_environment: Callable[[], Environment],
        sampling: Sampling,
        *,
        max_prompt_tokens: int,
        on_waiting: Callable[[int], None] = lambda change: None,
    ) -> None:
        """`on_waiting(+1)`: one more trajectory waits for its environment between turns; -1: one fewer."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._make_environment = make_environment
        self._sampling = sampling
        self._max_prompt_tokens = max_prompt_tokens
        self._on_waiting = on_waiting
        self._running: list[_Running] = []

    @property
    def running_tokens(self) -> int:
        """Tokens sampled so far for parts that have not ended, without evals."""
        episodes = (episode for running in self._running if running.key is not None for episode in running.episodes)
        return sum(self._engine.tokens_of(episode.id) + episode.num_sampled for episode in episodes)

    async def run(self, request: PartRequest, on_sequence: Callable[[int], None]) -> tuple[PartResult, GroupPayload]:
        """`on_sequence(number of trajectories that need no slot any more)` is called after the last response of each.

        A response's random numbers depend on the group's seed and on its index, not on the part that it is in.
        """
        key, generator = request.key.attempt, random.Random(request.seed)
        seeds = [generator.getrandbits(63) for _ in range(max(request.indices) + 1)]
        episodes = [Episode(f"{key}/{index}", request.item, seeds[index]) for index in request.indices]
        part = _Running(key, episodes, self._sampling, on_sequence)
        await self._play(part, at_once=len(episodes))
        return _result(request, part)

    async def evaluate(self, request: EvalRequest, sampling: Sampling) -> EvalResult:
        """One trajectory per item, at most as many at once as the engine has slots. ValueError if the engine holds another version.

        Each item's random numbers depend on the request's seed and the item's uid, not on the other items.
        """
        if self._engine.version != request.version:
            raise ValueError(f"eval of version {request.version} on an engine that holds {self._engine.version}")
        prefix = f"eval-{request.version}-{request.seed}"
        episodes = [
            Episode(f"{prefix}/{index}-{item['uid']}", item, derived_seed(request.seed, item["uid"]))
            for index, item in enumerate(request.items)
        ]
        await self._play(_Running(None, episodes, sampling), at_once=self._engine.slots)
        scored = [(episode.end.reward, episode.num_sampled) for episode in episodes if episode.end is not None]
        return EvalResult(
            version=request.version,
            rewards=tuple(reward for reward, _ in scored),
            response_tokens=tuple(length for _, length in scored),
            failures=tuple(episode.failure for episode in episodes if episode.failure is not None),
        )

    async def abort(self, key: AttemptKey) -> None:
        """Every `run` of a part of this attempt returns soon after, without trajectories. Unknown keys are ignored."""
        await self._abort(key)

    async def abort_evals(self) -> None:
        """Every running `evaluate` returns soon after; trajectories without a reward are among its failures."""
        await self._abort(None)

    async def _abort(self, key: AttemptKey | None) -> None:
        for running in [running for running in self._running if running.key == key]:
            running.aborted = True
            for episode in running.episodes:
                await self._engine.abort(episode.id)
            for wait in running.waits:
                wait.cancel()

    async def _play(self, running: _Running, at_once: int) -> None:
        """Run all episodes. The first error cancels the others and is raised itself, not in an ExceptionGroup."""
        places = asyncio.Semaphore(at_once)

        async def play(episode: Episode) -> None:
            async with places:
                await self._play_one(running, episode)

        self._running.append(running)
        try:
            async with asyncio.TaskGroup() as tasks:
                for episode in running.episodes:
                    tasks.create_task(play(episode))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._running.remove(running)

    async def _play_one(self, running: _Running, episode: Episode) -> None:
        """One trajectory, from its environment's start to its end."""
        environment = self._make_environment()
        try:
            episode.end = await self._end_of(running, episode, environment)
        except EpisodeFailed as failed:
            episode.failure = Failure(failed.kind, failed.text)
        finally:
            running.release(episode)
            await environment.close()

    async def _end_of(self, running: _Running, episode: Episode, environment: Environment) -> End:
        turn = await _result_of(running, episode, environment.start(episode.item))
        episode.open(self._tokenizer, turn, self._max_prompt_tokens)
        while True:
            answer = await self._respond(running, episode)
            step = environment.step(answer)
            if turn.is_last:
                running.release(episode)
                following = await _result_of(running, episode, step)
            else:
                following = await self._between_turns(episode, _result_of(running, episode, step))
            if isinstance(following, End):
                return following
            turn = following
            episode.go_on(self._tokenizer, answer.text, turn, running.sampling.max_response_tokens)

    async def _between_turns(self, episode: Episode, step: Coroutine[Any, Any, T]) -> T:
        """Await a step after which the model may speak again."""
        began_s = asyncio.get_running_loop().time()
        self._on_waiting(+1)
        try:
            return await step
        finally:
            self._on_waiting(-1)
            episode.tool_s += asyncio.get_running_loop().time() - began_s

    async def _respond(self, running: _Running, episode: Episode) -> Answer:
        """The next response. It continues all tokens so far; all turns together stay within `max_response_tokens`."""
        if running.aborted:
            raise EpisodeFailed("aborted", "")
        tokens = episode.prompt_tokens + episode.completion.tokens
        num_left = running.sampling.max_response_tokens - len(episode.completion.tokens)
        left = replace(running.sampling, max_response_tokens=num_left)
        completion = await self._engine.generate(episode.id, tokens, left, episode.turn_seed())
        episode.add(completion)
        episode.num_turns += 1
        if running.aborted or completion.finish_reason == "abort":
            raise EpisodeFailed("aborted", "")
        text = str(self._tokenizer.decode(completion.tokens, skip_special_tokens=True))
        return Answer(text=text, message={"role": "assistant", "content": text}, finish_reason=completion.finish_reason)


async def _result_of(running: _Running, episode: Episode, work: Coroutine[Any, Any, T]) -> T:
    """Await a call of the environment. Raises EpisodeFailed if it raises, or if its part is aborted meanwhile."""
    task = asyncio.ensure_future(work)
    running.waits.add(task)
    try:
        await asyncio.wait({task})
        if task.cancelled():
            raise EpisodeFailed("aborted", "")
        return task.result()
    except EpisodeFailed:
        raise
    except RewardFailed as failed:
        raise EpisodeFailed("reward", f"reward of {episode.id}: {failed}") from failed
    except Exception as error:  # a user's environment may raise anything
        logger.exception("the environment of %s failed", episode.id)
        why = f"environment of {episode.id}: {type(error).__name__}: {first_line(error)}"
        raise EpisodeFailed("environment", why) from error
    finally:
        task.cancel()
        running.waits.discard(task)


def _result(request: PartRequest, part: _Running) -> tuple[PartResult, GroupPayload]:
    """Metadata and trajectories, in the same order. The caller, who sends the payload, fills in `PartResult.payload`."""
    kept = [episode for episode in part.episodes if episode.end is not None and not part.aborted]
    lost = [episode for episode in part.episodes if episode not in kept]
    result = PartResult(
        key=request.key,
        trajectories=tuple(episode.meta() for episode in kept),
        failures=tuple(episode.failure for episode in lost if episode.failure is not None and not part.aborted),
        failed_tokens=sum(episode.num_sampled for episode in lost),
        payload=None,
    )
    uid, epoch, attempt = request.key.attempt
    return result, GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=tuple(episode.trajectory() for episode in kept))
