"""Simulated trajectories: draws their turns, and tracks those of one part or eval call from submission to the
last reward.

Lengths are drawn per group, so that responses to one prompt can be correlated:

    log x = log(median) + sigma * (sqrt(r) * z_prompt + sqrt(1 - r) * z_trajectory)

x is then rounded into 1 ... max_tokens; r is `prompt_variance_ratio`. If the workload has a list, the same
normal variates draw from its quantiles (a Gaussian copula). The generator is seeded with the group's seed and
draws the lengths of its responses in order. So a response has the same length under every profile, on every
worker and after any restart.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean

from asyncrl_cli.contracts.ports import EvalOutcome, EvalRequest, EvalResult
from asyncrl_cli.contracts.prompt_group import (
    MIXED,
    PartialResponse,
    PartRequest,
    PartResult,
    TrajectoryFailure,
    TrajectoryMeta,
    VersionPlan,
)
from asyncrl_cli.measure.meters import DEBOUNCE_S, POLL_S
from asyncrl_cli.profile.arithmetic import max_context_tokens
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.sequences import UNLIMITED, CacheSize, SimulatedSequence, ToolWait, cut
from asyncrl_cli.simulate.simulated_engine import SimulatedEngine
from asyncrl_cli.simulate.workload import Decoding, Drawn, Lengths, Turns

STANDARD = NormalDist()
MOST_LOG = 40.0
"""The largest logarithm of a lognormal draw, so that no number overflows."""
RAISED = TrajectoryFailure("reward", "the reward raised")
ABORTED = TrajectoryFailure("aborted", "")
CROSSED = TrajectoryFailure(MIXED, "several versions sampled it")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """How long a worker's calls take (seconds), and how long responses are (tokens).

    `response_tokens(rng, n)`: the lengths of the first turns of a group's first n trajectories; `rng` is
    seeded by the group's request and fresh. `tool_calls(rng, tokens)`: the calls of one trajectory whose
    first turn has `tokens` tokens, with a generator of its own; None for single turns. `reward_s(rng)`: for
    one trajectory, with another generator of the group. A share `failure_ratio` of rewards raises, and for a
    share `equal_ratio` of prompts all trajectories have the same luck. Unless it `mixes`, a trajectory that
    several versions have sampled is sampled again, up to `mixed_requeues` times, and then fails.
    `prefetch_s(rng)`, `load_s(rng)`, `restart_s(rng)`: with the worker's own generator. `pause_s`:
    interrupting and resuming, without the load itself. `fetch_s`: receiving weights during the interrupt, if
    there is no second buffer. `wake_s`, `sleep_s`: of a lent worker, without the load. `turns`: held during a
    load, where workers load one after another. `cache`: one engine's. `reports_machines`: those of its
    process, for which a run takes a fifth longer. Progress is reported at the earliest `progress_s` after the
    last report, and after `poll_s` even without a change. Long runs of many workers need larger values than
    the real worker's.
    """

    decoding: Decoding
    response_tokens: Callable[[random.Random, int], Sequence[int]]
    prompt_tokens: int = 4
    max_response_tokens: int | None = None
    tool_calls: Callable[[random.Random, int], Sequence[ToolWait]] | None = None
    hold_slots: bool = True
    trace_sequences: bool = False
    reports_machines: bool = True
    cache: CacheSize = UNLIMITED
    reward_s: Callable[[random.Random], float] = lambda rng: 0.0
    failure_ratio: float = 0.0
    equal_ratio: float = 0.0
    mixes: bool = True
    mixed_requeues: int = 0
    prefetch_s: Callable[[random.Random], float] = lambda rng: 0.0
    restart_s: Callable[[random.Random], float] = lambda rng: 0.0
    wake_s: float = 0.0
    sleep_s: float = 0.0
    load_s: Callable[[random.Random], float] = lambda rng: 0.0
    pause_s: float = 0.0
    fetch_s: float = 0.0
    turns: asyncio.Lock | None = None
    progress_s: float = DEBOUNCE_S
    poll_s: float = POLL_S
    weights_timeout_s: float = 300.0


class ResponseLengths:
    """Draws response lengths: called with a group's generator and n, it returns n lengths in tokens."""

    def __init__(self, lengths: Lengths, max_response_tokens: int) -> None:
        self._most = max_response_tokens
        self._between = math.sqrt(lengths.prompt_variance_ratio)
        self._within = math.sqrt(1 - lengths.prompt_variance_ratio)
        self._is_list = lengths.distribution == "list"
        self._sorted = sorted(min(tokens, max_response_tokens) for tokens in lengths.response_tokens)
        self._median, self._sigma = lengths.median_tokens or 1.0, lengths.sigma or 0.0
        self._mu = math.log(self._median)

    def __call__(self, rng: random.Random, n: int) -> list[int]:
        common = self._between * rng.gauss(0.0, 1.0)
        return [self._length(common + self._within * rng.gauss(0.0, 1.0)) for _ in range(n)]

    def _length(self, normal: float) -> int:
        if self._is_list:
            last = len(self._sorted) - 1
            return self._sorted[min(int(STANDARD.cdf(normal) * (last + 1)), last)]
        tokens = math.exp(min(self._mu + self._sigma * normal, MOST_LOG))
        return max(1, min(round(tokens), self._most))

    def quantile(self, share: float) -> int:
        """The length that this share of responses does not exceed."""
        return self._length(STANDARD.inv_cdf(share))

    @property
    def mean(self) -> float:
        """The expected length, in closed form (lognormal: its limited expected value)."""
        if self._is_list:
            return fmean(self._sorted)
        mu, sigma, most = self._mu, self._sigma, float(self._most)
        if sigma == 0:
            return min(self._median, most)
        z = (math.log(most) - mu) / sigma
        return math.exp(mu + sigma**2 / 2) * STANDARD.cdf(z - sigma) + most * (1 - STANDARD.cdf(z))


