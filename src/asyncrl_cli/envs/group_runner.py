"""Runs parts of groups and evals, from prompts to rewarded trajectories: concurrent episodes, each with its
own environment.

    PartRequest -> for each index (environment.start -> engine.generate -> environment.step -> ...) ->
    PartResult + GroupPayload

`PartDesk` has a task for each part of the worker, `GroupRunner` plays it.

A trajectory without a reward is left out of its part; an aborted part has no trajectories. Their tokens count
as failed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.ports import LONGEST_TEXT, EvalRequest, EvalResult, PartialResult
from asyncrl_cli.contracts.prompt_group import (
    MIXED,
    AttemptKey,
    PartialResponse,
    PartKey,
    PartRequest,
    PartResult,
)
from asyncrl_cli.data.sample_fields import FINISH_REASON, LOGPROBS, MASK, REQUIRED, TOKENS, VERSIONS, Schema
from asyncrl_cli.data.store import Stored
from asyncrl_cli.data.trajectories import GroupPayload, Trajectory, trajectory_of
from asyncrl_cli.engines.port import Completion, FinishReason, Sampling
from asyncrl_cli.envs.conversation import Context, Conversation
from asyncrl_cli.envs.episode import Episode, Means, derived_seed
from asyncrl_cli.measure.meters import LongPoll

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""How long `PartDesk.close` waits for cancelled parts, whose tools may not end at once."""
EndedPart = tuple[PartResult, Stored]
RunPart = Callable[[PartRequest, Callable[[int], None]], Awaitable[EndedPart | None]]
"""None: the part was stopped, and goes on elsewhere."""


@dataclass(slots=True, eq=False)
class _Running:
    """A running part, with an episode per index, or one call of `evaluate` (request None)."""

    request: PartRequest | None
    episodes: list[Episode]
    aborted: bool = False

    @property
    def key(self) -> AttemptKey | None:
        return self.request.key.attempt if self.request is not None else None


