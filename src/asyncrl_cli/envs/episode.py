"""Plays one trajectory: an environment and a model take turns, within limits, until it ends with a reward or
fails.

    environment.start ─> Turn ─> ask ─> engine.generate ─> take ─> environment.step ─> End
                           ^                                              │
                           └──────────────────── Turn <───────────────────┘

Who waits for whom: an episode waits in turns for a slot (unless it has a single turn), for the engine and
for its environment. `stop` ends each wait; so does `env.episode_timeout_s`, unless the episode has a single
turn.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar, cast

from asyncrl_cli.base.errors import ExecutorFailed, first_line, timeout
from asyncrl_cli.contracts.environment import (
    MAX_REWARD,
    Answer,
    End,
    Environment,
    EpisodeFailed,
    Reward,
    SelfPlayed,
    Turn,
    figures_of,
)
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.prompt_group import MIXED, TrajectoryFailure, TrajectoryMeta, VersionPlan
from asyncrl_cli.data.sample_fields import BUILT_IN, Schema
from asyncrl_cli.data.trajectories import Trajectory, trajectory_of
from asyncrl_cli.engines.port import Completion, Engine, FinishReason, Sampling
from asyncrl_cli.envs.chat import Chat
from asyncrl_cli.envs.conversation import Conversation
from asyncrl_cli.envs.slots import Slots, TrajectorySlot, VersionGate
from asyncrl_cli.profile.arithmetic import max_context_tokens
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.sandbox.parent_rewards import RewardFailed

T = TypeVar("T")
CLOSE_LIMIT_S = 10.0

logger = logging.getLogger(__name__)


class Limits(NamedTuple):
    """Limits of an episode: rollout.max_prompt_tokens, and those in [env]."""

    max_prompt_tokens: int
    max_context_tokens: int
    max_turns: int = 1
    episode_timeout_s: float | None = None
    """Only for episodes with more than a single turn."""

    @classmethod
    def of(cls, profile: Profile) -> Limits:
        env, prompt_tokens = profile.env, profile.rollout.max_prompt_tokens
        return cls(prompt_tokens, max_context_tokens(profile), env.max_turns, env.episode_timeout_s)


class Means(NamedTuple):
    """What the episodes of a worker share. `on_waiting(episode, for_what)` is called when one begins to wait
    between turns, for a tool of that name, say; and with "" when the wait ends. `mixes`: tokens of several
    versions are no failure."""

    engine: Engine
    chat: Chat
    make_environment: Callable[[], Environment]
    limits: Limits
    slots: Slots
    on_waiting: Callable[[str, str], None] = lambda episode, for_what: None
    schema: Schema = BUILT_IN
    mixes: bool = True
    gate: VersionGate | None = None


@dataclass(slots=True, eq=False)
class Episode:
    """One trajectory of a group or eval.

    `end` and `failure` are None until the episode has ended; then one of them is set. `finish_reason`: of the
    last answer, or why there was no further one ("length", "max_turns"). `on_slot(change)` is called with +1
    when the episode no longer needs its slot, and with -1 when it needs one again after a pause (with
    `rollout.hold_slots = false`). `earlier`, only for a single turn: the tokens from which the answer
    continues, or the whole answer. `versions`: in a deterministic run, which version samples which token.
    """

    id: str
    item: Item
    seed: int
    means: Means
    sampling: Sampling
    on_slot: Callable[[int], None] = lambda change: None
    earlier: Completion | None = None
    versions: VersionPlan | None = None
    end: End | None = None
    failure: TrajectoryFailure | None = None
    finish_reason: str = ""
    tool_s: float = 0.0
    has_one_turn: bool = False
    conversation: Conversation = field(init=False)
    lost_tokens: int = 0
    """Sampled tokens of discarded conversations."""
    earlier_failures: tuple[TrajectoryFailure, ...] = ()
    """Of the tries before this one."""
    _slot: TrajectorySlot = field(init=False)
    _stopped: EpisodeFailed | None = None
    _wait: asyncio.Future[Any] | None = None
    _is_free: bool = False
    _waits_since_s: float | None = None

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.means.chat, self.means.schema)
        self._slot = TrajectorySlot(self.means.slots)

    async def play(self) -> None:
        """Play the episode to its end. Raises only the engine's errors, and PreflightError for a model
        without tools."""
        try:
            self._check_stopped()
            try:
                environment = self.means.make_environment()
                environment.episode = self.id
            except Exception as error:  # a user's environment may raise anything
                raise self._failed(error) from error
            try:
                end = await self._end_of(environment)
                self._check_mixed()  # an agent's answers come by another way
                if not abs(end.reward) <= MAX_REWARD:
                    what = f"it is {end.reward:g}, not a number up to {MAX_REWARD:g}"
                    raise EpisodeFailed("reward", f"reward of {self.id}: {what}")
                self._write("environment", end.fields)
                if isinstance(end.reward, Reward):
                    self._write("reward", end.reward.fields)
                # Facts that are no figures (NaN, say) were not measured.
                facts = {**figures_of(end.reward), **end.facts}
                facts = {name: fact for name, fact in facts.items() if abs(fact) <= MAX_REWARD}
                self.end = replace(end, reward=float(end.reward), facts=facts)
            finally:
                self._free()
                try:
                    async with timeout(CLOSE_LIMIT_S):
                        await environment.close()
                except Exception:  # it does not change the trajectory
                    logger.exception("the environment of %s could not be closed", self.id)
        except EpisodeFailed as failed:
            self.failure = TrajectoryFailure(failed.kind, failed.text)
        finally:
            self._free()
            if self.means.gate is not None:
                self.means.gate.leave(self.id)

    async def stop(self, kind: str, text: str) -> None:
        """Make the episode fail soon."""
        self._stopped = self._stopped or EpisodeFailed(kind, text)
        await self.means.engine.abort(self.id)
        if self._wait is not None:
            self._wait.cancel()

    async def stop_late(self) -> None:
        """Stop the episode after env.episode_timeout_s. A single turn has other limits: on tokens, and on the
        reward."""
        limit_s = self.means.limits.episode_timeout_s
        await asyncio.sleep(limit_s or math.inf)
        if not self.has_one_turn:
            why = f"{self.id} had not ended after env.episode_timeout_s = {limit_s:g}"
            await self.stop("episode-timeout", why)

    async def _end_of(self, environment: Environment) -> End:
        """Environment and model take turns, until the environment ends the episode."""
        if isinstance(environment, SelfPlayed):
            await self._call(self._slot.take())
            return await self._call(environment.play(self))
        turn = await self._call(environment.start(self.item))
        self.has_one_turn = turn.is_last
        while True:
            prompt = self._prompt(turn)
            if prompt is None:
                self._free()
                return await self._call(environment.cut(self.finish_reason))
            answer = await self._answer(prompt)
            if turn.is_last:  # the slot is free while the reward is computed
                self._free()
                following = await self._call(environment.step(answer))
            else:
                calls = answer.message.get("tool_calls") or ()
                names = ", ".join(dict.fromkeys(call["function"]["name"] for call in calls))
                self.waits_for(names or "the environment")
                self._slot.pause()
                lends = not self.means.slots.hold
                if lends:
                    self.on_slot(+1)
                try:
                    following = await self._call(environment.step(answer))
                finally:
                    if lends:
                        self.on_slot(-1)
                    self.waits_for("")
            if isinstance(following, End):
                return following
            self._write("environment", following.fields)
            turn = following

    def _write(self, by: Literal["environment", "reward"], fields: Mapping[str, Any]) -> None:
        """Take values of declared fields, for the last answer or the trajectory."""
        try:
            self.conversation.write(by, fields)
        except (ValueError, LookupError) as error:  # LookupError: there is no answer
            raise EpisodeFailed(by, f"{by} of {self.id}: {first_line(error)}") from None

    def _prompt(self, turn: Turn) -> list[int] | None:
        """The prompt's ids; None if no further answer is possible: then `finish_reason` says why.

        Raises EpisodeFailed if the first prompt is empty or too long, PreflightError if the model cannot be
        offered tools.
        """
        num_turns, limits = self.conversation.num_turns, self.means.limits
        if turn.tools:
            self.means.chat.check_tools()
        if num_turns >= limits.max_turns:
            self.finish_reason = "max_turns"
            return None
        prompt, most = self.conversation.ask(turn.messages, turn.tools), limits.max_prompt_tokens
        if not num_turns and not 0 < len(prompt) <= most:
            size = f"{len(prompt)} tokens, rollout.max_prompt_tokens is {most}" if prompt else "no tokens"
            raise EpisodeFailed("prompt", f"prompt {self.item['uid']} has {size}")
        if len(prompt) >= limits.max_context_tokens:
            self.finish_reason = "length"
            return None
        return prompt

    async def _answer(self, prompt: list[int]) -> Answer:
        """The model's answer, within `max_response_tokens` and the context."""
        self._check_stopped()
        if not self.has_one_turn:
            await self._call(self._slot.take())
        num_turns, room = self.conversation.num_turns, self.means.limits.max_context_tokens - len(prompt)
        sampling = replace(self.sampling, max_response_tokens=min(self.sampling.max_response_tokens, room))
        seed = derived_seed(self.seed, str(num_turns)) if num_turns else self.seed
        completion = self.earlier if self.has_one_turn else None
        if completion is None or completion.finish_reason == "abort":  # then it is not a whole answer
            completion = await self._generate(prompt, sampling, seed, completion)
        answer, self.finish_reason = self.conversation.take(completion), completion.finish_reason
        self._check_stopped()
        if completion.finish_reason == "abort":
            raise EpisodeFailed("aborted", "")
        self._check_mixed()
        return answer

    def _check_mixed(self) -> None:
        if not self.means.mixes and len(versions := self.conversation.version_tokens()) > 1:
            sampled = ", ".join(str(version) for version, _ in versions)
            raise EpisodeFailed(MIXED, f"{self.id} was sampled by the versions {sampled}")

    def again(self, number: int) -> Episode:
        """The failed episode from its beginning, for the `number`-th time, with random numbers of its own. It
        needs a slot again."""
        assert self.failure is not None
        self.on_slot(-1)
        seed = derived_seed(self.seed, f"again {number}")
        again = Episode(self.id, self.item, seed, self.means, self.sampling, self.on_slot)
        again.lost_tokens = self.num_sampled
        again.earlier_failures = (*self.earlier_failures, self.failure)
        return again

    async def _generate(
        self, prompt: list[int], sampling: Sampling, seed: int, earlier: Completion | None
    ) -> Completion:
        """The answer, which continues from `earlier`. In a deterministic run it stops where the next version
        begins, and goes on, with its cache rebuilt, once that is loaded."""
        first_version, num_before = self.conversation.first_version, self.conversation.num_sampled
        most, versions = sampling.max_response_tokens, self.versions
        while True:
            done = len(earlier.tokens) if earlier is not None else 0
            if versions is not None:
                await self._reach(versions.at(num_before + done))
                left = versions.left(num_before + done)
                upto = most if left is None else min(most, done + left)
                sampling = replace(sampling, max_response_tokens=upto)
            # An engine that cannot continue a response need not know the parameter.
            continues = {} if earlier is None else {"so_far": earlier}
            earlier = await self.means.engine.generate(
                self.id, prompt, sampling, seed, first_version=first_version, **continues
            )
            is_cut = earlier.finish_reason == "length" and len(earlier.tokens) < most
            if versions is None or not is_cut:
                return earlier
            if self.has_one_turn:
                self.earlier = replace(earlier, finish_reason="abort")

    async def _reach(self, version: int) -> None:
        """Wait until the version is loaded, without a slot meanwhile."""
        engine, gate = self.means.engine, self.means.gate
        assert gate is not None, "deterministic runs have one"
        gate.need(self.id, version)
        if engine.version < version:
            self._slot.leave()
            self.on_slot(+1)
            try:
                await self._call(gate.loaded(version))
            finally:
                self.on_slot(-1)
            if not self.has_one_turn:
                await self._call(self._slot.take())
        assert engine.version == version, f"{self.id} needs version {version}, not {engine.version}"

    def so_far(self) -> Completion | None:
        """The tokens from which a later episode with the same seed can continue, or its whole answer; None if
        it must start again."""
        if not self.has_one_turn:
            return self.earlier
        if not self.conversation.num_turns:
            found = self.means.engine.so_far(self.id) or self.earlier
            if found is None or self.versions is None or found.finish_reason != "length":
                return found
            is_cut = len(found.tokens) < self.sampling.max_response_tokens  # the stretch is at its end
            return replace(found, finish_reason="abort") if is_cut else found
        if self.finish_reason == "abort":
            return None
        (context,) = self.conversation.contexts
        first, schema = len(context.tokens) - context.num_sampled, self.means.schema
        return Completion(
            tokens=context.tokens[first:],
            logprobs=context.logprobs[first:],
            versions=context.versions[first:],
            finish_reason=cast(FinishReason, self.finish_reason),
            fields={n: values.tolist() for n, _, values in context.written if schema[n].by == "engine"},
        )

    def waits_for(self, what: str) -> None:
        """Note that the episode now waits between turns, for a tool of this name, say; or, with "", that it
        waits no more."""
        now_s, since_s = asyncio.get_running_loop().time(), self._waits_since_s
        if what and since_s is None:
            self._waits_since_s = now_s
        elif not what and since_s is not None:
            self._waits_since_s, self.tool_s = None, self.tool_s + now_s - since_s
        else:
            return
        self.means.on_waiting(self.id, what)

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a call of the environment. Raises EpisodeFailed if it raises, or if the episode is stopped
        meanwhile."""
        self._wait = task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task})
            self._check_stopped()
            if task.cancelled():
                raise EpisodeFailed("environment", f"environment of {self.id}: it cancelled its own call")
            return task.result()
        except RewardFailed as failed:
            raise EpisodeFailed("reward", f"reward of {self.id}: {failed}") from failed
        except (EpisodeFailed, ExecutorFailed):
            raise
        except Exception as error:  # a user's environment may raise anything
            raise self._failed(error) from error
        finally:
            self._wait = None
            task.cancel()

    def _failed(self, error: Exception) -> EpisodeFailed:
        logger.error("the environment of %s failed", self.id, exc_info=error)
        what = f"environment of {self.id}: {type(error).__name__}: {first_line(error)}"
        return EpisodeFailed("environment", what)

    def _check_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _free(self) -> None:
        if not self._is_free:
            self._is_free = True
            self._slot.leave()
            self.on_slot(+1)

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far, including lost ones."""
        return self.conversation.num_sampled + self.lost_tokens

    def trajectory(self) -> Trajectory:
        assert self.end is not None
        return trajectory_of(
            self.conversation.segments(),
            self.means.schema,
            reward=self.end.reward,
            finish_reason=self.finish_reason,
            turn_rewards=list(self.end.turn_rewards),
            facts=dict(self.end.facts),
            **self.conversation.values,
        )

    def meta(self) -> TrajectoryMeta:
        assert self.end is not None
        conversation = self.conversation
        num_tokens = sum(len(context.tokens) for context in conversation.contexts)
        return TrajectoryMeta(
            prompt_tokens=num_tokens - conversation.num_sampled,
            response_tokens=conversation.num_sampled,
            reward=self.end.reward,
            finish_reason=self.finish_reason,
            version_tokens=conversation.version_tokens(),
            num_turns=conversation.num_turns,
            num_forks=conversation.num_forks,
            tool_s=self.tool_s,
            facts=tuple(sorted(self.end.facts.items())),
        )


def derived_seed(seed: int, name: str) -> int:
    """Seed of an eval's item, independent of how items are divided among workers and calls; or of a
    trajectory's later turn."""
    return random.Random(f"{seed}/{name}").getrandbits(63)