class Episodes:
    """Draws what follows a trajectory's first turn, within the limits of `[env]`. Called with the
    trajectory's own generator and the tokens of that turn, it returns tool calls, each with its result and
    the next turn."""

    def __init__(self, turns: Turns, lengths: ResponseLengths, profile: Profile, prompt_tokens: int) -> None:
        self._turns = turns
        self._lengths = lengths
        self._env = profile.env
        self._room_tokens = max_context_tokens(profile) - prompt_tokens

    def __call__(self, rng: random.Random, tokens: int) -> list[ToolWait]:
        calls: list[ToolWait] = []
        number = max(1, min(round(_draw(self._turns.number, rng)), self._env.max_turns))
        left = self._room_tokens - tokens
        for turn_tokens in self._lengths(rng, number - 1):
            seconds = _draw(self._turns.tool_s, rng)
            result_tokens = round(_draw(self._turns.result_tokens, rng))
            if seconds > self._env.tool_timeout_s:
                return [*calls, ToolWait(self._env.tool_timeout_s, 0, 0, "tool-timeout")]
            if (left := left - result_tokens) < 1:
                break
            calls.append(ToolWait(seconds, result_tokens, min(turn_tokens, left)))
            left -= calls[-1].turn_tokens
        return calls


def _draw(figure: Drawn, rng: random.Random) -> float:
    if figure.median is None:
        return rng.choice(figure.values)
    return figure.median * math.exp(min(figure.sigma * rng.gauss(0.0, 1.0), MOST_LOG))


def trajectories_of(
    seed: int | str, indices: Sequence[int], times: WorkerTimes, prompt: object = None
) -> list[SimulatedSequence]:
    """Draws some trajectories of one prompt, by index (ascending). The result for an index does not depend on
    the other indices. `prompt`: the shared prompt (None for an eval)."""
    # a prompt's parts ask again and again: so many more are drawn that few draws are made
    drawn = _drawn(times.response_tokens, times.reward_s, seed, 1 << indices[-1].bit_length())
    are_alike = times.equal_ratio and random.Random(f"luck of {seed}").random() < times.equal_ratio
    trajectories, draw_calls = [], times.tool_calls
    for index in indices:
        tokens, reward_s, luck = drawn[index]
        trajectories.append(
            SimulatedSequence(
                times.prompt_tokens,
                tokens,
                reward_s=reward_s,
                luck=drawn[0][2] if are_alike else luck,
                prompt=prompt,
                index=index,
                name=f"eval/{seed}" if prompt is None else f"{prompt}/{index}",
                calls=draw_calls(random.Random(f"tools of {seed}/{index}"), tokens) if draw_calls else (),
            )
        )
    return trajectories