@dataclass(slots=True, eq=False)
class GroupRunner:
    """`sampling`: for groups; evals bring their own. `most_requeues`: how often a trajectory is sampled again
    that several versions have sampled, if that is a failure (`Means.mixes`)."""

    means: Means
    sampling: Sampling
    most_requeues: int = 0
    _running: list[_Running] = field(default_factory=list)

    @property
    def part_keys(self) -> set[PartKey]:
        """Of the parts whose episodes have begun, and not all ended."""
        return {part.request.key for part in self._running if part.request is not None}

    @property
    def running_tokens(self) -> int:
        """Tokens sampled so far for parts that have not ended, without evals."""
        return sum(
            self._tokens_of(episode)
            for part in self._running
            if part.request is not None
            for episode in part.episodes
        )

    def _tokens_of(self, episode: Episode) -> int:
        return self.means.engine.tokens_of(episode.id) + episode.num_sampled

    def partial_responses(self) -> tuple[PartialResult, list[GroupPayload]]:
        """What each running part has kept so far, and the kept tokens: a payload for each part that has
        any."""
        kept, payloads, rest_tokens = dict[PartKey, dict[int, PartialResponse]](), list[GroupPayload](), 0
        for part in self._running:
            if (request := part.request) is None:
                continue
            has = dict[int, Completion]()
            for index, episode in zip(request.indices, part.episodes, strict=True):
                if (completion := episode.so_far()) is not None and completion.tokens:
                    has[index] = completion
                    rest_tokens += episode.lost_tokens
                else:
                    rest_tokens += self._tokens_of(episode)
            if not has:
                continue
            kept[request.key] = {index: _kept(completion) for index, completion in has.items()}
            # The tokens are the only segment of a trajectory at their response's index; others have none.
            trajectories = [Trajectory()] * (max(has) + 1)
            for index, one in has.items():
                conversation = Conversation(self.means.chat, self.means.schema)
                conversation.keep(Context(), [], one, [])
                segments, reason = conversation.segments(), one.finish_reason
                trajectories[index] = trajectory_of(segments, self.means.schema, finish_reason=reason)
            uid, epoch, attempt = request.key.attempt
            payload = GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=tuple(trajectories))
            payloads.append(payload)
        return PartialResult(responses=kept, rest_tokens=rest_tokens), payloads

    async def run(
        self, request: PartRequest, on_sequence: Callable[[int], None], so_far: GroupPayload | None = None
    ) -> tuple[PartResult, GroupPayload]:
        """Play a part. `on_sequence(number of trajectories that need no slot now)` is called whenever that
        changes. `so_far`: by index, the tokens from which the request's responses continue.

        A response's random numbers depend on the group's seed and on its index, not on the part that it is
        in.
        """
        key, generator = request.key.attempt, random.Random(request.seed)
        seeds = [generator.getrandbits(63) for _ in range(max(request.indices) + 1)]
        num_free = 0

        def on_slot(change: int) -> None:
            nonlocal num_free
            num_free += change
            on_sequence(num_free)

        episodes = []
        for index in request.indices:
            earlier = None
            if so_far is not None and index in request.partial:
                num_kept = request.partial[index].tokens
                earlier = _completion(so_far.trajectories[index], self.means.schema, num_kept)
            name, seed, versions = f"{key}/{index}", seeds[index], request.versions
            episodes.append(
                Episode(name, request.item, seed, self.means, self.sampling, on_slot, earlier, versions)
            )
        part = _Running(request, episodes)
        await self._play(part, at_once=len(episodes))
        return _result(request, part)

    async def evaluate(
        self, request: EvalRequest, sampling: Sampling, *, with_tokens: bool = False
    ) -> tuple[EvalResult, list[Trajectory]]:
        """Play the tries, at most as many at once as the engine has slots. Raises ValueError if the engine
        holds another version. `with_tokens`: also the trajectories of the tries that have not failed.

        A try's random numbers depend on the request's seed, the item's uid and the sample's number, not on
        the other tries.
        """
        if self.means.engine.version != request.version:
            held = self.means.engine.version
            raise ValueError(f"eval of version {request.version} on an engine that holds {held}")
        episodes = []
        for entry in request.tries:
            uid, sample = entry.item["uid"], entry.sample
            name = f"eval-{request.version}-{request.seed}/{entry.eval_set}/{uid}/{sample}"
            seed = derived_seed(request.seed, f"{uid}/{sample}" if sample else uid)
            episodes.append(Episode(name, entry.item, seed, self.means, sampling))
        await self._play(_Running(None, episodes), at_once=self.means.engine.slots)
        played = [episode for episode in episodes if with_tokens and episode.failure is None]
        outcomes = tuple(episode.failure or episode.meta() for episode in episodes)
        texts = {
            number: self._written(episode)
            for number, (entry, episode) in enumerate(zip(request.tries, episodes, strict=True))
            if entry.is_shown and episode.failure is None
        }
        return EvalResult(outcomes=outcomes, texts=texts), [episode.trajectory() for episode in played]

    def _written(self, episode: Episode) -> str:
        """The text of the episode's last segment from its first sampled token on: answers, and what the model
        was told between them. Earlier segments are left out: the prompt of each next one repeats them."""
        *_, last = episode.trajectory().segments()
        tokens = last[TOKENS][int(last[MASK].argmax()) :].tolist()
        text = str(self.means.chat.tokenizer.decode(tokens))[:LONGEST_TEXT]
        return text.encode(errors="backslashreplace").decode()  # some tokenizers decode to lone surrogates

    async def abort(self, key: AttemptKey | None) -> None:
        """Make every running part of this attempt return soon, without trajectories; or, with None, every
        `evaluate`, where trajectories without a reward count as failures. Unknown keys are ignored."""
        for running in [running for running in self._running if running.key == key]:
            running.aborted = True
            for episode in running.episodes:
                await episode.stop("aborted", "")

    async def restart(self) -> None:
        """After a load: give up the trajectories that are being sampled and have tokens of an older version.
        They begin again (`most_requeues`). Others that have, between two turns, do so after their next
        one."""
        engine, text = self.means.engine, "new weights were loaded (rollout.interrupt)"
        groups = [part for part in self._running if part.request is not None]
        for episode in [episode for part in groups for episode in part.episodes]:
            so_far, first = engine.so_far(episode.id), episode.conversation.first_version
            if so_far is not None and so_far.versions:
                first = so_far.versions[0] if first is None else first
            is_sampling = so_far is None or so_far.finish_reason == "abort"
            if engine.tokens_of(episode.id) and is_sampling and first != engine.version:
                await episode.stop(MIXED, text)

    async def _play(self, running: _Running, at_once: int) -> None:
        """Run all episodes. The first error cancels the others and is raised itself, not in an
        ExceptionGroup."""
        running_slots = asyncio.Semaphore(at_once)

        async def play(number: int) -> None:
            async with running_slots:
                for requeues in range(self.most_requeues + 1):
                    episode = running.episodes[number]
                    if requeues:
                        episode = running.episodes[number] = episode.again(requeues)
                    limit = tasks.create_task(episode.stop_late())
                    try:
                        await episode.play()
                    finally:
                        limit.cancel()
                    if running.aborted or episode.failure is None or episode.failure.kind != MIXED:
                        break

        self._running.append(running)
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(len(running.episodes)):
                    tasks.create_task(play(number))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._running.remove(running)


