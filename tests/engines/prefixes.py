"""What the engine port says of cached prefixes, asked of either engine: a group's prompt is computed once,
and after a load nobody uses what older weights have computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from asyncrl_cli.engines.port import Completion
from asyncrl_cli.profile.schema import Interrupt
from tests.engines.made import sampling
from tests.engines.vllm.vllm_world import World

PAGE_TOKENS = 32
PROMPT = [3 + i % 41 for i in range(60)]
GROUP = 8
LONG_TOKENS = 100

Begun = Callable[[World, Interrupt], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def some_tokens(there: World, interrupt: Interrupt) -> AsyncIterator[None]:
    """Responses that were just asked for have begun when the block begins, and not ended."""
    await there.sampled(8)
    yield


class Prompts:
    def __init__(self, there: World) -> None:
        self._engine = there.engine
        self._before = dict(there.engine.counters().sums)

    async def computed(self, responses: int) -> float:
        """Of the tokens of as many prompts, whose responses have ended since the last call."""
        at_least = self._before["prompt_tokens"] + responses * len(PROMPT)
        while self._engine.counters().sums["prompt_tokens"] < at_least:  # noqa: ASYNC110  (just after the last token)
            await asyncio.sleep(0.001)
        now = self._engine.counters().sums
        tokens, cached = (now[key] - self._before[key] for key in ("prompt_tokens", "cached_prompt_tokens"))
        self._before = dict(now)
        assert tokens == responses * len(PROMPT)
        return tokens - cached


async def check_prompt_is_computed_once(there: World, *, rest: int, begun: Begun = some_tokens) -> None:
    """By a group that begins together, and by one that begins while another response runs. `rest`: tokens
    that each other response computes."""
    version = there.newer()
    await there.load(version, "drain")
    prompts = Prompts(there)
    answers = await there.all_of([PROMPT] * GROUP, sampling(20))
    assert await prompts.computed(GROUP) == len(PROMPT) + (GROUP - 1) * rest
    running = asyncio.create_task(there.generate(PROMPT, sampling(LONG_TOKENS)))
    async with begun(there, "drain"):
        later = asyncio.create_task(there.all_of([PROMPT] * 3, sampling(20)))
        await asyncio.sleep(0)
    answers += [*await later, await running]
    assert await prompts.computed(4) == len(PROMPT) % PAGE_TOKENS + 3 * rest
    check_logprobs(there, version, answers)


async def check_nothing_older_is_used(
    there: World, interrupt: Interrupt, *, begun: Begun = some_tokens
) -> None:
    """By new responses to a prompt that others still answer, after a load has interrupted those."""
    await there.load(there.newer(), "drain")
    prompts = Prompts(there)
    older = asyncio.create_task(there.all_of([PROMPT] * 4, sampling(LONG_TOKENS)))
    version = there.newer()
    async with begun(there, interrupt):
        await there.load(version, interrupt)
    newer = await there.all_of([PROMPT] * 2, sampling(20))
    interrupted = await older
    await prompts.computed(6)
    newer += await there.all_of([PROMPT] * 2, sampling(20))
    check_logprobs(there, version, newer)
    assert await prompts.computed(2) <= 2 * (len(PROMPT) % PAGE_TOKENS)  # the new ones share with each other
    if interrupt != "keep-kv":  # these have older keys of their own
        check_logprobs(there, version, interrupted)


def check_logprobs(there: World, version: int, completions: list[Completion]) -> None:
    """Those of that version's tokens are those of a plain forward pass."""
    for completion in completions:
        plain = there.plain(version, PROMPT, completion)
        found = [
            (logprob, expected)
            for logprob, expected, sampled_by in zip(
                completion.logprobs, plain, completion.versions, strict=True
            )
            if sampled_by == version
        ]
        assert [logprob for logprob, _ in found] == pytest.approx([exact for _, exact in found], abs=1e-4)