@lru_cache(1024)
def _drawn(
    lengths: Callable[[random.Random, int], Sequence[int]],
    reward_s: Callable[[random.Random], float],
    seed: int | str,
    num: int,
) -> list[tuple[int, float, float]]:
    """(tokens of the first turn, seconds of the reward, luck) of a prompt's first trajectories."""
    rng = random.Random(f"rewards of {seed}")
    return [(tokens, reward_s(rng), rng.random()) for tokens in lengths(random.Random(seed), num)]


class Responses:
    """Trajectories of one part or eval call. `on_slot` is called when one ends (and, unless slots are held,
    when it completes a turn), `on_waiting(name, for_what)` when it begins to wait for a tool and, with "",
    when it continues, and `on_done(self)` once, after the last reward or by `abort`. `partial`: the tokens
    that they had in the run being resumed, by index. `draw_again(index)` draws a trajectory anew; None if
    none can be mixed. `versions`: in a deterministic run, which version samples which token."""

    def __init__(
        self,
        responses: Sequence[SimulatedSequence],
        times: WorkerTimes,
        engine: SimulatedEngine,
        on_done: Callable[[Responses], None],
        on_waiting: Callable[[str, str], None],
        on_slot: Callable[[], None],
        partial: Mapping[int, PartialResponse],
        draw_again: Callable[[int], SimulatedSequence] | None = None,
        versions: VersionPlan | None = None,
    ) -> None:
        self.aborted = self.is_done = False
        self.num_ended = 0
        self.ended_tokens = 0
        """Of those that have ended, and of the tries at others that were mixed."""
        self._responses = list(responses)
        self._draw_again = draw_again
        self._lost_tokens = self._num_mixed = 0
        self._times = times
        self._engine = engine
        self._on_done = on_done
        self._on_slot = on_slot
        self._on_waiting = on_waiting
        self._loop = asyncio.get_running_loop()
        for response in responses:
            response.on_end, response.on_turn = self._ended, self._call_tool
            if kept := partial.get(response.index):
                response.kept, response.kept_tokens = kept.version_tokens, kept.tokens
                response.has_ended = kept.is_whole
            if response.has_ended:
                # its reward is computed again; not at once, because its owner does not have `self` yet
                self._loop.call_soon(self._ended, response)
            elif versions is not None:
                cut(response, versions, response.kept_tokens)
        self._may_hold = versions is not None
        left = [response for response in responses if not response.has_ended]
        if versions is None:
            engine.submit(left)
            return
        for response in left:
            self._loop.call_soon(self._go_on, response, versions.at(response.kept_tokens))

    @property
    def num_without_slot(self) -> int:
        frees_at_tools = not self._times.hold_slots
        if not frees_at_tools and not self._may_hold:
            return self.num_ended
        # a list is faster here than a generator, and every report of a worker comes by
        free = [one.is_holding or (one.is_at_tool and frees_at_tools) for one in self._responses]
        return self.num_ended + sum(free)

    def partial_responses(self) -> tuple[dict[int, PartialResponse], int]:
        """The tokens, by index, from which trajectories can continue in a resumed run, and the token count of
        those that cannot."""
        kept, rest_tokens = dict[int, PartialResponse](), self._lost_tokens
        for response in self._responses:
            versions = self._engine.version_tokens(response)
            if self._times.tool_calls is not None:  # as in the real runner, episodes with turns start again
                rest_tokens += sum([count for _, count in versions])
            elif versions:
                kept[response.index] = PartialResponse(versions, is_whole=response.has_ended)
        return kept, rest_tokens

    def restart(self) -> None:
        """After a load: sample anew those that have begun and not ended, unless they are at a tool: they do
        after their last turn."""
        for response in [*self._responses]:
            is_running = not (response.has_ended or response.is_aborted or response.is_at_tool)
            if is_running and self._engine.version_tokens(response):
                self._engine.abort([response])
                self.ended_tokens += response.tokens
                self._sample_again(response)

    def abort(self) -> None:
        """Cut running trajectories short; unfinished tool calls and rewards are lost."""
        self.aborted = True
        for waiting in [response for response in self._responses if response.is_at_tool]:
            self._on_waiting(waiting.name, "")
        self._engine.abort(self._responses)
        self._finish()

    def part_result(self, request: PartRequest) -> PartResult:
        """As the real group runner's result: without trajectories whose reward raised, and without any if
        aborted."""
        outcomes = () if self.aborted else tuple(map(self._outcome, self._responses))
        metas = tuple(outcome for outcome in outcomes if isinstance(outcome, TrajectoryMeta))
        tokens = sum(response.tokens for response in self._responses) + self._lost_tokens
        tries = () if self.aborted else (CROSSED,) * self._num_mixed
        return PartResult(
            key=request.key,
            trajectories=metas,
            failures=(*tries, *(one for one in outcomes if isinstance(one, TrajectoryFailure))),
            failed_tokens=tokens - sum(meta.response_tokens for meta in metas),
            payload=str(request.key),
        )

    def eval_result(self, request: EvalRequest) -> EvalResult:
        """Responses without a reward count as failures, including those of an aborted eval."""
        result = EvalResult(outcomes=tuple(map(self._outcome, self._responses)))
        metas = [outcome for outcome in result.outcomes if isinstance(outcome, TrajectoryMeta)]
        versions = {version for meta in metas for version, _ in meta.version_tokens}
        assert versions <= {request.version}, (
            f"a load during an eval of version {request.version}: {versions}"
        )
        return result

    def _outcome(self, response: SimulatedSequence) -> EvalOutcome:
        if response.rewarded_s > self._loop.time():
            return ABORTED  # also if it has not ended: then its reward is never known
        if response.failure is not None:
            return response.failure
        if response.luck < self._times.failure_ratio:
            return RAISED
        last_tokens = response.calls[-1].turn_tokens if response.calls else response.tokens
        return TrajectoryMeta(
            prompt_tokens=response.prompt_tokens + response.result_tokens,
            response_tokens=response.tokens,
            reward=float(response.luck > 0.5),
            finish_reason="length" if last_tokens == self._times.max_response_tokens else "stop",
            version_tokens=self._engine.version_tokens(response),
            num_turns=1 + sum([not call.is_hold for call in response.calls[: response.num_calls]]),
            tool_s=sum([call.seconds for call in response.calls]),
        )

    def _go_on(self, response: SimulatedSequence, version: int) -> None:
        """Begin, or go on after a tool, once the engine has this version."""
        response.is_holding = False
        if response.is_aborted or response.has_ended or self.aborted:
            return
        if self._engine.version < version:
            self._engine.hold(response, lambda: self._go_on(response, version))
            self._on_slot()
            return
        assert version in (-1, self._engine.version), f"{response.name} needs version {version}"
        if response.has_begun:
            self._engine.continue_after_tool(response)
        else:
            self._engine.submit([response])
        self._on_slot()

    def _call_tool(self, response: SimulatedSequence) -> None:
        call = response.calls[response.num_calls]
        if call.is_hold:
            self._go_on(response, call.version)
            return
        self._on_waiting(response.name, "a tool")
        self._loop.call_later(response.calls[response.num_calls].seconds, self._tool_ended, response)
        if not self._times.hold_slots:
            self._on_slot()

    def _tool_ended(self, response: SimulatedSequence) -> None:
        if response.is_aborted:
            return  # while it was at the tool
        self._on_waiting(response.name, "")
        if failure := response.calls[response.num_calls].failure:
            response.reward_s = 0.0
            response.failure = TrajectoryFailure(failure, f"{response.name}: the tool failed")
            self._engine.abort([response])
            self._ended(response)
        elif self._may_hold:
            self._go_on(response, response.calls[response.num_calls].version)
        else:
            self._engine.continue_after_tool(response)

    def _ended(self, response: SimulatedSequence) -> None:
        if self.aborted:
            return
        self.ended_tokens += response.tokens
        if not self._times.mixes and len(self._engine.version_tokens(response)) > 1 and not response.failure:
            if response.requeues < self._times.mixed_requeues:
                self._sample_again(response)
                return
            response.failure, response.reward_s = CROSSED, 0.0
        self.num_ended += 1
        response.rewarded_s = self._loop.time() + response.reward_s
        self._on_slot()
        # one timer for all rewards: nobody asks for one of them before the last
        if self.num_ended == len(self._responses):
            last_s = max(response.rewarded_s for response in self._responses)
            if last_s > self._loop.time():
                self._loop.call_at(last_s, self._finish)
            else:
                self._finish()

    def _sample_again(self, mixed: SimulatedSequence) -> None:
        assert self._draw_again is not None, "no load comes while an eval runs"
        anew = self._draw_again(mixed.index)
        self._lost_tokens += mixed.tokens
        self._num_mixed += 1
        anew.requeues, anew.on_end, anew.on_turn = mixed.requeues + 1, self._ended, self._call_tool
        self._responses[self._responses.index(mixed)] = anew
        self._engine.submit([anew])

    def _finish(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._on_done(self)