def _kept(completion: Completion) -> PartialResponse:
    versions = tuple(sorted(Counter(completion.versions).items()))
    return PartialResponse(version_tokens=versions, is_whole=completion.finish_reason != "abort")


def _completion(trajectory: Trajectory, schema: Schema, num_kept: int) -> Completion:
    """Of its first `num_kept` tokens."""
    (segment,) = trajectory.segments()
    if num_kept < len(segment[TOKENS]):
        segment = {name: values[:num_kept] for name, values in segment.items()}
    written = [name for name in segment if schema[name].by == "engine" and name not in REQUIRED]
    tokens, logprobs, versions = (segment[name].tolist() for name in (TOKENS, LOGPROBS, VERSIONS))
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        versions=versions,
        finish_reason=cast(FinishReason, trajectory.values[FINISH_REASON]),
        fields={name: segment[name].tolist() for name in written},
    )


def _result(request: PartRequest, part: _Running) -> tuple[PartResult, GroupPayload]:
    """Metadata and trajectories, in the same order. The caller stores the latter and fills in
    `PartResult.payload`."""
    ended = [episode for episode in part.episodes if episode.end is not None and not part.aborted]
    lost = [episode for episode in part.episodes if episode not in ended]
    failures = [] if part.aborted else [failure for one in part.episodes for failure in one.earlier_failures]
    failures += [episode.failure for episode in lost if episode.failure is not None and not part.aborted]
    lost_tokens = sum(episode.num_sampled for episode in lost) + sum(one.lost_tokens for one in ended)
    result = PartResult(
        key=request.key,
        trajectories=tuple(episode.meta() for episode in ended),
        failures=tuple(failures),
        failed_tokens=lost_tokens,
        payload=None,
    )
    trajectories = tuple(episode.trajectory() for episode in ended)
    uid, epoch, attempt = request.key.attempt
    return result, GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=trajectories)


class PartDesk:
    """The parts that run here, a task for each. Call it from the event loop.

    `run(request, on_sequence)` runs a part. `changes` is notified of every change, urgently if no part runs
    any more.
    """

    def __init__(self, run: RunPart, changes: LongPoll) -> None:
        self._run = run
        self._changes = changes
        self.freed_slots: dict[PartKey, int] = {}
        """How many sequences of each running part have finished."""
        self._ended: deque[EndedPart] = deque()
        self._failure: Exception | None = None
        self._tasks: dict[PartKey, asyncio.Task[None]] = {}
        self._is_closed = False

    async def close(self) -> None:
        """Cancel all parts: nobody asks for them any more, so their end is no failure."""
        self._is_closed = True
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=CLOSE_S)

    async def ended(self, keys: Iterable[PartKey]) -> None:
        """Wait until these parts have ended."""
        if tasks := [self._tasks[key] for key in keys if key in self._tasks]:
            await asyncio.wait(tasks)

    def begin(self, requests: Sequence[PartRequest]) -> None:
        for request in requests:
            task = asyncio.create_task(self._follow(request), name=f"part {request.key}")
            self._tasks[request.key] = task
            task.add_done_callback(partial(self._forget, request.key))

    def _forget(self, key: PartKey, task: asyncio.Task[None]) -> None:
        del self._tasks[key]

    def take(self, most: int) -> list[EndedPart]:
        """Return the parts that ended first, with at most `most` objects to be sent along. With none left,
        raise the first error of any part: such an error is the engine's, not the part's.

        If more is left to take, notes an urgent change, so that the next answer comes at once.
        """
        if self._failure is not None and not self._ended:
            raise self._failure
        taken, room = list[EndedPart](), most
        while self._ended and (room := room - max(len(self._ended[0][1].objects), 1)) >= 0:
            taken.append(self._ended.popleft())
        if self._ended or self._failure is not None:
            self._changes.note(is_urgent=True)
        return taken

    async def _follow(self, request: PartRequest) -> None:
        self.freed_slots[request.key] = 0

        def on_sequence(finished: int) -> None:
            self.freed_slots[request.key] = finished
            self._changes.note()

        try:
            if (ended := await self._run(request, on_sequence)) is not None:
                self._ended.append(ended)
        except (Exception, asyncio.CancelledError) as error:  # `take` raises it
            if self._is_closed:
                return
            logger.exception("part %s failed", request.key)
            if not isinstance(error, Exception):
                error = ExecutorFailed(f"part {request.key} was cancelled")
            self._failure = self._failure or error
        finally:
            del self.freed_slots[request.key]
            self._changes.note(is_urgent=not self.freed_slots)
